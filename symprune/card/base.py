"""The model a folder was made from, as the card names it: its id on the hub, its licence and its
languages, from the model's own card, its configuration or a GGUF file's entries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from symprune.card.gguf_facts import read_gguf_facts
from symprune.machine.checksums import CARD
from symprune.validation import parse_json, parse_yaml

CONFIG = "config.json"
LICENCE_FILES = (
    "LICENSE", "LICENSE.md", "LICENSE.txt", "LICENCE", "NOTICE", "NOTICE.txt", "USE_POLICY.md",
)  # fmt: skip
"""Files of a model that its licence may ask to hand on with it."""
CARRIED = ("license", "license_name", "license_link", "language")
LONGEST = 200
LARGEST = 2**20
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
HUB_PAGE = re.compile(rf"https://huggingface\.co/({HUB_ID.pattern})/?")


def describe_base(
    name: str, folder: Path | None, gguf: Path | None, hub_id: str | None
) -> dict[str, Any]:
    """What is known: `name` as a reader may read it, and where it is found out `id`, `license`,
    `license_name`, `license_link` and `language`.

    folder: where its files are on this machine, if it is made of such. hub_id: if it is from there.
    """
    found: dict[str, Any] = {}
    if gguf is not None:
        found = _of_gguf(read_gguf_facts(gguf))
    elif folder is not None:
        found = {**_of_config(folder), **_of_card(read_front_matter(folder / CARD))}
    if hub_id is not None:
        found["id"] = hub_id
    return {"name": name, **found}


def read_front_matter(card: Path) -> dict[str, Any]:
    """The names and values a card begins with; nothing where there is no card or it has none."""
    try:
        if not card.is_file() or card.stat().st_size > LARGEST:
            return {}
        lines = card.read_text(encoding="utf-8").splitlines()
        if not lines or lines[0].strip() != "---":
            return {}
        end = next(n for n, line in enumerate(lines[1:], 1) if line.strip() == "---")
        values = parse_yaml("\n".join(lines[1:end]))
    except (OSError, ValueError, StopIteration, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _of_card(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: values[name] for name in CARRIED if _is_plain(values.get(name))}
    base = values.get("base_model")
    base = base[0] if isinstance(base, list) and len(base) == 1 else base
    if isinstance(base, str) and HUB_ID.fullmatch(base):
        found["id"] = base
    return found


def _of_config(folder: Path) -> dict[str, Any]:
    """Where the model was loaded from when it was saved, if that was the hub; some name a licence
    as well."""
    try:
        config = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
        name, licence = config.get("_name_or_path"), config.get("license")
    except (OSError, ValueError, AttributeError):
        return {}
    found = {"license": licence} if isinstance(licence, str) and _is_plain(licence) else {}
    # A relative folder looks the same: who has one of that name has loaded it from there.
    if isinstance(name, str) and HUB_ID.fullmatch(name) and not Path(name).exists():
        found["id"] = name
    return found


def _of_gguf(facts: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "license": facts.get("license"),
        "license_name": facts.get("license.name"),
        "license_link": facts.get("license.link"),
        "language": facts.get("languages"),
    }
    found = {name: value for name, value in found.items() if _is_plain(value)}
    pages = ("source.huggingface.repository", "repo_url", "source.url", "base_model.0.repo_url")
    for page in (facts.get(name) for name in pages):
        match = (
            re.fullmatch(HUB_ID, page) or HUB_PAGE.fullmatch(page)
            if isinstance(page, str)
            else None
        )
        if match:
            return {**found, "id": match[match.re.groups]}
    return found


def _is_plain(value: Any) -> bool:
    """Whether a value is a short text of one line, or a few of them."""
    if isinstance(value, list):
        return 0 < len(value) <= 100 and all(isinstance(v, str) and _is_plain(v) for v in value)
    return isinstance(value, str) and 0 < len(value) <= LONGEST and value.isprintable()
