"""Flower as the carrier: the only room that imports flwr, and only once it is needed."""

from __future__ import annotations

from symprune.fed.flower.apps import (
    FlowerTransport,
    client_app,
    prune,
    prune_simulation,
    server_app,
    simulation,
    train,
)
from symprune.fed.flower.resident import resident

__all__ = [
    "FlowerTransport",
    "client_app",
    "prune",
    "prune_simulation",
    "resident",
    "server_app",
    "simulation",
    "train",
]
