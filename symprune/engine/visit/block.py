"""A block is entered once: measured while it is dense, pruned, where asked for trained, and run
again for the next block's inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from symprune.engine.blocks import Blocks, PrunedBlock
from symprune.engine.collect import Collector, Take
from symprune.engine.forward import Activations, Tick, Watch
from symprune.engine.reconstruct import add_figures
from symprune.engine.reduce import check_gram_memory, measure
from symprune.engine.report import Report
from symprune.engine.visit.pruning import WalkPlan, prune_block
from symprune.engine.visit.streams import Streams
from symprune.models.matrices import Matrix


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
        found, streams = self.blocks.layout.matrices(index), self.streams
        last = index + 1 == len(self.blocks)
        before = len(self.report.layers)
        if streams.rebuilt is not None:
            self._begin_reconstruction(index, block)
        measured, watched = self._measure(index, block, found, last)
        if streams.dense is not None and self.plan.recipe.inputs == "pruned":
            self._pass_dense(index, block, streams.dense)
        pruned = self._prune(index, found, measured, watched)
        if streams.rebuilt is not None:
            self._reconstruct(index, block, found, pruned, before)
        if streams.pruned is not None and not last:
            with self._time("advance"):
                streams.pruned.advance(index, block, self._ticker("advance", index))
        with self._time("keep"):
            self.blocks.finish(index, self.report, pruned, streams.leading)

    def _measure(
        self, index: int, block: nn.Module, found: list[Matrix], last: bool
    ) -> tuple[Collector, Collector]:
        """The statistics of the block. Where the dense model's are asked for, its hidden states go
        on in the same pass."""
        plan, dense = self.plan, self.plan.recipe.inputs == "dense"
        source, take = self.streams.dense if dense else self.streams.pruned, None
        if source is None:
            return Collector(), Collector()
        if dense:
            take = self._take_dense(source, last)
        if not plan.needs and take is None:
            return Collector(), Collector()
        with self._time("collect"):
            settings = (source, index, block, found)
            if plan.needs.gram and index == self.first:
                self.tell(check_gram_memory(*settings, plan.held_out, plan.gram_device))
            tick = self._ticker("collect", index)
            return measure(*settings, plan.needs, plan.held_out, plan.gram_device, tick, take)

    def _take_dense(self, dense: Activations, last: bool) -> Take | None:
        """What is done with the dense block's outputs."""
        rebuilt = self.streams.rebuilt
        if rebuilt is not None:
            return rebuilt.take
        return None if last else dense.replace

    def _pass_dense(self, index: int, block: nn.Module, dense: Activations) -> None:
        """The block, still dense, is run over the dense model's states."""
        take = self._take_dense(dense, index + 1 == len(self.blocks))
        if take is not None:
            with self._time("reconstruct"):
                for samples in dense.batches():
                    take(samples, dense.run(index, block, samples))

    def _prune(
        self, index: int, found: list[Matrix], measured: Collector, watched: Collector
    ) -> PrunedBlock:
        count = len(self.blocks)

        def tick(number: int) -> None:
            self.watch("mask", index, count, number, len(found), found[number].name)

        with self._time("mask"):
            return prune_block(found, measured, self.report, self.plan, watched, tick)

    def _begin_reconstruction(self, index: int, block: nn.Module) -> None:
        rebuilt, leading = self.streams.rebuilt, self.streams.leading
        assert rebuilt is not None and leading is not None
        with self._time("reconstruct"):
            if index == self.first:
                self.tell(rebuilt.check_memory(index, block, leading))
            rebuilt.begin()

    def _reconstruct(
        self, index: int, block: nn.Module, found: list[Matrix], pruned: PrunedBlock, before: int
    ) -> None:
        """before: how many matrices were reported before those of the block."""
        rebuilt, leading, report = self.streams.rebuilt, self.streams.leading, self.report
        assert rebuilt is not None and leading is not None
        steps, count = rebuilt.steps, len(self.blocks)
        with self._time("reconstruct"):
            fitted = rebuilt.fit(
                index, block, found, pruned, leading, report.layers[before:], self.plan.stored,
                lambda number: self.watch("reconstruct", index, count, number, steps, ""),
            )  # fmt: skip
            add_figures(report, before, fitted)

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
