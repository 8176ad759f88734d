"""Many recipes on one model: a grid in, one line of JSON per finished cell out, resumable.

A grid file lists methods, sparsities, patterns, groups, alphas, betas, seeds, refinements, updates,
allocations, values and what is permuted; its cells are their combinations. Cells with the same
calibration set share its tokens and the dense embedding pass. A cell that is in the results file
already is skipped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from symprune import calibration, criteria
from symprune.engine import decide, forward, walk
from symprune.engine.blocks import Blocks
from symprune.engine.head import head_parameters
from symprune.engine.text import bos
from symprune.engine.text.bos import Bos
from symprune.engine.text.self_written import write_for, write_missing
from symprune.engine.text.tokens import cap_seqlen, reads_text, windows_to_try
from symprune.errors import HalfPrunedError, SympruneError
from symprune.eval.perplexity import perplexity
from symprune.jobs.quality.overlap import warn
from symprune.machine import durable
from symprune.machine.compute import name_of
from symprune.maskset import MaskSet
from symprune.models.layout import find_layout
from symprune.recipe import Recipe
from symprune.validation import check_names, has_kinds, parse_json, read_mapping
from symprune.values.bits import packed_bits
from symprune.values.grid import GRIDS

RESULT = {
    **dict.fromkeys(("key", "model", "description", "data"), str),
    **dict.fromkeys(("dense", "perplexity", "sparsity", "seconds"), float),
    "recipe": dict,
}
"""What every line of a file of results has."""


@dataclass(frozen=True)
class Grid:
    """The lists that are combined, and the settings all cells share."""

    methods: list[Any] = field(default_factory=lambda: ["ria"])
    sparsities: list[float] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=lambda: ["row"])
    alphas: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    refinements: list[Any] = field(default_factory=lambda: [None])
    updates: list[Any] = field(default_factory=lambda: [None])
    allocations: list[Any] = field(default_factory=lambda: [None])
    values: list[Any] = field(default_factory=lambda: [None])
    reconstructions: list[Any] = field(default_factory=lambda: [None])
    permutes: list[Any] = field(default_factory=lambda: [None])
    token_limits: list[float | None] = field(default_factory=lambda: [None])
    values_head: str | None = None
    calibration: str = "c4"
    nsamples: int = 128
    seqlen: int = 2048
    self_samples: int | None = None
    calibration_seed: int | None = None
    bos: str = "auto"
    eval_data: str = "wikitext2"
    valid_data: str | None = None  # a second text, on which choices may be made
    eval_windows: int | None = None
    report_error: bool = False

    @classmethod
    def load(cls, path: Path) -> Grid:
        return cls.from_dict(read_mapping(path, "grid"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Grid:
        known = {f.name: f for f in fields(cls)}
        check_names(values, known, "A grid")
        for name, value in values.items():
            if str(known[name].type).startswith("list") and not isinstance(value, list):
                raise SympruneError(f"{name} of a grid is a list, not {value!r}.")
        windows = values.get("eval_windows")
        if windows is not None and not (type(windows) is int and windows > 0):
            raise SympruneError(f"eval_windows must be a whole number above 0, not {windows!r}.")
        return cls(**values)

    def recipes(self) -> list[Recipe]:
        """Every cell's recipe, once. A parameter goes only to methods that have it."""
        amounts: list[dict[str, Any]] = [{"sparsity": s} for s in self.sparsities]
        amounts += [{"pattern": p} for p in self.patterns]
        unique: dict[str, Recipe] = {}
        combinations = itertools.product(
            self.methods,
            amounts or [{}],
            self.groups,
            self.refinements,
            self.updates,
            self.allocations,
            self.values,
            self.reconstructions,
            self.permutes,
            self.token_limits,
            self.seeds,
        )
        for (
            method, amount, group, refine, update, allocate, values, reconstruct, permute, limit,
            seed,
        ) in combinations:  # fmt: skip
            named = dict(method) if isinstance(method, Mapping) else {"name": method}
            name = str(named.pop("name", ""))
            for params in self._params(name, named):
                recipe = Recipe(
                    method=name,
                    params=params,
                    **amount,
                    group="row" if "pattern" in amount else group,
                    refine=refine,
                    update=update,
                    allocate=None if "pattern" in amount else allocate,
                    values=values,
                    reconstruct=reconstruct,
                    permute=permute if "pattern" in amount else None,
                    values_head=self.values_head,
                    token_limit=limit,
                    calibration=self.calibration,
                    nsamples=self.nsamples,
                    seqlen=self.seqlen,
                    self_samples=self.self_samples,
                    seed=seed,
                    calibration_seed=self.calibration_seed,
                    bos=self.bos,
                )
                unique.setdefault(json.dumps(recipe.to_dict(), sort_keys=True), recipe)
        if not unique:
            raise SympruneError("A list of the grid is empty, so there is nothing to combine.")
        return list(unique.values())

    def _params(self, method: str, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        defaults = criteria.get(method).defaults
        lists = {"alpha": self.alphas, "beta": self.betas}
        open_lists = {
            name: values
            for name, values in lists.items()
            if values and name in defaults and name not in given
        }
        for chosen in itertools.product(*open_lists.values()):
            yield {**given, **dict(zip(open_lists, chosen, strict=True))}


@dataclass
class Sweep:
    """A grid on a loaded dense model, which is dense again after every cell. stored is the type its
    weights would be written in, if not the one they are computed in."""

    model: Any
    tokenizer: Any
    name: str
    grid: Grid
    results: Path
    stored: torch.dtype | None = None

    def __post_init__(self) -> None:
        self._begin = Bos(self.grid.bos, None, "not decided yet")
        self._embedded: dict[
            tuple[Any, ...], tuple[Tensor, Tensor, Tensor | None, forward.Activations]
        ] = {}
        self._warned: tuple[Any, list[str]] = (None, [])
        self._dense: list[tuple[Tensor, Tensor]] = []

    def run(
        self,
        watch: walk.Watch = lambda *_: None,
        tick: Callable[[int, int], None] = lambda *_: None,
        begin: Callable[[int, int, str], None] = lambda *_: None,
        recipes: list[Recipe] | None = None,
        finish: Callable[[int, dict[str, Any]], None] = lambda *_: None,
    ) -> list[dict[str, Any]]:
        """Do what is not done yet; the results of all cells (or of `recipes`), in order. finish is
        given each, those that were done before as well."""
        recipes = self.grid.recipes() if recipes is None else recipes
        check_results(self.results)
        done = read_results(self.results)
        seqlen, _ = cap_seqlen(self.model.config, self.grid.seqlen)
        sources = {"perplexity": self.grid.eval_data, "valid": self.grid.valid_data}
        texts = {
            name: calibration.evaluation_tokens(source, self.tokenizer)
            for name, source in sources.items()
            if source is not None
        }
        self._dense = [(each, each.detach().clone()) for each in self.changing(recipes)]
        dense: dict[str, float] | None = None
        for number, recipe in enumerate(recipes):
            begin(number, len(recipes), recipe.describe())
            key = self.key(recipe)
            if key in done:
                finish(number, done[key])
                continue
            if dense is None:
                self._begin = self._decide_bos()
                dense = self._perplexities(texts, seqlen, tick)
            try:
                done[key] = self._cell(key, recipe, texts, seqlen, dense, watch, tick)
            except HalfPrunedError as error:  # dense again in a moment
                raise SympruneError(str(error.__cause__)) from error
            finally:
                self._restore()
            append_result(self.results, done[key])
            finish(number, done[key])
        begin(len(recipes), len(recipes), "")
        return [done[self.key(recipe)] for recipe in recipes]

    def key(self, recipe: Recipe) -> str:
        """What makes two cells the same: model, recipe and how they are measured."""
        grid = self.grid
        facts = [self.name, recipe.to_dict(), grid.eval_data, grid.eval_windows, grid.report_error]
        facts += [str(self.model.dtype), str(self.stored or self.model.dtype)]
        facts += [grid.valid_data] if grid.valid_data is not None else []
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def _cell(
        self,
        key: str,
        recipe: Recipe,
        texts: dict[str, Tensor],
        seqlen: int,
        dense: dict[str, float],
        watch: walk.Watch,
        tick: Callable[[int, int], None],
    ) -> dict[str, Any]:
        start = time.perf_counter()
        embedded = None
        data: Any = self.tokenizer
        written: Tensor | None = None
        watched: Tensor | None = None
        needs = decide.needs(recipe, self.grid.report_error)
        if reads_text(recipe, needs):
            data, written, watched, embedded = self._embed(recipe, seqlen)
        report = walk.prune(
            self.model,
            data,
            recipe,
            watch=watch,
            report_error=self.grid.report_error,
            blocks=Blocks(find_layout(self.model), embedded, self.stored),
            held_out=watched,
            written=written,
        )
        seconds = time.perf_counter() - start
        result = {
            "key": key,
            "model": self.name,
            "recipe": recipe.to_dict(),
            "description": recipe.describe(),
            "data": self.grid.eval_data,
            "windows": self.grid.eval_windows,
            "seqlen": seqlen,
            "bos": self._begin.to_dict(),
            "compute_dtype": name_of(self.model.dtype),
            "dense": dense["perplexity"],
            **({"dense_valid": dense["valid"]} if "valid" in dense else {}),
            **self._perplexities(texts, seqlen, tick),
            "notes": self._warn(data, texts, seqlen),
            "sparsity": report.sparsity,
            "bits_per_weight": self._bits_per_weight(recipe, report.masks),
            "seconds": round(seconds, 2),
        }
        for name in ("relative_error", "held_out_error"):
            found = [layer.figures[name] for layer in report.layers if name in layer.figures]
            result |= {name: fmean(found)} if found else {}
        return result

    def _bits_per_weight(self, recipe: Recipe, masks: MaskSet) -> float:
        """What a prunable weight takes when the cell's model is packed."""
        grid = GRIDS[recipe.rounding.name] if recipe.rounding else None
        floats = 8 * (self.stored or self.model.dtype).itemsize
        matrices = list(find_layout(self.model).all_matrices())
        keeps = [m.slice_of(masks[m.parameter_name]) for m in matrices]
        weights = sum(keep.numel() for keep in keeps)
        return sum(packed_bits(keep, floats, grid) for keep in keeps) / weights

    def _perplexities(
        self, texts: dict[str, Tensor], seqlen: int, tick: Callable[[int, int], None]
    ) -> dict[str, float]:
        windows, first = self.grid.eval_windows, self._begin.token
        return {
            name: perplexity(self.model, ids, seqlen, windows, tick, first).perplexity
            for name, ids in texts.items()
        }

    def _warn(self, data: Any, texts: dict[str, Tensor], seqlen: int) -> list[str]:
        """What of the calibration tokens is in the evaluation text; looked for once a set."""
        if data is not self._warned[0]:
            settings = (texts["perplexity"], self.grid.eval_data, seqlen, self.grid.eval_windows)
            self._warned = data, warn(data, *settings)
        return self._warned[1]

    def _decide_bos(self) -> Bos:
        """Whether windows begin with BOS: one answer for all cells, from the dense model."""
        losses = bos.in_memory(self.model)
        return bos.decide(self.grid.bos, self.tokenizer, self.model.config, losses)

    def _embed(
        self, recipe: Recipe, seqlen: int
    ) -> tuple[Tensor, Tensor, Tensor | None, forward.Activations]:
        """Calibration tokens, the model's own and held-out ones, and all of them embedded; only the
        last set is kept."""
        tried = windows_to_try(recipe)
        which = (
            recipe.calibration, recipe.nsamples, seqlen, recipe.text_seed, recipe.self_samples,
            tried,
        )  # fmt: skip
        if which not in self._embedded:
            settings = (
                recipe.calibration, self.tokenizer, recipe.nsamples, seqlen, recipe.text_seed,
            )  # fmt: skip
            first = self._begin.token
            tokens = calibration.calibration_tokens(*settings, own=True)
            watched = calibration.held_out_tokens(*settings, tried)
            tokens, watched = write_missing(self.model, self.tokenizer, tokens, watched, recipe)
            tokens = calibration.begin_with(tokens, first)
            written = write_for(self.model, tokens, recipe, first)
            watched = None if watched is None else calibration.begin_with(watched, first)
            every = [tokens, written] if watched is None else [tokens, written, watched]
            with forward.ready(self.model):
                embedded = forward.embed(find_layout(self.model), torch.cat(every))
            self._embedded = {which: (tokens, written, watched, embedded)}
        return self._embedded[which]

    @torch.no_grad()
    def _restore(self) -> None:
        for parameter, dense in self._dense:
            parameter.copy_(dense)

    def changing(self, recipes: list[Recipe]) -> list[Tensor]:
        """The parameters a cell may change, each once: where channels are permuted, all."""
        if any(recipe.permuted_parts for recipe in recipes):
            return list(self.model.parameters())
        found = {id(m.parameter): m.parameter for m in find_layout(self.model).all_matrices()}
        found |= {id(each): each for each in head_parameters(self.model).values()}
        return list(found.values())


def read_results(path: Path, kinds: Mapping[str, type] = RESULT) -> dict[str, dict[str, Any]]:
    """Finished cells by key; a line that is none, cut short by an interruption, does not count.
    kinds: what every line has, if they are not those of a sweep."""
    found: dict[str, dict[str, Any]] = {}
    if not path.exists():
        return found
    for line in path.read_bytes().splitlines():
        try:
            result = parse_json(line)
        except ValueError:
            continue
        if has_kinds(result, kinds):
            found[result["key"]] = result
    return found


def check_results(path: Path) -> None:
    """Fail before any work where results cannot be added: only a file of results is continued."""
    if path.is_dir():
        raise SympruneError(f"The output {path} is a folder, not a file.")
    if not path.exists():
        return
    if not path.is_file():
        raise SympruneError(f"The output {path} is not a file.")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise SympruneError(f"Cannot read {path}: {error.strerror}.") from error
    *whole, cut_short = lines
    begin = b'{"key": "'
    begun = cut_short[: len(begin)] == begin[: len(cut_short)]
    if not begun or not all(line.startswith(begin) for line in whole):
        raise SympruneError(
            f"The output {path} was not written by a sweep, so nothing is added to it."
        )


def append_result(path: Path, result: Mapping[str, Any]) -> None:
    """Add a line, on disk before the next cell starts, in place of one that was cut short."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.append_line(path, json.dumps(result))
    except OSError as error:
        raise SympruneError(f"Cannot write {path}: {error.strerror}.") from error


def over_seeds(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per recipe, with mean and standard deviation of the perplexity over its seeds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        recipe = {k: v for k, v in result["recipe"].items() if "seed" not in k}
        groups.setdefault(json.dumps(recipe, sort_keys=True), []).append(result)
    rows = []
    for cells in groups.values():
        values = [cell["perplexity"] for cell in cells]
        finite = all(map(math.isfinite, values))  # of a model that is broken, it may not be
        spread = stdev(values) if len(values) > 1 and finite else None
        figures = {"perplexity": fmean(values), "deviation": spread, "seeds": len(values)}
        if all("valid" in cell for cell in cells):
            figures["valid"] = fmean(cell["valid"] for cell in cells)
        rows.append({**cells[0], **figures, "seconds": fmean(cell["seconds"] for cell in cells)})
    return rows
