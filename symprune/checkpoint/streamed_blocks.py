"""How the walk gets at the blocks of a model on disk: read when entered, written when left, with
what a run that is interrupted needs to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from symprune.checkpoint.output_files import OutputFiles
from symprune.checkpoint.packed_files import PackedFiles
from symprune.checkpoint.resume import HiddenStates, Progress
from symprune.checkpoint.streamed_model import StreamedModel
from symprune.engine import forward
from symprune.engine.arguments import Allocate
from symprune.engine.blocks import Blocks, Pass, PrunedBlock
from symprune.engine.permute.moves import Move
from symprune.engine.report import Report
from symprune.errors import SympruneError
from symprune.machine import distributed


class StreamedBlocks(Blocks):
    """The blocks of a model on disk, written as they are done, resumable at any of them."""

    in_memory = False

    def __init__(
        self,
        streamed: StreamedModel,
        files: OutputFiles | PackedFiles,
        progress: Progress,
        allocate: Allocate | None = None,
        at_once: int = 1,
    ) -> None:
        super().__init__(streamed.layout, stored=streamed.dtype, at_once=at_once)
        self.streamed = streamed
        self.files = files
        self.progress = progress
        self.allocate = allocate
        self.states = HiddenStates(progress.folder, distributed.rank())

    def begin(
        self,
        tokens: Tensor | None,
        report: Report,
        tick: forward.Tick,
        dense: Pass | None = None,
    ) -> tuple[int, forward.Activations | None]:
        done = self.progress
        report.layers[:] = done.reports()
        report.notes[:] = list(dict.fromkeys([*report.notes, *done.notes]))
        report.seconds.update(done.seconds)
        if done.finished > len(self):
            raise SympruneError(
                f"{done.folder} says that {done.finished} of {len(self)} blocks are finished; pass "
                "--restart to begin anew."
            )
        if tokens is None or done.finished == len(self):
            return done.finished, None
        first, activations = done.hidden, self.embed(tokens, tick)
        if first and not distributed.all_agree(self.states.restore(first, activations.hidden)):
            first, activations = 0, self.embed(tokens, tick)
        written = self.files.open_computed() if dense is None else None
        pass_by = dense or forward.Activations.advance
        for index in range(first, done.finished):
            with self.streamed.block(index, written) as block:
                pass_by(activations, index, block)
        return done.finished, activations

    def embed_others(
        self, tokens: Tensor, tick: forward.Tick = lambda _: None
    ) -> forward.Activations:
        with self.streamed.around():
            return forward.embed(self.layout, tokens, tick, self.allocate, self.at_once)

    def embed_anew(self, tokens: Tensor) -> forward.Activations:
        with self.streamed.around():
            return forward.embed(self.layout, tokens)

    @contextmanager
    def around(self) -> Iterator[None]:
        with self.streamed.around(head=True):
            yield

    def reorder(self, moves: list[Move]) -> None:
        """What is read is ordered, here and where it is written."""
        self.streamed.moves = moves

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        with self.streamed.block(index) as block:
            yield block

    def head(self) -> AbstractContextManager[None]:
        return self.streamed.around(head=True)

    def finish(
        self,
        index: int,
        report: Report,
        pruned: PrunedBlock,
        activations: forward.Activations | None,
    ) -> None:
        """On the disk: the block, sometimes the hidden states behind it, then that it is done.

        Hidden states are not all there is where blocks leave something else for later ones: then a
        run that goes on passes the samples through all finished blocks again.
        """
        done = self.progress
        keep_states = (
            activations is not None
            and not activations.arguments.carry_state
            and index + 1 < len(self)
            and distributed.agree(self.states.due())
        )
        if keep_states and activations is not None:
            self.states.keep(index + 1, activations.hidden)
        if distributed.rank() == 0:
            done.written |= self.files.write_block(index, pruned)
        distributed.wait()
        done.hidden = index + 1 if keep_states else done.hidden
        done.layers += [asdict(layer) for layer in report.layers[len(done.layers) :]]
        done.notes, done.seconds = list(report.notes), dict(report.seconds)
        done.finish_block()
        distributed.wait()
        if keep_states:
            self.states.drop_but(index + 1)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        return self.progress.once(name, make)
