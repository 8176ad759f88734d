"""Runs and sweeps to report on, and a page taken apart."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import families
import torch

from symprune import Recipe
from symprune.checkpoint.output_folder import save
from symprune.engine import walk

VOID = {"meta", "link", "img", "br", "wbr", "input", "hr"}


class Page(HTMLParser):
    """A page taken apart; closing tags must match opening ones."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    def having(self, tag: str, name: str, value: str) -> list[dict[str, str | None]]:
        return [a for t, a in self.tags if t == tag and value in (a.get(name) or "").split()]


def cell(key: str, perplexity: float = 40.0, **changes: Any) -> dict[str, Any]:
    recipe = {"method": "ria", "params": {}, "sparsity": 0.5, "group": "row", "seed": 0}
    recipe |= changes.pop("recipe", {})
    values = {"key": key, "recipe": recipe, "description": "ria, 50 % per row", "model": "tiny"}
    values |= {"dense": 30.0, "data": "builtin", "windows": 4, "seqlen": 32, "sparsity": 0.5}
    return values | {"perplexity": perplexity, "seconds": 1.5} | changes


def sweep_file(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def grid() -> list[dict[str, Any]]:
    """Two methods at three sparsities and one pattern; one of them with three seeds."""
    lines = []
    for method, penalty, seeds in (("wanda", 2.0, 1), ("stochria", 1.5, 3)):
        for amount in (0.25, 0.5, 0.625, "2:4"):
            sparsity = amount if isinstance(amount, float) else 0.5
            name = "sparsity" if isinstance(amount, float) else "pattern"
            for seed in range(seeds):
                recipe = {"method": method, "sparsity": None, name: amount, "seed": seed}
                figure = 30 + penalty * 100 * sparsity**3 + seed
                key = f"{method} {amount} {seed}"
                lines.append(cell(key, figure, recipe=recipe, sparsity=sparsity))
    return lines


def make_run(folder: Path, family: str = "smollm", **options: Any) -> Path:
    """A run as `symprune prune` leaves it, from a tiny model."""
    model = families.model(family)
    recipe = Recipe(calibration="builtin", nsamples=2, seqlen=16, **options)
    tokens = torch.randint(3, families.VOCABULARY, (2, 16), generator=torch.manual_seed(0))
    made = walk.prune(model, tokens, recipe, report_error=True)
    figures = {"data": "builtin", "dense": 90.0, "pruned": 99.5, "windows": 4, "seqlen": 16}
    about = {"model": family, "origin": family, "description": recipe.describe()}
    save(folder, model, None, {**about, **made.to_dict(), "perplexity": [figures]}, made.masks)
    return folder


def comparison() -> dict[str, Any]:
    """Four models side by side as `symprune compare` has them, with names that are long."""
    rows = []
    for number, name in enumerate(("dense", "wanda", "ria-and-a-long-name-of-a-run", "packed")):
        layers = [
            {"name": f"model.layers.{block}.mlp.up_proj.weight", "kind": "mlp.up_proj",
             "relative_error": 0.1 * number + 0.02 * block, "held_out_error": 0.12 * number}
            for block in range(6 if number else 0)
        ]  # fmt: skip
        text = {"data": "builtin", "windows": 8, "seqlen": 512, "perplexity": 36.0 + 9 * number}
        rows.append(
            {"given": f"runs/{name}", "label": name, "what": "pruned" if number else "dense",
             "sparsity": 0.5 * bool(number), "description": "ria, 50 % per row",
             "weight_bytes": 10**9 // (number + 1), "bits_per_weight": 16.0 / (number + 1),
             "perplexity": text, "tasks": {"piqa": 0.625}, "layers": layers,
             "speed": {"decode_tokens_per_second": 12.5 + number}}
        )  # fmt: skip
    shared = {"share": 0.5, "by_chance": 0.25}
    written = [
        {"by": row["label"], "text": "one two " * 16, "tokens": 32, "same": 8} for row in rows
    ]
    return {
        "kind": "compare", "models": rows, "tokenizers": 1, "notes": ["Mind this."],
        "overlap": [[shared] * place + [None] * (4 - place) for place in range(4)],
        "samples": [{"prompt": "Once upon a time", "continuations": written}],
        "versions": {"symprune": "1", "torch": "2"},
    }  # fmt: skip


def bench() -> dict[str, Any]:
    """Three models as `symprune bench` has them."""
    text = {"data": "builtin", "windows": 24, "seqlen": 512}
    rows = [
        {"given": f"runs/{name}", "label": name, "engine": "PyTorch", "dtype": "bfloat16",
         "packed": [] if times == 1 else ["int4"], "decode_tokens_per_second": 20.0 * times,
         "decode_times_first": times, "prefill_tokens_per_second": 800.0 / times,
         "prefill_times_first": 1 / times, "first_token_seconds": 0.16 * times,
         "memory_bytes": int(3e8 / times), "process_bytes": int(7e8 / times),
         "file_bytes": int(2.7e8 / times), "bits_per_weight": 16.0 / times,
         "perplexity": {**text, "perplexity": 12.5 * times}}
        for name, times in (("dense", 1.0), ("half-and-a-long-name", 1.5), ("int4", 2.5))
    ]  # fmt: skip
    return {
        "kind": "bench", "models": rows, "notes": ["Mind this."], "versions": {"torch": "2"},
        "plan": {"prompt_tokens": 128, "new_tokens": 32, "rounds": 5, "threads": 2},
        "machine": {"processor": "A processor with a long name", "cores": 2, "other_work": 0.0},
    }  # fmt: skip
