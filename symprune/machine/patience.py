"""How long to wait for something on a machine that has other work."""

from __future__ import annotations

import os


def stretched(seconds: float) -> float:
    """So long on an idle machine, and as much longer as this one has more work than processors."""
    try:
        busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        busy = 1.0
    return seconds * min(max(1.0, busy), 10.0)
