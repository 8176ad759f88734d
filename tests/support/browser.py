"""A real browser without a window: what a page becomes in it, and what it complains of."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 600  # seconds; on a machine with nothing else to do it takes a few
needs_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def browse(address: str, width: int, profile: Path) -> tuple[str, str]:
    """The page's DOM after its script ran, and what the console said."""
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--disable-dev-shm-usage", "--enable-logging=stderr", "--v=0",
        f"--user-data-dir={profile}", f"--window-size={width},900", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run(
        [str(CHROMIUM), *flags, address], capture_output=True, text=True, timeout=PATIENCE
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)
