"""The text of a model card: metadata the hub reads, what was done and measured, how to load and to
repeat it. Every figure is one of the record's; equal records make equal cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import yaml

from symprune.card.base import CARRIED
from symprune.card.forms import LIBRARIES, SECTIONS
from symprune.card.plan import Plan, plan_of, write_block
from symprune.validation import is_number
from symprune.wording import in_brackets

DATA_SETS = {"c4": "allenai/c4", "wikitext2": "Salesforce/wikitext"}
NAMES = {"c4": "C4", "wikitext2": "WikiText-2", "builtin": "Python's documentation"}
UNKNOWN = "the base model"


def write_card(record: Mapping[str, Any], packed: bool = False) -> str:
    """The card of a folder with this record, which may say little: that of another program's
    checkpoint is empty."""
    base = dict(record.get("base") or {})
    name = _one_line(base.get("name") or record.get("origin") or "") or UNKNOWN
    plan = plan_of(record)
    parts = [
        _front_matter(base, record, packed),
        f"# {_title(name, record)}\n",
        "\n".join(_verdict(name, record)) + "\n",
        *_section("Recipe", _recipe(record, plan)),
        *_section("How it was measured", _measured(record)),
        *_section("How to load it", [SECTIONS[packed]]),
        *_section("Limits", _limits(base, name, record)),
        *_section("How to repeat it", _repeating(plan, name)),
    ]
    return "\n".join(parts)


def _front_matter(base: Mapping[str, Any], record: Mapping[str, Any], packed: bool) -> str:
    values: dict[str, Any] = {"base_model": base["id"]} if "id" in base else {}
    values |= {name: base[name] for name in CARRIED if name in base}
    begun = yaml.safe_dump(values, sort_keys=False, allow_unicode=True) if values else ""
    recipe = record.get("recipe") or {}
    tags = ["symprune", "pruned", "sparse"] if record.get("removed") else ["symprune"]
    tags += [recipe["pattern"]] if recipe.get("pattern") else []
    tags += ["quantized"] if recipe.get("values") else []
    used = DATA_SETS.get(str(recipe.get("calibration")))
    rest = {
        "pipeline_tag": "text-generation",
        "tags": tags,
        **({"datasets": [used]} if used else {}),
    }
    ended = yaml.safe_dump(rest, sort_keys=False, allow_unicode=True)
    return f"---\n{begun}{LIBRARIES[packed]}{ended}---\n"


def _title(name: str, record: Mapping[str, Any]) -> str:
    described = _one_line(record.get("description", ""))
    return f"{name}: {described}" if described else f"{name}, packed"


def _verdict(name: str, record: Mapping[str, Any]) -> Iterator[str]:
    """What happened, in one sentence."""
    if "sparsity" not in record:
        yield f"The weights of {name}, stored by [symprune](#how-to-load-it)."
        return
    share = f"{100 * record['sparsity']:.4g} %"
    done = f"{share} of the weights in the decoder blocks of {name} are zero"
    if not record.get("removed"):
        done = f"All weights of {name} are kept"
    rounding = (record.get("recipe") or {}).get("values")
    if rounding:
        done += f", and those that stay are {rounding['name']} numbers"
    changes = [_change(entry) for entry in _perplexities(record)]
    yield f"{done}; {'; '.join(changes)}." if changes else f"{done}."


def _change(entry: Mapping[str, Any]) -> str:
    dense, pruned = float(entry["dense"]), float(entry["pruned"])
    more = in_brackets(dense, pruned)
    return f"perplexity on {_text_name(entry['data'])} {dense:.2f} -> {pruned:.2f}{more}"


def _perplexities(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    entries = record.get("perplexity") or []
    return [each for each in entries if is_number(each.get("dense")) and is_number(each["pruned"])]


def _recipe(record: Mapping[str, Any], plan: Plan | None) -> Iterator[str]:
    if not record.get("recipe"):
        return
    yield f"{_one_line(record.get('description', ''))}."
    told = plan.without_folders("").recipe if plan else record["recipe"]
    yield ""
    yield "| setting | value |\n|---|---|"
    for name, value in told.items():
        if value != {} and value is not False:
            yield f"| {name} | {_cell(value)} |"


def _measured(record: Mapping[str, Any]) -> Iterator[str]:
    entries = _perplexities(record)
    if entries:
        yield "| perplexity on | windows x tokens | dense | this model |\n|---|---|---|---|"
        for entry in entries:
            size = f"{entry['windows']} x {entry['seqlen']}"
            figures = f"{entry['dense']:.3f} | {entry['pruned']:.3f}"
            yield f"| {_text_name(entry['data'])} | {size} | {figures} |"
        yield ""
        yield (
            "Perplexity is exp(mean negative log likelihood of a token), over windows of held-out "
            "text that do not overlap."
        )
    elif "sparsity" in record:
        yield "Perplexity was not measured (`--no-eval`)."
    yield ""
    yield from _figures(record)


def _figures(record: Mapping[str, Any]) -> Iterator[str]:
    """What else the record says, a line each."""
    if {"removed", "prunable"} <= record.keys():
        yield f"- {record['removed']:,} of {record['prunable']:,} weights were removed."
    for name, what in (("held_out_error", "held-out"), ("relative_error", "calibration")):
        found = [layer[name] for layer in record.get("layers", ()) if name in layer]
        if found:
            mean = sum(found) / len(found)
            yield f"- Relative error of a layer's output on {what} tokens, mean: {mean:.3g}."
    if is_number(record.get("bits_per_weight")):
        bits = f"{record['bits_per_weight']:.2f}"
        yield f"- As pruned: {bits} bits a weight of these matrices, masks and scales included."
    if "compute_dtype" in record:
        stored = f"Stored in {record['dtype']}, computed" if "dtype" in record else "Computed"
        yield f"- {stored} in {record['compute_dtype']} on {record.get('device', 'cpu')}."
    made = record.get("versions")
    if made:
        yield f"- Made with {', '.join(f'{name} {number}' for name, number in made.items())}."
    yield from (f"- {_one_line(note)}" for note in record.get("notes", ()))


def _limits(base: Mapping[str, Any], name: str, record: Mapping[str, Any]) -> Iterator[str]:
    yield f"- Whatever limits and biases {name} has, this model has too."
    measured = sorted({_text_name(entry["data"]) for entry in _perplexities(record)})
    if record.get("removed") or (record.get("recipe") or {}).get("values"):
        told = f"on {' and '.join(measured)}" if measured else "nowhere"
        yield (
            f"- Pruning costs quality. What it costs was measured {told}; other languages, tasks "
            "and long texts may lose more. Measure yours before you rely on it."
        )
        yield (
            "- Its safety was not tested: what a chat model was taught to refuse may come through."
        )
    licence = base.get("license_name") or base.get("license")
    if licence:
        yield f"- Licence: {_one_line(licence)}, as the base model's."
    else:
        yield "- Licence: that of the base model, whose files name none."


def _repeating(plan: Plan | None, name: str) -> Iterator[str]:
    if plan is None:
        yield "The record (`symprune.json`) does not say enough to do this again by one command."
        return
    yield "```console\n$ symprune repeat README.md\n```\n"
    yield (
        "does it again, to the same bytes with the same versions; `--model` says where the base "
        "model is, if not where it was. `symprune prune --recipe README.md --model MODEL` applies "
        "the recipe to another model."
    )
    for each in plan.files:
        yield ""
        yield f"It reads the {each.describe()}, which is not in this folder."
    yield f"\n{write_block(plan.without_folders(name))}"


def _section(title: str, lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    body = "\n".join(lines).strip("\n")
    if body:
        yield f"## {title}\n\n{body}\n"


def _text_name(source: Any) -> str:
    """A text as a reader may read it: of a file its name alone."""
    told = str(source)
    if told in NAMES:
        return NAMES[told]
    is_place = told.startswith(("/", "~", ".")) or "\\" in told
    return f"`{_one_line(PurePath(told).name if is_place else told)}`"


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{key}: {each}" for key, each in value.items())
    return _one_line(value).replace("|", "\\|")


def _one_line(value: Any) -> str:
    """A text that stays on its line, whoever wrote it."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
