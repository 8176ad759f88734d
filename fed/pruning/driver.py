"""Federated pruning from the first message to the last: a plain loop over a way to send messages.

    from symprune.fed import prune
    result = prune(model, [tokens_of_one, tokens_of_another], Recipe(method="ria", pattern="2:4"))

`send` is all a transport has to give: numbered messages in, the replies of those who answered out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symprune.engine import walk
from symprune.errors import SympruneError
from symprune.fed.pruning import exposure, server_state
from symprune.fed.pruning.aggregate import grams
from symprune.fed.pruning.aggregate.ballots import STATISTICS
from symprune.fed.pruning.aggregate.bounds import DEPLOYED
from symprune.fed.pruning.client import Client
from symprune.fed.pruning.forecast import Forecast, forecast
from symprune.fed.pruning.noise import Privacy
from symprune.fed.pruning.server import Server
from symprune.fed.wire.ledger import Ledger
from symprune.machine import memory
from symprune.recipe import Recipe

Send = Callable[[Mapping[int, bytes]], Mapping[int, bytes]]
Block = Callable[[int, int], None]
"""block(done, blocks): called when a block's masks are decided."""


@dataclass
class Traffic:
    """Bytes over all clients: in total and by client, and for every block; what weights would be.

    A block's bytes up are its statistics, its bytes down the request that carries its masks; the
    first messages (settings, keys, the first request) are `setup`. weights is the size of the
    block's prunable matrices, once to each client.
    """

    ledger: Ledger
    setup: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    blocks: list[dict[str, int]] = field(default_factory=list)

    @classmethod
    def empty(cls, server: Server) -> Traffic:
        clients, layout = len(server.members), server.layout
        blocks = []
        for block in range(len(layout.blocks)):
            matrices, stored = layout.matrices(block), server.stored
            types = [stored.get(m.parameter_name, m.parameter.dtype) for m in matrices]
            sizes = [m.weight.numel() for m in matrices]
            size = sum(n * type.itemsize for n, type in zip(sizes, types, strict=True))
            blocks.append({"up": 0, "down": 0, "weights": clients * size})
        return cls(Ledger.empty(clients), blocks=blocks)

    def state(self) -> dict[str, Any]:
        """Everything, for a checkpoint."""
        ledger = torch.stack(list(self.ledger.state().values()))
        return {"ledger": ledger, "setup": self.setup, "blocks": self.blocks}

    def to_dict(self) -> dict[str, Any]:
        up, down = int(self.ledger.up_bytes.sum()), int(self.ledger.down_bytes.sum())
        weights = sum(block["weights"] for block in self.blocks)
        return {
            "clients": len(self.ledger.up_bytes),
            "bytes_up": up,
            "bytes_down": down,
            "weights_bytes": weights,
            "share_of_weights": (up + down) / weights if weights else 0.0,
            "setup": self.setup,
            "blocks": self.blocks,
        }


@dataclass
class PruningResult:
    """What was done: the report of `symprune.prune`, and the traffic it took."""

    report: walk.Report
    traffic: Traffic
    clients_left: list[int]
    privacy: dict[str, float] | None = None
    aggregate: str = STATISTICS
    forecast: Forecast | None = None
    risk: str | None = None
    robust: str = DEPLOYED

    def to_dict(self) -> dict[str, Any]:
        weights = self.report.recipe.weight_update is not None
        federated: dict[str, Any] = {"aggregate": self.aggregate, "sends_weights": weights}
        federated["robust"] = self.robust
        federated |= {"traffic": self.traffic.to_dict(), "clients_left": self.clients_left}
        if self.forecast is not None:
            federated["forecast_per_client"] = self.forecast.to_dict()
        if self.privacy is not None:
            federated["privacy"] = self.privacy
        if self.risk is not None:
            federated["risk"] = self.risk
        return {**self.report.to_dict(), "federated": federated}


def run(
    server: Server,
    send: Send,
    done: Block = lambda *_: None,
    checkpoint: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
    measured: Callable[[dict[str, float]], None] = lambda _: None,
) -> PruningResult:
    """Drive a server to the end; its model is pruned in place.

    With a checkpoint, a file, the run goes on from where the last one that wrote it was stopped.
    tell is told before what will be sent; measured, after every block, what it took.
    """
    expected = forecast(server)
    tell(expected.sentence)
    risk = exposure.risk(server.settings, server.layout.matrices(0))
    if risk is not None:
        tell(risk)
    blocks, report = len(server.layout.blocks), server.report
    traffic = Traffic.empty(server)
    first = -1
    if checkpoint is not None and checkpoint.exists():
        first, saved = server_state.restore(checkpoint, server)
        traffic = Traffic(Ledger(*saved["ledger"]), saved["setup"], saved["blocks"])

    def exchange(
        outgoing: Mapping[int, bytes], up: dict[str, int], down: dict[str, int]
    ) -> Mapping[int, bytes]:
        _count(traffic.ledger.down, outgoing)
        down["down"] += sum(map(len, outgoing.values()))
        replies = {n: data for n, data in send(outgoing).items() if n in outgoing}
        _count(traffic.ledger.up, replies)
        up["up"] += sum(map(len, replies.values()))
        return replies

    def keep(next_block: int) -> None:
        if checkpoint is not None:
            server_state.save(checkpoint, server, next_block, traffic.state())

    start = time.perf_counter()
    with _timing(report):
        if first < 0:
            server.welcome(exchange(server.hello(), traffic.setup, traffic.setup))
            keep(0)
        for block in range(max(first, 0), blocks):
            here = traffic.blocks[block]
            carries = traffic.blocks[block - 1] if block else traffic.setup
            while not server.take(block, exchange(server.ask(block), here, carries)):
                pass
            keep(block + 1)
            done(block, blocks)
            measured(_figures(server, traffic, block, time.perf_counter() - start))
        exchange(server.finish(), traffic.blocks[-1], traffic.blocks[-1])
    report.peak_memory = memory.peak()
    members, aggregate = list(server.members), server.settings.aggregate
    said = (server.promise(), aggregate, expected, risk, server.robust)
    return PruningResult(report, traffic, members, *said)


def prune(
    model: nn.Module,
    clients: Sequence[Tensor],
    recipe: Recipe | None = None,
    secure: bool = False,
    privacy: Privacy | None = None,
    reference: Tensor | None = None,
    noise_seed: int | None = None,
    watch: walk.Watch = lambda *_: None,
    stored: Mapping[str, torch.dtype] | None = None,
    aggregate: str = STATISTICS,
    gram_bits: int = grams.EXACT,
    tell: Callable[[str], None] = lambda _: None,
    robust: str = DEPLOYED,
) -> PruningResult:
    """Prune `model` in place with calibration tokens of several clients, all in this process.

    clients are their tokens, `[samples, length]` each. secure adds their statistics up behind
    pairwise masks; privacy clips and noises them, measured against the public tokens `reference`.
    Without privacy the masks, and the weights if they are updated, are those of `symprune.prune` on
    all tokens together: bit for bit but for Gram matrices that are summed securely or sent in fewer
    than 64 gram_bits. With aggregate `votes` or `average` clients prune alone and the server counts
    what they kept. stored names the parameters that are stored in another type than they are
    computed in here. tell is told what will be sent and what that risks; since nothing leaves this
    process, clients with few tokens are not refused here as they are on machines of their own.
    robust is the rule by which clients are left out whose statistics cannot be (docs/flower.md).
    """
    lengths = sorted({tokens.shape[-1] for tokens in (*clients, *_given(reference))})
    if len(lengths) > 1:
        raise SympruneError(f"Samples must be of one length, not of {lengths} tokens.")
    blocks = 0

    def tick(stage: str, block: int, done: int, samples: int) -> None:
        watch(stage, block, blocks, done, samples, "")

    settings = (secure, privacy, reference, stored, aggregate, gram_bits)
    server = Server(model, recipe or Recipe(), len(clients), *settings, robust=robust)
    blocks = len(server.layout.blocks)
    seeds = [None if noise_seed is None else noise_seed + i for i in range(len(clients))]
    insisted = (privacy if server.needs else None, secure, None)
    members = [
        Client(model, tokens, *insisted, seed, tick, stored, allow_few_tokens=True)
        for tokens, seed in zip(clients, seeds, strict=True)
    ]

    def send(outgoing: Mapping[int, bytes]) -> Mapping[int, bytes]:
        return {number: members[number](data) for number, data in outgoing.items()}

    return run(server, send, lambda block, of: watch("done", block, of, 0, 0, ""), tell=tell)


def _figures(server: Server, traffic: Traffic, block: int, seconds: float) -> dict[str, float]:
    """How far a run is, and what it took: bytes up to now, seconds since it was started."""
    layers = server.report.layers
    weights = sum(layer.size for layer in layers)
    removed = sum(layer.removed for layer in layers)
    return {
        "block": block + 1,
        "blocks": len(server.layout.blocks),
        "clients": len(server.members),
        "clients_left_out": server.settings.clients - len(server.members),
        "sparsity": removed / weights if weights else 0.0,
        "bytes_up": int(traffic.ledger.up_bytes.sum()),
        "bytes_down": int(traffic.ledger.down_bytes.sum()),
        "seconds": seconds,
    }


def _given(tokens: Tensor | None) -> list[Tensor]:
    return [] if tokens is None else [tokens]


def split(tokens: Tensor, clients: int) -> list[Tensor]:
    """One calibration set dealt out: consecutive samples, as even as it goes."""
    if not 1 <= clients <= len(tokens):
        raise SympruneError(f"{len(tokens)} samples cannot be split over {clients} clients.")
    return list(torch.tensor_split(tokens, clients))


def _count(count: Callable[[Tensor, Tensor, Tensor], None], sent: Mapping[int, bytes]) -> None:
    """Into the ledger; no paper counts these messages, so their bits are those of the bytes."""
    sizes = torch.tensor([len(data) for data in sent.values()], dtype=torch.int64)
    count(torch.tensor(list(sent), dtype=torch.int64), sizes, 8 * sizes)


@contextmanager
def _timing(report: walk.Report) -> Iterator[None]:
    start = time.perf_counter()
    yield
    report.seconds["federated"] = time.perf_counter() - start
