"""The messages of federated pruning, as bytes: what each holds, written and read in one place.

A message is a head of whole numbers and then tensors whose types and shapes both sides know from
the model, so a message that is anything else is refused before its content is allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.fed.pruning.aggregate import grams
from symprune.fed.pruning.aggregate.ballots import AGGREGATES, STATISTICS, vote_type
from symprune.fed.pruning.aggregate.packed_stats import Part, layout, length
from symprune.fed.secure import collector, graph, keys
from symprune.fed.secure.masking import WIDE, WORDS
from symprune.fed.wire.payload import Expected, Shape, decode_as, encode_message, first_field
from symprune.models.matrices import Matrix
from symprune.recipe import Recipe
from symprune.stats import GRAM, MOMENTS, SQUARE, Needs
from symprune.validation import parse_json

VERSION = 7
HELLO, ROUND, GRAMS, FINISH, SHARE, UNMASK = range(6)
HEAD = 8
DIGEST_BYTES = 32
MOST_RECIPE_BYTES = 1 << 16
COLLECTED = (SQUARE, MOMENTS, GRAM)
BOOL, INTEGER, DOUBLE, SINGLE, BYTE = (
    torch.bool,
    torch.int64,
    torch.float64,
    torch.float32,
    torch.uint8,
)
OWN = {"participants", "letters"}  # of a request: a client's, or in every sum's agreement anyway
Stored = Mapping[str, torch.dtype]
"""The parameters that are stored in another type than they are computed in, by name."""


@dataclass(frozen=True)
class Settings:
    """What a client is told once: its number, the statistics to return, and how to protect them.

    noise is the noise multiplier, clip the bound of a sample's contribution; 0 without noise.
    honest: of a secure sum, on how many honest clients' shares of the noise each counts.
    gram_bits is what a number of a Gram matrix takes. weights: kept weights come with the masks.
    Clients that prune alone are told the recipe.
    """

    number: int
    clients: int
    needs: Needs
    secure: bool = False
    noise: float = 0.0
    clip: float = 0.0
    aggregate: str = STATISTICS
    gram_bits: int = grams.EXACT
    weights: bool = False
    recipe: Recipe | None = None
    honest: int = 1

    @property
    def share(self) -> float:
        """The noise that a client adds itself."""
        return self.noise / math.sqrt(self.honest)

    @property
    def sends_grams(self) -> bool:
        """Whether Gram matrices are sent."""
        return self.needs.gram and self.aggregate == STATISTICS

    @property
    def exact(self) -> bool:
        """Whether they are sent as they are: then all clients round by the first one's scale."""
        return self.sends_grams and self.gram_bits == grams.EXACT and not self.secure


@dataclass(frozen=True)
class Known:
    """What the server knows of a client, in the client's own words."""

    samples: int
    length: int


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
        sum(1 << bit for bit, name in enumerate(COLLECTED) if name in side)
        for side in (settings.needs.inputs, settings.needs.outputs)
    ]
    recipe = b"" if settings.recipe is None else json.dumps(settings.recipe.to_dict()).encode()
    how = AGGREGATES.index(settings.aggregate), int(settings.weights), len(recipe)
    first = head(HELLO, settings.number, settings.clients, int(settings.secure), *how)
    bounds = [settings.noise, settings.clip, settings.needs.token_limit or 0.0]
    fields = {
        "collect": torch.tensor([*collect, settings.gram_bits, settings.honest]),
        "bounds": torch.tensor(bounds, dtype=DOUBLE),
        "recipe": torch.tensor(list(recipe), dtype=BYTE),
    }
    return write(first, fields)


def read_settings(data: bytes) -> Settings:
    size = read_head(data)[-1]
    if not 0 <= size <= MOST_RECIPE_BYTES:
        raise SympruneError(f"A client is told a recipe of {size} bytes.")
    asked: Expected = {"collect": (INTEGER, (4,)), "bounds": (DOUBLE, (3,))}
    numbers, fields = read(data, HELLO, {**asked, "recipe": (BYTE, (size,))})
    number, clients, secure, how, weights = numbers[:5]
    graph.check_clients(clients)
    if not 0 <= number < clients:
        raise SympruneError(f"A client is given the number {number} of {clients}.")
    if not 0 <= how < len(AGGREGATES) or (AGGREGATES[how] == STATISTICS) != (size == 0):
        raise SympruneError("A client is told to aggregate in a way there is not.")
    *sides, bits, honest = fields["collect"].tolist()
    inputs, outputs = (
        frozenset(name for bit, name in enumerate(COLLECTED) if code >> bit & 1) for code in sides
    )
    noise, clip, limit = fields["bounds"].tolist()
    if min(noise, clip, limit) < 0:
        raise SympruneError("A client is told to add negative noise or to count negative tokens.")
    if honest < 1 or (honest > 1 and not secure):
        raise SympruneError(f"A client is told that {honest} clients share the noise.")
    grams.check_bits(bits, clients)
    needs = Needs(inputs, outputs, limit or None)
    recipe = read_recipe(bytes(fields["recipe"].tolist()))
    protected = (bool(secure), noise, clip)
    return Settings(
        number, clients, needs, *protected, AGGREGATES[how], bits, bool(weights), recipe, honest
    )


def read_recipe(text: bytes) -> Recipe | None:
    """What clients that prune alone go by; None for others."""
    try:
        return Recipe.from_dict(parse_json(text.decode())) if text else None
    except (ValueError, TypeError) as error:
        raise SympruneError(f"A client is told a recipe that is none: {error}.") from error


def hello_fields(secure: bool) -> Expected:
    """What a client introduces itself with: its model's digest, and its card for secure sums."""
    card: Expected = {"card": (BYTE, (keys.CARD_BYTES,))} if secure else {}
    return {"model": (BYTE, (DIGEST_BYTES,)), **card}


def share_request(clients: int) -> Expected:
    """Whom a client deals shares out to: everybody's card."""
    return {"roster": (INTEGER, (clients,)), "cards": (BYTE, (clients, keys.CARD_BYTES))}


def round_fields(settings: Settings, participants: int, matrices: int, values: int) -> Expected:
    """What the server asks a block's statistics with, besides the masks of the block before."""
    fields: dict[str, tuple[torch.dtype, Shape]] = {"groups": (INTEGER, (matrices,))}
    if settings.secure:
        fields |= collector.request_fields(participants)
    if settings.noise:
        fields |= {"centre": (SINGLE, (values,)), "scale": (SINGLE, (values,))}
    return fields


def gram_request(settings: Settings, participants: int, matrices: Sequence[Matrix]) -> Expected:
    """What the server asks a block's Gram matrices with: a number for each input channel."""

    def channels(fields: Mapping[str, Tensor]) -> tuple[int, ...]:
        return (grams.channels_of(layout(matrices, fields["groups"], settings.needs)),)

    fields: dict[str, tuple[torch.dtype, Shape]] = {"groups": (INTEGER, (len(matrices),))}
    if settings.secure:
        fields |= collector.request_fields(participants)
    return {**fields, "scale": (DOUBLE, channels)}


def reply_fields(
    settings: Settings, parts: Sequence[Part], matrices: Sequence[Matrix], stored: Stored
) -> Expected:
    """A block's statistics: the sums themselves, or one vector of masked whole numbers. Where Gram
    matrices are sent exactly, first what they are rounded by; of clients that prune alone, what
    they kept."""
    if settings.aggregate != STATISTICS:
        return {**_ballot_fields(settings, matrices, stored), **_agreed(settings)}
    if settings.exact:
        return {"scale": (DOUBLE, (grams.channels_of(parts),))}
    return {**_sums(settings.secure, parts), **_agreed(settings)}


def gram_fields(settings: Settings, parts: Sequence[Part]) -> Expected:
    """The second half of a reply, where there are Gram matrices."""
    sums = _sums(False, parts) if settings.exact else {}
    matrices = grams.fields(parts, settings.exact, settings.gram_bits)
    return {**sums, **matrices, **_agreed(settings)}


def _agreed(settings: Settings) -> Expected:
    """A signature on who takes part in a secure sum."""
    return {"agreed": (BYTE, (keys.SIGNATURE_BYTES,))} if settings.secure else {}


def _sums(secure: bool, parts: Sequence[Part]) -> Expected:
    values = length(parts)
    if secure:
        return {WIDE: (INTEGER, (values + 2 * len(parts), WORDS))}
    sums = dict.fromkeys(("values", "rests"), (DOUBLE, (values,)))
    return {"counts": (INTEGER, (len(parts), 2)), **sums}


def _ballot_fields(settings: Settings, matrices: Sequence[Matrix], stored: Stored) -> Expected:
    """Tokens by matrix, then by parameter what is kept and, of updated ones, the weights."""
    expected: dict[str, tuple[torch.dtype, Shape]] = {"tokens": (INTEGER, (len(matrices),))}
    votes = vote_type(settings.clients) if settings.secure else BOOL
    for number, (name, parameter) in enumerate(parameters(matrices).items()):
        expected[f"mask{number}"] = (votes, tuple(parameter.shape))
        if settings.weights and settings.secure:
            expected[f"values{number}"] = (INTEGER, tuple(parameter.shape))
        elif settings.weights:
            dtype = stored.get(name, parameter.dtype)
            expected[f"values{number}"] = (dtype, _kept(f"mask{number}"))
    return expected


def parameters(matrices: Sequence[Matrix]) -> dict[str, nn.Parameter]:
    """The distinct parameters behind a block's matrices; fused experts are one parameter."""
    return {matrix.parameter_name: matrix.parameter for matrix in matrices}


def mask_fields(matrices: Sequence[Matrix], stored: Stored, weights: bool) -> Expected:
    """The masks of a block and, if it was updated, the weights they keep as they are stored."""
    expected: dict[str, tuple[torch.dtype, Shape]] = {}
    for number, (name, parameter) in enumerate(parameters(matrices).items()):
        expected[f"mask{number}"] = (BOOL, tuple(parameter.shape))
        if weights:
            dtype = stored.get(name, parameter.dtype)
            expected[f"values{number}"] = (dtype, _kept(f"mask{number}"))
    return expected


def mask_tensors(
    matrices: Sequence[Matrix], masks: Mapping[str, Tensor], stored: Stored, weights: bool
) -> dict[str, Tensor]:
    fields: dict[str, Tensor] = {}
    for number, (name, parameter) in enumerate(parameters(matrices).items()):
        keep = fields[f"mask{number}"] = masks[name]
        if weights:
            kept = parameter.detach().cpu()[keep]
            fields[f"values{number}"] = kept.to(stored.get(name, parameter.dtype))
    return fields


def _kept(mask: str) -> Callable[[Mapping[str, Tensor]], tuple[int, ...]]:
    """As many as a mask that came before keeps."""
    return lambda fields: (int(fields[mask].sum()),)


def story(before: bytes, kind: int, block: int, fields: Mapping[str, Tensor]) -> bytes:
    """What all clients must have been told alike up to now: everything but a client's own letters
    and number, each message behind the one before it."""
    found = hashlib.sha256(before)
    found.update(f"{kind} {block}\n".encode())
    for name in sorted(fields.keys() - OWN):
        value = fields[name].contiguous()
        found.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        found.update(value.view(-1).view(torch.uint8).numpy().data)
    return found.digest()


def beginning(settings: Settings) -> bytes:
    """The first of it: how the run protects and what it asks for."""
    return hashlib.sha256(write_settings(replace(settings, number=0))).digest()
