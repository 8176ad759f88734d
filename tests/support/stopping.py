"""Stop a run in the middle: as a user does with Ctrl-C, or as if its process had ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from symprune.checkpoint.streamed_blocks import StreamedBlocks


def stop_at(block: int) -> Callable[[dict[str, Any]], None]:
    """What shows progress to nobody, and stops when a block is reached."""

    def show(figures: dict[str, Any]) -> None:
        if figures["block"] == block:
            raise KeyboardInterrupt

    return show


class Killed(BaseException):
    """Stands for a process that ends here, without a chance to tidy up."""


def die_after(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs end when a block is finished."""
    finish = StreamedBlocks.finish

    def then_die(self: StreamedBlocks, index: int, *rest: Any) -> None:
        finish(self, index, *rest)
        if index == block:
            raise Killed

    monkeypatch.setattr(StreamedBlocks, "finish", then_die)
