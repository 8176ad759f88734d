"""Federated pruning: one language model, calibration text that never leaves its owners.

For each block the clients return sums over their tokens, the server adds them up, decides the masks
as `symprune.prune` would, and sends them back. `driver` is the loop, `server` and `client` the two
sides, `messages` what goes between them; `secure_rounds` and `noise` protect the sums.
"""

from __future__ import annotations

from symprune.fed.pruning.client import Client
from symprune.fed.pruning.driver import PruningResult, Traffic, prune, run, split
from symprune.fed.pruning.noise import Privacy
from symprune.fed.pruning.server import Server

__all__ = ["Client", "Privacy", "PruningResult", "Server", "Traffic", "prune", "run", "split"]
