"""Which replies of a turn are counted: those that are what the algorithm expects, and no others.

A reply is bounded before it is opened, compared with the expected names, types and shapes, and
tried alone on a copy of the server's state. What fails is named in the log and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.protocol import Algorithm, Like, Received, State, Turn, check
from symprune.fed.robust import UNDEFENDED, Defence, Usual, defend
from symprune.fed.wire.envelope import unpack
from symprune.fed.wire.parcel import collect
from symprune.fed.wire.payload import decode_message

log = logging.getLogger("symprune.fed")
HEADER_BYTES = 4096  # a reply's header, and a client's reason why it cannot work
FIELD_BYTES = 128  # name and shape of one field, at most
MAX_BITS = 1 << 53


@dataclass(frozen=True)
class Counted:
    """The replies that count, in the order of their clients."""

    clients: Tensor
    received: Received
    sizes: Tensor  # bytes of the encoded messages
    bits: Tensor  # what the papers count


def deliveries(
    asked: Mapping[str, int], came: Iterable[tuple[str, int, bytes]], numbers: Mapping[int, int]
) -> dict[int, bytes]:
    """Replies (to which letter, from which node, bytes) by client number. `asked` says for whom a
    letter was, `numbers` which node is which client. Strangers and second replies are refused."""
    out: dict[int, bytes] = {}
    for letter, node, data in came:
        client = asked.get(letter)
        if client is None or numbers.get(node) != client:
            log.warning("A reply from node %s is refused: it was not asked.", node)
        elif client in out:
            log.warning("A second reply of client %s is refused.", client)
        else:
            out[client] = data
    return dict(sorted(out.items()))


def largest(likes: Mapping[str, Like]) -> int:
    """Bytes that a reply of these fields can have: every payload is at most as long as dense."""
    fields = sum(FIELD_BYTES + like.values * like.dtype.itemsize for like in likes.values())
    return HEADER_BYTES + fields


def open_reply(data: bytes, likes: Mapping[str, Like]) -> dict[str, Tensor]:
    """The fields of an encoded message that must look like this."""
    fields = decode_message(data, sum(like.values for like in likes.values()))
    if fields.keys() != likes.keys():
        raise SympruneError(f"it has the fields {sorted(fields)}, not {sorted(likes)}")
    for name, like in likes.items():
        tensor = fields[name]
        if tensor.dtype != like.dtype:
            raise SympruneError(f"its field {name!r} is {tensor.dtype}, not {like.dtype}")
        if like.shape is None:
            fits = tensor.dim() == 1 and tensor.numel() <= like.most
        else:
            fits = tuple(tensor.shape) == like.shape
        if not fits:
            wanted = like.shape or f"one of up to {like.most}"
            raise SympruneError(f"its field {name!r} has shape {tuple(tensor.shape)}, not {wanted}")
    return fields


def count(
    algorithm: Algorithm,
    server: State,
    replies: Mapping[int, bytes],
    turn: Turn,
    defence: Defence = UNDEFENDED,
    usual: Usual | None = None,
) -> Counted:
    """The replies of the turn that pass, alone and beside the others, put together. usual: how far
    apart replies were in the turns before."""
    clients, bodies, bits = [], [], []
    for client, data in sorted(replies.items()):
        alone = turn.about(torch.tensor([client]))
        try:
            body, counted_bits = _check_reply(algorithm, server, data, alone)
        except Exception as error:  # whatever a stranger's bytes can provoke, the run goes on
            reason = str(error).rstrip(".") or type(error).__name__
            log.warning("Client %s, round %s: refused, %s.", client, turn.number, reason)
            continue
        clients.append(client)
        bodies.append(body)
        bits.append(counted_bits)
    sizes = torch.tensor([len(body) for body in bodies], dtype=torch.int64)
    numbers = torch.tensor(clients, dtype=torch.int64)
    told = torch.tensor(bits, dtype=torch.int64)
    received = collect(bodies)
    try:
        about, usual = turn.about(numbers), {} if usual is None else usual
        kept, received, _ = defend(defence, algorithm, received, about, usual)
    except SympruneError as error:  # too few for the rule: as if nobody had replied
        log.warning("Round %s: %s", turn.number, error)
        kept, received = torch.zeros(len(clients), dtype=torch.bool), {}
    for client in numbers[~kept].tolist():
        rule = f"{defence.rule}:{defence.value:g}"
        log.warning("Client %s, round %s: left out by %s.", client, turn.number, rule)
    return Counted(numbers[kept], received, sizes[kept], told[kept])


def _check_reply(algorithm: Algorithm, server: State, data: bytes, turn: Turn) -> tuple[bytes, int]:
    likes = algorithm.reply_like(server, turn)
    letter = unpack(data, largest(likes))
    status = letter.header.get("status")
    if status == "error":
        raise SympruneError(f"it says: {str(letter.header.get('reason'))[:500]}")
    number, bits = letter.header.get("turn"), letter.header.get("bits")
    check(status == "done" and len(letter.parts) == 1, "it is not the reply of a client that works")
    check(number == turn.number, f"it is for round {number}")
    check(type(bits) is int and 0 <= bits <= MAX_BITS, "its count of bits is no number")
    assert isinstance(bits, int)
    open_reply(letter.parts[0], likes)
    if not algorithm.needs_everyone(turn):
        after = algorithm.server_step(server, collect([letter.parts[0]]), turn)
        for name, tensor in server.items():
            same = after[name].shape == tensor.shape and after[name].dtype == tensor.dtype
            check(same, f"it would change the shape of the server's {name!r}")
        finite = bool(torch.isfinite(algorithm.model(after)).all())
        check(finite, "it would make the model infinite")
    return letter.parts[0], bits
