"""What a run will send, known before it starts: the model says how large every message is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod

import torch

from symprune.engine import forward
from symprune.engine.collect import collect
from symprune.fed.pruning import messages, packed_stats
from symprune.fed.pruning.aggregate import grams
from symprune.fed.pruning.aggregate.ballots import STATISTICS, vote_type
from symprune.fed.pruning.secure_sum import WORDS
from symprune.fed.pruning.server import PROBE_TOKENS, Server
from symprune.models.matrices import Matrix
from symprune.stats import SQUARE, ChannelStats, Needs


@dataclass(frozen=True)
class Forecast:
    """The bytes of one client, at most, over all blocks; of those up, what Gram matrices take."""

    up: int
    down: int
    grams: int

    @property
    def sentence(self) -> str:
        of_them = f", {_size(self.grams)} of them Gram matrices" if self.grams else ""
        up, down = _size(self.up), _size(self.down)
        return f"Every client will send at most {up}{of_them}, and be sent {down}."

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def forecast(server: Server) -> Forecast:
    """The bytes of tensors; what is around them is some hundred bytes a block."""
    settings = server.settings
    up = down = squares = 0
    for matrices, groups in _groups(server):
        sizes = [parameter.numel() for parameter in messages.parameters(matrices).values()]
        bytes_each = [server.stored_type(matrix).itemsize for matrix in matrices]
        kept = [_kept(server, m) * size for m, size in zip(matrices, bytes_each, strict=True)]
        down += sum(-(-size // 8) for size in sizes) + settings.weights * sum(kept)
        if settings.aggregate != STATISTICS:
            vote = vote_type(settings.clients).itemsize * 8 if settings.secure else 1
            up += sum(-(-size * vote // 8) for size in sizes) + 8 * len(matrices)
            up += settings.weights * (8 * sum(sizes) if settings.secure else sum(kept))
            continue
        parts = packed_stats.layout(matrices, groups, settings.needs)
        counted = packed_stats.length(parts) + 2 * len(parts)
        up += counted * 8 * (WORDS if settings.secure else 2)
        down += 8 * len(matrices) + settings.secure * 8 * settings.clients
        if settings.noise:
            down += 8 * packed_stats.length(parts)
        if settings.sends_grams:
            channels = 8 * grams.channels_of(parts)
            down, up = down + channels, up + settings.exact * channels
            entries = sum(grams.entries(part.channels) for part in parts if part.gram)
            squares += entries * settings.gram_bits // 8
    return Forecast(up + squares, down, squares)


def _groups(server: Server) -> list[tuple[list[Matrix], torch.Tensor]]:
    """Every block's matrices, and which share an input: a few tokens through the dense model."""
    layout, found = server.layout, []
    probe = torch.arange(PROBE_TOKENS).unsqueeze(0)
    with forward.ready(layout.model):
        probing = forward.embed(layout, probe) if server.needs else None
    for block, module in enumerate(layout.blocks):
        matrices = layout.matrices(block)
        inputs: dict[str, ChannelStats] = {}
        if probing is not None:
            with forward.ready(layout.model):
                needs = Needs(frozenset({SQUARE}))
                inputs = collect(probing, block, module, matrices, needs, advance=True).inputs
        found.append((matrices, packed_stats.sharing(matrices, inputs)))
    return found


def _kept(server: Server, matrix: Matrix) -> int:
    size = prod(matrix.weight.shape)
    return size - int(size * server.report.recipe.target_sparsity)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
