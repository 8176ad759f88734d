"""Hyper-parameters as they are typed on a command line."""

from __future__ import annotations

from typing import Any

import yaml

from symprune.errors import SympruneError


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """`name=value` pairs; values are read as YAML: 0.1, true, [0.1, 0.5] are what they seem."""
    options = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise SympruneError(f"--set {pair!r} is not of the form name=value.")
        options[name.strip().replace("-", "_")] = numbers(yaml.safe_load(text))
    return options


def numbers(value: Any) -> Any:
    """YAML reads 1e-3 as text; here it is a number, wherever it stands."""
    if isinstance(value, dict):
        return {key: numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [numbers(entry) for entry in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
