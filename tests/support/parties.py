"""A federation that prunes in one process, with every party's own copy of a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import families
import torch
from torch import Tensor, nn

from symprune.engine import walk
from symprune.fed import pruning
from symprune.fed.pruning import Client, Server
from symprune.recipe import Recipe

UNEVEN = (1, 4, 2)
Change = Callable[[int, int, bytes], bytes | None]
"""change(client, message number, reply) -> what arrives; None: nothing does"""


def tokens() -> Tensor:
    return families.tokens(sum(UNEVEN), 13)


def shares() -> list[Tensor]:
    return list(tokens().split(UNEVEN))


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def central(recipe: Recipe, data: Tensor, family: str = "llama") -> Any:
    model = families.model(family)
    walk.prune(model, data, recipe)
    return model


def run(recipe: Recipe, change: Change | None = None, **options: Any) -> tuple[Any, Any]:
    """A run with every party's own copy of the model, replies changed on the way."""
    model = families.model()
    server = Server(model, recipe, len(UNEVEN), **options)
    clients = [Client(families.model(), part, allow_few_tokens=True) for part in shares()]
    sent = 0

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        nonlocal sent
        replies = {n: clients[n](data) for n, data in outgoing.items()}
        if change is not None:
            changed = {n: change(n, sent, data) for n, data in replies.items()}
            replies = {n: data for n, data in changed.items() if data is not None}
        sent += 1
        return replies

    return model, pruning.run(server, send)
