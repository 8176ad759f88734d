"""A recipe for a model and a wish, found by trying a few on little text: what `symprune recommend`
calls.

The tries are cells of a sweep: they share the model in memory and its file of results, so a search
that was stopped goes on. What it takes is said before, from one block done in every way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from symprune.checkpoint.load import load_computing
from symprune.checkpoint.record import versions
from symprune.errors import SympruneError
from symprune.jobs import samples, sizes
from symprune.jobs.choosing.choices import (
    KINDS,
    RECIPES,
    Choice,
    Ladder,
    Weights,
    most_trials,
    pick,
    small_enough,
)
from symprune.jobs.estimate.cells import forecast_sweep
from symprune.jobs.estimate.forecast import Forecast, attempt
from symprune.jobs.sweep import Grid, Sweep, check_results, read_results
from symprune.models import hub
from symprune.models.layout import find_layout

Tell = Callable[[str], None]
Tick = Callable[[int, int], None]
Watch = Callable[[str, int, int, int, int, str], None]
Begin = Callable[[int, int, str], None]
KIND = "recommend"


@dataclass(frozen=True)
class Wish:
    """What is wanted of a model: a share of its size, or how much higher its perplexity may be; and
    the text it is tried on. results: the file the tries are kept in."""

    model: str
    size: float | None = None
    loss: float | None = None
    results: Path | None = None
    calibration: str = "builtin"
    nsamples: int = 16
    seqlen: int = 512
    eval_data: str = "builtin"
    eval_windows: int = 8
    dtype: str = "auto"
    device: str = "auto"
    access: hub.Access = field(default_factory=hub.Access)

    @property
    def file(self) -> Path:
        """In the current folder, if not named."""
        name = Path(self.model).name.removesuffix(".gguf")
        return self.results or Path(f"recommend-{name}.jsonl")

    @property
    def shared(self) -> dict[str, Any]:
        """What all tries are calibrated on."""
        return {
            "calibration": self.calibration,
            "nsamples": self.nsamples,
            "seqlen": self.seqlen,
        }


def recommend(
    wish: Wish,
    tell: Tell = lambda _: None,
    watch: Watch = lambda *_: None,
    tick: Tick = lambda *_: None,
    begin: Begin = lambda *_: None,
    go_on: Callable[[Forecast | None], bool] = lambda _: True,
) -> dict[str, Any]:
    """The record of a search: all that was tried, and what is recommended, if anything is. go_on is
    told what it will take, None where that cannot be told, and says whether to go on: if not,
    nothing is tried and the record is empty."""
    begun = time.perf_counter()
    if (wish.size is None) == (wish.loss is None):
        raise SympruneError("Say what is wanted: --size 60% or --perplexity +10%, one of them.")
    check_results(wish.file)
    grid = Grid(
        **wish.shared, eval_data=wish.eval_data, eval_windows=wish.eval_windows,
        values=list(KINDS),
    )  # fmt: skip
    origin, device = hub.resolve(wish.model, wish.access), hub.pick_device(wish.device)
    config = hub.load_config(origin)
    reason = samples.lacks_room(sizes.size_in_memory(config, origin), device)
    if reason is not None:
        raise SympruneError(
            f"Recipes are tried on a model in memory, and {wish.model} is not: {reason}"
        )
    tell(f"Loading {wish.model}")
    model, stored = load_computing(origin, wish.dtype, device, "auto")
    revision = wish.access.revision
    name = f"{wish.model}@{revision}" if revision else wish.model
    sweep = Sweep(model, hub.load_tokenizer(origin), name, grid, wish.file, stored)
    weights = _count(model, 8 * stored.itemsize)
    search = _Search(wish, sweep, weights, tell, watch, tick, begin, go_on, begun)
    try:
        tried = search.for_size() if wish.size is not None else search.for_perplexity()
    except _OnlyAskedError:
        return {}
    return search.record(tried)


def _count(model: Any, bits: int) -> Weights:
    layout = find_layout(model)
    matrices = {id(m.parameter): m.parameter.numel() for m in layout.all_matrices()}
    inside = sum(matrices.values())
    return Weights(inside, sum(p.numel() for p in model.parameters()) - inside, bits)


@dataclass
class _Search:
    """Tries, in the order a wish asks for them."""

    wish: Wish
    sweep: Sweep
    weights: Weights
    tell: Tell
    watch: Watch
    tick: Tick
    begin: Begin
    go_on: Callable[[Forecast | None], bool]
    begun: float  # when the command did

    def for_size(self) -> list[tuple[Choice, dict[str, Any]]]:
        """All that fit, at once."""
        assert self.wish.size is not None
        most = self.wish.size * self.weights.dense_bytes
        choices = small_enough(self.weights, most)
        if not choices:
            least = min(Choice(RECIPES[0], 0.8, kind).bytes(self.weights) for kind in KINDS)
            share = 100 * least / self.weights.dense_bytes
            raise SympruneError(
                f"No recipe makes {self.wish.model} as small as {100 * self.wish.size:g} %: with "
                f"80 % of the weights gone and {KINDS[-1]} values it has {share:.0f} %, for "
                "embeddings and head stay as they are."
            )
        self._foresee(choices, len(choices))
        return self._try(choices)

    def for_perplexity(self) -> list[tuple[Choice, dict[str, Any]]]:
        """One of every ladder, then the next, until all are at their end."""
        assert self.wish.loss is not None
        ladders = [Ladder(kind) for kind in KINDS]
        self._foresee([each.rungs[1] for each in ladders], most_trials(ladders))
        tried: list[tuple[Choice, dict[str, Any]]] = []
        while asked := [each for ladder in ladders if (each := ladder.next()) is not None]:
            came = self._try(asked)
            tried += came
            for choice, result in came:
                ladder = next(each for each in ladders if each.kind == choice.values)
                allowed = (1 + self.wish.loss) * result["dense"]
                ladder.hear(choice, result["perplexity"] <= allowed)
        return tried

    def _try(self, choices: Sequence[Choice]) -> list[tuple[Choice, dict[str, Any]]]:
        recipes = [choice.build(self.wish.shared) for choice in choices]
        results = self.sweep.run(self.watch, self.tick, self.begin, recipes)
        return list(zip(choices, results, strict=True))

    def _foresee(self, choices: Sequence[Choice], count: int) -> None:
        """What it takes, from a block of each kind of choice, of which as many are tried."""
        wish, sweep = self.wish, self.sweep
        done = read_results(wish.file)
        recipes = [choice.build(wish.shared) for choice in choices]
        missing = [recipe for recipe in recipes if sweep.key(recipe) not in done]
        most = count - (len(recipes) - len(missing))
        if not missing:
            self.tell(f"All is in {wish.file} already.")
        else:
            self.tell(f"Timing a block in {len(missing)} ways")
        spent = time.perf_counter() - self.begun
        found = attempt(lambda: forecast_sweep(sweep, missing, wish.device, spent))
        if found is not None:
            what = (
                f"At most {most} tries on {wish.nsamples} x {wish.seqlen} tokens of "
                f"{wish.calibration}, measured on {wish.eval_windows} windows of {wish.eval_data}"
            )
            times = most / max(len(missing), 1)
            seconds = {step: times * each for step, each in found.seconds.items()}
            found = replace(found, what=what, seconds=seconds)
        if not self.go_on(found):
            raise _OnlyAskedError

    def record(self, tried: Sequence[tuple[Choice, dict[str, Any]]]) -> dict[str, Any]:
        wish, weights = self.wish, self.weights
        dense = tried[0][1]["dense"]
        results = [
            {
                "choice": choice.describe(),
                "recipe": result["recipe"],
                "sparsity": choice.sparsity,
                "values": choice.values,
                "bytes": choice.bytes(weights),
                "bits_per_weight": choice.bits(weights),
                "perplexity": result["perplexity"],
                "seconds": result["seconds"],
                "command": choice.command(wish.model, wish.shared),
            }
            for choice, result in tried
        ]
        most = None if wish.size is None else wish.size * weights.dense_bytes
        highest = None if wish.loss is None else (1 + wish.loss) * dense
        return {
            "kind": KIND,
            "model": wish.model,
            "size": wish.size,
            "loss": wish.loss,
            "data": wish.eval_data,
            "windows": wish.eval_windows,
            "seqlen": tried[0][1]["seqlen"],
            "dense": dense,
            "dense_bytes": weights.dense_bytes,
            "tried": results,
            "recommended": pick(results, most, highest),
            "results": str(wish.file),
            "versions": versions(),
        }


class _OnlyAskedError(Exception):
    """What it takes was all that was wanted."""
