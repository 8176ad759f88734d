"""What is asked of the system about files, in order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def record_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on: which file or folder is synced, which name becomes which."""
    done: list[str] = []
    fsync, replace, rename = os.fsync, Path.replace, Path.rename

    def synced(opened: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{opened}')).name}")
        fsync(opened)

    def replaced(self: Path, target: Path) -> Path:
        done.append(f"rename {self.name} {target.name}")
        return replace(self, target)

    def renamed(self: Path, target: Path) -> Path:
        done.append(f"rename {self.name} {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr(Path, "rename", renamed)
    return done
