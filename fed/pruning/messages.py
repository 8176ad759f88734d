"""The messages of federated pruning, as bytes: what each holds, written and read in one place.

A message is a head of whole numbers and then tensors whose types and shapes both sides know from
the model, so a message that is anything else is refused before its content is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.fed.pruning.secure_sum import KEY_BYTES, WORDS
from symprune.fed.wire.payload import Expected, decode_as, encode_message, first_field
from symprune.models.matrices import Matrix
from symprune.stats import MOMENTS, SQUARE, Needs

VERSION = 3
HELLO, ROUND, FINISH = range(3)
HEAD = 6
DIGEST_BYTES = 32
STATISTICS = (SQUARE, MOMENTS)
BOOL, INTEGER, DOUBLE, SINGLE, BYTE = (
    torch.bool,
    torch.int64,
    torch.float64,
    torch.float32,
    torch.uint8,
)


@dataclass(frozen=True)
class Settings:
    """What a client is told once: its number, the statistics to return, and how to protect them.

    noise is the noise multiplier, clip the bound of a sample's contribution; 0 without noise.
    """

    number: int
    clients: int
    needs: Needs
    secure: bool = False
    noise: float = 0.0
    clip: float = 0.0


def head(kind: int, *numbers: int) -> Tensor:
    return torch.tensor([VERSION, kind, *numbers] + [0] * (HEAD - 2 - len(numbers)))


def read_head(data: bytes) -> list[int]:
    """The whole numbers a message starts with; a message of another version is refused."""
    numbers: list[int] = first_field(data, "head", INTEGER, (HEAD,)).tolist()
    if numbers[0] != VERSION:
        raise SympruneError(
            f"A message follows version {numbers[0]} of federated pruning, not {VERSION}."
        )
    return numbers


def read(data: bytes, kind: int, fields: Expected) -> tuple[list[int], dict[str, Tensor]]:
    """The head's numbers after the kind, and the other fields, checked."""
    numbers = read_head(data)
    if numbers[1] != kind:
        raise SympruneError(f"A message is of kind {numbers[1]}, not {kind}.")
    decoded = decode_as(data, {"head": (INTEGER, (HEAD,)), **fields})
    return numbers[2:], {name: decoded[name] for name in fields}


def write(first: Tensor, fields: Mapping[str, Tensor] | None = None) -> bytes:
    return encode_message({"head": first, **(fields or {})})


def write_settings(settings: Settings) -> bytes:
    collect = [
        sum(1 << bit for bit, name in enumerate(STATISTICS) if name in side)
        for side in (settings.needs.inputs, settings.needs.outputs)
    ]
    first = head(HELLO, settings.number, settings.clients, int(settings.secure))
    bounds = [settings.noise, settings.clip, settings.needs.token_limit or 0.0]
    fields = {"collect": torch.tensor(collect), "bounds": torch.tensor(bounds, dtype=DOUBLE)}
    return write(first, fields)


def read_settings(data: bytes) -> Settings:
    numbers, fields = read(data, HELLO, {"collect": (INTEGER, (2,)), "bounds": (DOUBLE, (3,))})
    number, clients, secure, _ = numbers
    if not 0 <= number < clients:
        raise SympruneError(f"A client is given the number {number} of {clients}.")
    inputs, outputs = (
        frozenset(name for bit, name in enumerate(STATISTICS) if code >> bit & 1)
        for code in fields["collect"].tolist()
    )
    noise, clip, limit = fields["bounds"].tolist()
    if min(noise, clip, limit) < 0:
        raise SympruneError("A client is told to add negative noise or to count negative tokens.")
    needs = Needs(inputs, outputs, limit or None)
    return Settings(number, clients, needs, bool(secure), noise, clip)


def hello_fields(secure: bool) -> Expected:
    """What a client introduces itself with: its model's digest, and a key to be masked with."""
    key: Expected = {"key": (BYTE, (KEY_BYTES,))} if secure else {}
    return {"model": (BYTE, (DIGEST_BYTES,)), **key}


def round_fields(
    settings: Settings, participants: int, matrices: int, with_keys: bool, values: int
) -> Expected:
    """What the server asks a block's statistics with, besides the masks of the block before."""
    fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"groups": (INTEGER, (matrices,))}
    if settings.secure:
        fields["participants"] = (INTEGER, (participants,))
        if with_keys:
            fields["keys"] = (BYTE, (participants, KEY_BYTES))
    if settings.noise:
        fields |= {"centre": (SINGLE, (values,)), "scale": (SINGLE, (values,))}
    return fields


def reply_fields(secure: bool, parts: int, values: int) -> Expected:
    """A block's statistics: the sums themselves, or one vector of masked whole numbers."""
    if secure:
        return {"masked": (INTEGER, (values + 2 * parts, WORDS))}
    sums = dict.fromkeys(("values", "rests"), (DOUBLE, (values,)))
    return {"counts": (INTEGER, (parts, 2)), **sums}


def parameters(matrices: Sequence[Matrix]) -> dict[str, nn.Parameter]:
    """The distinct parameters behind a block's matrices; fused experts are one parameter."""
    return {matrix.parameter_name: matrix.parameter for matrix in matrices}


def mask_fields(matrices: Sequence[Matrix]) -> Expected:
    shapes = [tuple(parameter.shape) for parameter in parameters(matrices).values()]
    return {f"mask{number}": (BOOL, shape) for number, shape in enumerate(shapes)}


def mask_tensors(matrices: Sequence[Matrix], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"mask{number}": masks[name] for number, name in enumerate(parameters(matrices))}
