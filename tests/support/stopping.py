"""Stop a run in the middle, as a user does with Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def stop_at(block: int) -> Callable[[dict[str, Any]], None]:
    """What shows progress to nobody, and stops when a block is reached."""

    def show(figures: dict[str, Any]) -> None:
        if figures["block"] == block:
            raise KeyboardInterrupt

    return show
