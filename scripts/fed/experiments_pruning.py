"""Federated pruning of a real model: what the clients' domains bring, what noise costs, and what
statistics give that votes and averages do not.

    python scripts/fed/experiments_pruning.py [domains] [noise] [aggregates] --output cells.jsonl

Needs SYMPRUNE_ASSETS with WikiText-2 and Penn Treebank; Python's documentation comes with Python.
A finished cell is kept in the output file and not run again.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from experiment_tables import show
from torch import Tensor

from symprune import calibration
from symprune.checkpoint.load import load_with_tokenizer
from symprune.cli import console
from symprune.engine import walk
from symprune.errors import SympruneError
from symprune.eval.perplexity import perplexity
from symprune.fed import Privacy, prune
from symprune.fed.privacy import noise_multiplier
from symprune.fed.threads import limited_threads
from symprune.recipe import Recipe

DOMAINS = ("wikitext2", "ptb", "python")
VALIDATION = "wikitext2 valid"
DELTA = 1e-5
EPSILONS = (8.0, 400.0, 3000.0, 3e4, 1e6)
EVAL_LENGTH, EVAL_WINDOWS = 256, 8


def text(domain: str, split: str) -> str:
    if domain == VALIDATION:
        name = "text/wikitext-2-raw/wiki.valid.first100KB.raw"
        return calibration.text(str(Path(os.environ["SYMPRUNE_ASSETS"]) / name), split)
    if domain == "ptb":
        name = "ptb.valid.txt" if split == "train" else "ptb.test.txt"
        return calibration.text(str(Path(os.environ["SYMPRUNE_ASSETS"]) / "text/ptb" / name), split)
    return calibration.text("builtin" if domain == "python" else domain, split)


@dataclass
class Bench:
    """The dense model, the texts, and the cells that are done."""

    name: str
    output: Path
    recipe: Recipe
    model: Any = None
    tokenizer: Any = None
    dense: dict[str, Tensor] = field(default_factory=dict)
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.output.exists():
            lines = [json.loads(line) for line in self.output.read_text().splitlines()]
            self.done = {line["cell"]: line for line in lines}

    def load(self) -> None:
        if self.model is None:
            self.model, self.tokenizer = load_with_tokenizer(self.name, device="cpu")
            self.dense = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(self.dense)

    def tokens(self, domain: str, samples: int, length: int, seed: int = 0) -> Tensor:
        ids = calibration.encode(self.tokenizer, text(domain, "train"))
        return calibration.windows(ids, samples, length, seed, domain)

    def cell(
        self,
        name: str,
        make: Any,
        domains: tuple[str, ...] = DOMAINS,
        windows: int = EVAL_WINDOWS,
    ) -> dict[str, Any]:
        """Prune with `make`, measure on the domains, keep the result."""
        if name not in self.done:
            self.load()
            start = time.perf_counter()
            found = {"cell": name, "recipe": self.recipe.describe(), **make()}
            for domain in domains:
                ids = calibration.encode(self.tokenizer, text(domain, "test"))
                measured = perplexity(self.model, ids, EVAL_LENGTH, windows)
                found[domain] = round(measured.perplexity, 2)
            found["seconds"] = round(time.perf_counter() - start)
            self.done[name] = found
            with self.output.open("a") as file:
                file.write(json.dumps(found) + "\n")
        return self.done[name]


def domains(bench: Bench, samples: int = 8, length: int = 256) -> None:
    """Each client's data alone, the weights alone, and all clients' statistics together."""

    def alone(domain: str) -> dict[str, Any]:
        walk.prune(bench.model, bench.tokens(domain, samples, length), bench.recipe)
        return {}

    def weights() -> dict[str, Any]:
        walk.prune(bench.model, None, bench.recipe.with_changes(method="ri"))
        return {}

    def together() -> dict[str, Any]:
        clients = [bench.tokens(domain, samples, length) for domain in DOMAINS]
        traffic = prune(bench.model, clients, bench.recipe).traffic.to_dict()
        return {"traffic": {k: v for k, v in traffic.items() if k != "blocks"}}

    rows = [bench.cell("dense", dict), bench.cell("weights alone (ri)", weights)]
    rows += [bench.cell(f"{domain} alone", lambda d=domain: alone(d)) for domain in DOMAINS]
    rows.append(bench.cell("federated", together))
    keys = ("cell", *DOMAINS)
    show(f"{bench.recipe.describe()}: perplexity", [{k: row[k] for k in keys} for row in rows])
    print(rows[-1]["traffic"])


def noise(bench: Bench, samples: int = 16, length: int = 64) -> None:
    """WikiText and PTB are private, Python's documentation is public."""
    reference_windows, private_domains, windows = 8, DOMAINS[:2], 4

    def tokens() -> tuple[list[Tensor], Tensor]:
        clients = [bench.tokens(domain, samples, length) for domain in private_domains]
        return clients, bench.tokens("python", reference_windows, length)

    def exact() -> dict[str, Any]:
        prune(bench.model, tokens()[0], bench.recipe)
        return {}

    def public() -> dict[str, Any]:
        walk.prune(bench.model, tokens()[1], bench.recipe)
        return {}

    def private(epsilon: float) -> dict[str, Any]:
        clients, reference = tokens()
        privacy = Privacy(epsilon, DELTA)
        result = prune(
            bench.model, clients, bench.recipe, privacy=privacy, reference=reference, noise_seed=0
        )
        return {"privacy": result.privacy}

    rows = [bench.cell("no noise", exact, private_domains, windows)]
    rows.append(bench.cell("public text alone", public, private_domains, windows))
    for epsilon in EPSILONS:
        make = lambda e=epsilon: private(e)  # noqa: E731
        row = bench.cell(f"epsilon {epsilon:g}", make, private_domains, windows)
        multiplier, blocks = row["privacy"]["noise_multiplier"], row["privacy"]["releases"]
        needed = samples * noise_multiplier(8.0, DELTA, 1.0, blocks) / multiplier
        rows.append({**row, "multiplier": multiplier, "windows for epsilon 8": round(needed)})
    keys = ("cell", "multiplier", "windows for epsilon 8", *private_domains)
    title = f"{bench.recipe.describe()}, {samples} windows of {length} tokens a client: perplexity"
    rows.sort(key=lambda row: row.get("multiplier", 0.0))
    show(title, [{k: row.get(k) for k in keys} for row in rows])


def aggregates(bench: Bench, samples: int = 4, length: int = 128) -> None:
    """What clients may send, at 50 %: statistics, votes or averages; against each of them alone."""
    measured, windows = (VALIDATION,), 12
    wanda = Recipe(method="wanda")
    lsq, swap = wanda.with_changes(update="lsq"), wanda.with_changes(refine="swap")

    def together(recipe: Recipe, **options: Any) -> dict[str, Any]:
        clients = [bench.tokens(domain, samples, length) for domain in DOMAINS]
        traffic = prune(bench.model, clients, recipe, **options).traffic.to_dict()
        return {
            "recipe": recipe.describe(),
            "up": traffic["bytes_up"],
            "down": traffic["bytes_down"],
        }

    def alone(domain: str) -> dict[str, Any]:
        walk.prune(bench.model, bench.tokens(domain, samples, length), wanda)
        return {"recipe": wanda.describe()}

    makes: dict[str, Any] = {
        "wanda, statistics": lambda: together(wanda),
        "wanda, votes": lambda: together(wanda, aggregate="votes"),
        "wanda, averages": lambda: together(wanda, aggregate="average"),
        **{f"wanda, {domain} alone": lambda d=domain: alone(d) for domain in DOMAINS},
        "lsq, statistics": lambda: together(lsq),
        "lsq, statistics of 16 bits": lambda: together(lsq, gram_bits=16),
        "swap, statistics of 16 bits": lambda: together(swap, gram_bits=16),
        "lsq, averages": lambda: together(lsq, aggregate="average"),
    }
    rows = [bench.cell("dense, validation", dict, measured, windows)]
    rows += [bench.cell(name, make, measured, windows) for name, make in makes.items()]
    keys = ("cell", "up", "down", *measured)
    show("Perplexity, and bytes of all clients", [{k: row.get(k) for k in keys} for row in rows])


EXPERIMENTS = {"domains": domains, "noise": noise, "aggregates": aggregates}


def main(
    experiments: Annotated[
        list[str] | None, typer.Argument(help="domains, noise, aggregates")
    ] = None,
    model: str = "smollm2-135m",
    method: str = "ria",
    pattern: str = "2:4",
    output: Path = Path("fed-prune.jsonl"),
) -> None:
    """Run the experiments and print their tables."""
    if "SYMPRUNE_ASSETS" not in os.environ:
        raise SympruneError("SYMPRUNE_ASSETS must name the folder with WikiText-2 and PTB.")
    console.prepare_libraries()
    bench = Bench(model, output, Recipe(method=method, pattern=pattern))
    with limited_threads(), torch.no_grad():
        for name in experiments or list(EXPERIMENTS):
            EXPERIMENTS[name](bench)


if __name__ == "__main__":
    typer.run(main)
