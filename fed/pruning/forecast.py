"""What a run will send, known before it starts: the model says how large every message is."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import Tensor

from symprune.engine import forward
from symprune.engine.collect import collect
from symprune.eval.tables import size
from symprune.fed.pruning import messages
from symprune.fed.pruning.aggregate import grams, packed_stats
from symprune.fed.pruning.aggregate.ballots import STATISTICS, count_removed, vote_type
from symprune.fed.pruning.server import Server
from symprune.fed.secure import keys, letters, shares
from symprune.fed.secure.masking import WORDS
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
        of_them = f", {size(self.grams)} of them Gram matrices" if self.grams else ""
        up, down = size(self.up), size(self.down)
        return f"Every client will send at most {up}{of_them}, and be sent {down}."

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def forecast(server: Server) -> Forecast:
    """The bytes of tensors; what is around them is some hundred bytes a block."""
    blocks = [_of_block(server, *found) for found in _groups(server)]
    return Forecast(
        sum(block.up for block in blocks),
        sum(block.down for block in blocks),
        sum(block.grams for block in blocks),
    )


def _of_block(server: Server, matrices: list[Matrix], groups: Tensor) -> Forecast:
    settings = server.settings
    sums = settings.secure * (1 + settings.sends_grams) * settings.clients
    sealed = Forecast(
        sums * (letters.LETTER_BYTES + shares.SHARE_BYTES),
        sums * (letters.ROW_BYTES + keys.SIGNATURE_BYTES + 16),
        0,
    )
    sizes = [parameter.numel() for parameter in messages.parameters(matrices).values()]
    kept = settings.weights * sum(_kept(server, matrix) for matrix in matrices)
    down = sum(-(-count // 8) for count in sizes) + kept
    if settings.aggregate != STATISTICS:
        vote = 8 * vote_type(settings.clients).itemsize if settings.secure else 1
        votes = sum(-(-count * vote // 8) for count in sizes) + 8 * len(matrices)
        weights = settings.weights * 8 * sum(sizes) if settings.secure else kept
        return Forecast(votes + weights + sealed.up, down + sealed.down, 0)
    parts = packed_stats.layout(matrices, groups, settings.needs)
    values = packed_stats.length(parts)
    up = 8 * WORDS * (values + 2 * len(parts)) + sealed.up
    down += 8 * len(matrices) + sealed.down
    down += 8 * values if settings.noise else 0
    if not settings.sends_grams:
        return Forecast(up, down, 0)
    channels = 8 * grams.channels_of(parts)
    entries = sum(grams.entries(part.channels) for part in parts if part.gram)
    matrix_bytes = entries * settings.gram_bits // 8
    return Forecast(up + settings.exact * channels + matrix_bytes, down + channels, matrix_bytes)


def _groups(server: Server) -> list[tuple[list[Matrix], Tensor]]:
    """Every block's matrices, and which share an input: a few tokens through the dense model."""
    layout, found = server.layout, []
    probe = packed_stats.own_tokens(layout.model)
    with forward.ready(layout.model):
        probing = forward.embed(layout, probe) if server.needs else None
    for block, module in enumerate(layout.blocks):
        matrices = layout.matrices(block)
        inputs: dict[str, ChannelStats] = {}
        if probing is not None:
            with forward.ready(layout.model):
                needs = Needs(frozenset({SQUARE}))
                take = probing.replace
                inputs = collect(probing, block, module, matrices, needs, take=take).inputs
        found.append((matrices, packed_stats.sharing(matrices, inputs)))
    return found


def _kept(server: Server, matrix: Matrix) -> int:
    """Bytes of what stays of a matrix."""
    rows, columns = matrix.weight.shape
    removed = count_removed(rows, columns, server.report.recipe)
    return (rows * columns - removed) * server.stored_type(matrix).itemsize
