"""A block is entered once: measured while it is dense, pruned, where asked for trained, and run
again for the next block's inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from torch import nn

from symprune.engine import gradients
from symprune.engine.blocks import Blocks, PrunedBlock
from symprune.engine.collect import Collector, Take
from symprune.engine.forward import Activations, Tick, Watch
from symprune.engine.permute.inside import Ordered
from symprune.engine.reconstruct import add_divergence, add_figures
from symprune.engine.reduce import check_gram_memory, measure
from symprune.engine.report import Report
from symprune.engine.visit.dense_side import DenseSide, comparable
from symprune.engine.visit.groups import describe_cost, find_groups
from symprune.engine.visit.pruning import WalkPlan, prune_block
from symprune.engine.visit.streams import Streams
from symprune.models.matrices import Matrix
from symprune.stats import DRIFT
from symprune.update.targets import OWN


@dataclass
class Visit:
    """What is done to one block after the other, from block `first` on."""

    blocks: Blocks
    streams: Streams
    first: int
    report: Report
    plan: WalkPlan
    watch: Watch
    tell: Callable[[str], None]

    def __call__(self, index: int, block: nn.Module) -> None:
        """Nothing of a block is still held when the next one is entered."""
        pruned = self.work(index, block)
        with self._time("keep"):
            self.blocks.finish(index, self.report, pruned, self.streams.leading)

    def work(self, index: int, block: nn.Module) -> PrunedBlock:
        """The block is pruned, and the hidden states are those behind it."""
        found, streams = self.blocks.layout.matrices(index), self.streams
        last = index + 1 == len(self.blocks)
        before = len(self.report.layers)
        with self._reconstructing(index, block, found):
            pruned = self._prune_groups(index, block, found)
            order = {matrix.name: number for number, matrix in enumerate(found)}
            self.report.layers[before:] = sorted(
                self.report.layers[before:], key=lambda layer: order[layer.name]
            )
            if streams.rebuilt is not None:
                self._reconstruct(index, block, found, pruned, before)
        if streams.pruned is not None and not last:
            with self._time("advance"):
                streams.pruned.advance(index, block, self._ticker("advance", index))
        return pruned

    def tell_done(self, index: int) -> None:
        """The block is finished."""
        samples = 0 if self.streams.leading is None else len(self.streams.leading)
        self.watch("done", index, len(self.blocks), samples, samples, "")

    def _prune_groups(self, index: int, block: nn.Module, found: list[Matrix]) -> PrunedBlock:
        """Measure and prune the block, all of it or group by group. Before its last weights change,
        or before any does where nothing is compared with the dense model, that model's hidden
        states pass it."""
        pruned, streams, recipe = PrunedBlock(), self.streams, self.plan.recipe
        (groups, repeated), side = self._groups(index, block, found), None
        layers = self.report.layers
        if recipe.targets != OWN and streams.dense is not None:
            prefix = f"{self.blocks.layout.prefix}.{index}."
            compared = comparable(found, repeated, self.plan.tokens)
            side = DenseSide(streams.dense, index, block, found, prefix, compared)
        leaving = groups[0] if side is None else groups[-1]
        for group in groups:
            measured, watched = self._measure(index, block, found, group, side)
            if group is leaving and streams.dense is not None and recipe.inputs == "pruned":
                self._pass_dense(index, block, streams.dense, side)
            if side is not None and group is not groups[-1]:
                side.keep(group)
            ordered, before = self._order(index, block, group, measured, watched), len(layers)
            pruned.add(self._prune(index, group, measured, watched))
            pruned.moves += ordered.moves
            ordered.tell(self.report, before)
        return pruned

    def _order(
        self,
        index: int,
        block: nn.Module,
        found: list[Matrix],
        measured: Collector,
        watched: Collector,
    ) -> Ordered:
        """Put the channels of the block, still dense, into the order a recipe asks for."""
        if self.plan.orders is None:
            return Ordered()
        with self._time("permute"):
            return self.plan.orders.order(index, block, found, measured, watched)

    def _groups(
        self, index: int, block: nn.Module, found: list[Matrix]
    ) -> tuple[list[list[Matrix]], frozenset[str]]:
        """What is measured together, and what is used twice; what a run that begins takes is
        said."""
        plan, source, groups, repeated = self.plan, self._source, [found], frozenset[str]()
        if source is None or not plan.needs:
            return groups, repeated
        with self._time("collect"):
            if plan.recipe.by_groups:
                groups, repeated = find_groups(source, index, block, found)
            if index == self.first and plan.recipe.by_groups:
                self.tell(describe_cost(len(groups), plan.recipe.targets))
            if index == self.first and plan.needs.gram:
                settings = (plan.held_out, plan.gram_device, DRIFT in plan.needs.inputs)
                self.tell(check_gram_memory(source, index, block, groups, *settings))
            if index == self.first and plan.needs.gradients:
                self.tell(gradients.check_memory(found, block))
        return groups, repeated

    @property
    def _source(self) -> Activations | None:
        """What statistics are measured on."""
        dense = self.plan.recipe.inputs == "dense"
        return self.streams.dense if dense else self.streams.pruned

    def _measure(
        self,
        index: int,
        block: nn.Module,
        found: list[Matrix],
        group: list[Matrix],
        side: DenseSide | None,
    ) -> tuple[Collector, Collector]:
        """The statistics of a group of the block. Where those of the dense model are asked for, its
        hidden states go on in the same pass."""
        plan, source, take = self.plan, self._source, None
        if source is not None and plan.recipe.inputs == "dense":
            take = self._take_dense(index, source)
        if source is None or not (plan.needs or take):
            return Collector(), Collector()
        only = frozenset(matrix.name for matrix in group) if plan.recipe.by_groups else None
        beside = None if side is None else side.inputs_of(group)
        with self._time("collect"):
            return measure(
                source, index, block, found, plan.needs, plan.held_out, plan.gram_device,
                self._ticker("collect", index), take, only, beside, plan.written,
            )  # fmt: skip

    def _take_dense(self, index: int, dense: Activations) -> Take | None:
        """What is done with the dense block's outputs."""
        if self.streams.rebuilt is not None:
            return self.streams.rebuilt.take
        return None if index + 1 == len(self.blocks) else dense.replace

    def _pass_dense(
        self, index: int, block: nn.Module, dense: Activations, side: DenseSide | None
    ) -> None:
        """The block, as it was, is run over the dense model's states."""
        take, weights = self._take_dense(index, dense), None if side is None else side.weights
        if take is not None:
            with self._time("advance" if self.streams.rebuilt is None else "reconstruct"):
                for samples in dense.batches():
                    take(samples, dense.run(index, block, samples, weights))

    def _prune(
        self, index: int, found: list[Matrix], measured: Collector, watched: Collector
    ) -> PrunedBlock:
        count = len(self.blocks)

        def tick(number: int) -> None:
            self.watch("mask", index, count, number, len(found), found[number].name)

        with self._time("mask"):
            return prune_block(found, measured, self.report, self.plan, watched, tick)

    @contextmanager
    def _reconstructing(self, index: int, block: nn.Module, found: list[Matrix]) -> Iterator[None]:
        """Where blocks are trained, what that needs of this one is gathered meanwhile."""
        rebuilt, leading = self.streams.rebuilt, self.streams.leading
        if rebuilt is None or leading is None:
            yield
            return
        with ExitStack() as entered:
            with self._time("reconstruct"):
                if index == self.first:
                    words = self._words if self.plan.recipe.trains_predictions else 0
                    self.tell(rebuilt.check_memory(index, block, leading, words))
                entered.enter_context(rebuilt.entered(index, block, found))
            yield

    def _reconstruct(
        self, index: int, block: nn.Module, found: list[Matrix], pruned: PrunedBlock, before: int
    ) -> None:
        """before: how many matrices were reported before those of the block."""
        rebuilt, leading, report = self.streams.rebuilt, self.streams.leading, self.report
        assert rebuilt is not None and leading is not None
        steps, count = rebuilt.steps, len(self.blocks)

        def tick(number: int) -> None:
            self.watch("reconstruct", index, count, number, steps, "")

        known = (index, block, found, pruned)
        layers, stored = report.layers[before:], self.plan.stored
        with self._time("reconstruct"):
            fitted = rebuilt.fit(*known, leading, layers, stored, tick)
            states = self.streams.pruned
            if index + 1 == count and self.plan.recipe.trains_predictions and states is not None:
                with self.blocks.head():
                    ended = rebuilt.fit_predictions(
                        self.blocks.layout, *known, states, layers, stored, tick
                    )
                add_divergence(report, before, ended)
                if fitted is not None:
                    fitted = replace(fitted, after=rebuilt.watch_outputs(index, block, leading))
            add_figures(report, before, fitted)

    @property
    def _words(self) -> int:
        """How many the vocabulary has."""
        embeddings = self.blocks.layout.model.get_input_embeddings()  # type: ignore[operator]
        return len(embeddings.weight)  # type: ignore[union-attr]

    def _ticker(self, stage: str, index: int) -> Tick:
        stream, count = self.streams.leading, len(self.blocks)
        samples = 0 if stream is None else len(stream)
        return lambda done: self.watch(stage, index, count, done, samples, "")

    @contextmanager
    def _time(self, stage: str) -> Iterator[None]:
        with spend(self.report, stage):
            yield


@contextmanager
def spend(report: Report, stage: str) -> Iterator[None]:
    """What happens meanwhile is time of this stage."""
    start = time.perf_counter()
    yield
    report.seconds[stage] = report.seconds.get(stage, 0.0) + time.perf_counter() - start
