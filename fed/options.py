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
        value = yaml.safe_load(text)
        if isinstance(value, str):  # YAML reads 1e-3 as text
            value = _number(value)
        options[name.strip().replace("-", "_")] = value
    return options


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
