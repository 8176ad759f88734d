"""Clients of federated pruning that lie about what they measured, in finite numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parties import central, run, same, shares, tokens
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed import pruning
from symprune.fed.pruning import Privacy, messages
from symprune.fed.pruning.aggregate import bounds
from symprune.fed.secure import masking
from symprune.fed.wire.payload import decode_message, encode_message
from symprune.recipe import Recipe

LIAR = 1
COUNTS = 8  # samples and tokens of a block's four inputs, in front of its sums
MOMENTS = Recipe(refine="dsnot")
GRAM = Recipe(update="lsq")
Fields = dict[str, Tensor]


def lie(kind: int, change: Callable[[Fields], Fields]) -> Callable[[int, int, bytes], bytes]:
    """One client's replies of a kind, changed on their way."""

    def changed(client: int, message: int, reply: bytes) -> bytes:
        if client != LIAR or messages.read_head(reply)[1] != kind:
            return reply
        fields = decode_message(reply)
        return encode_message({**fields, **change(fields)})

    return changed


def one(values: Tensor, place: int, value: float) -> Tensor:
    return values.index_fill(0, torch.tensor([place]), value)


def left(result: Any, culprit: str) -> bool:
    return result.clients_left == [0, 2] and culprit in result.report.notes[-1]


LIES: dict[str, tuple[Recipe, Callable[[Fields], Fields], str]] = {
    "1e30 in one channel": (Recipe(), lambda f: {"values": one(f["values"], 3, 1e30)}, "as usual"),
    "a million times all": (Recipe(), lambda f: {"values": f["values"] * 1e6}, "as usual"),
    "a channel twice over the bound": (
        Recipe(),
        lambda f: {"values": one(f["values"], 3, 20_001 * float(f["values"][:32].max()))},
        "as usual",
    ),
    "rests that wipe out the others": (
        Recipe(),
        lambda f: {"values": f["values"], "rests": one(f["rests"], 3, -1e30)},
        "rests of roundings",
    ),
    "means of 1e30": (
        MOMENTS,
        lambda f: {"values": f["values"].clone().index_fill(0, torch.tensor([32 + 3]), 1e30)},
        "sums of squares rule out",
    ),
    "sums of no tokens": (Recipe(), lambda f: {"counts": f["counts"] * 0}, "no tokens"),
}


@pytest.mark.parametrize("name", LIES)
def test_one_client_does_not_decide_with_a_large_number(name: str) -> None:
    recipe, change, culprit = LIES[name]
    model, result = run(recipe, lie(messages.ROUND, change))
    assert left(result, culprit), result.report.notes
    assert result.to_dict()["federated"]["robust"] == "norm:100"
    assert same(model, central(recipe, torch.cat([shares()[0], shares()[2]])))


def test_a_lie_within_the_bound_counts() -> None:
    """What is plausible is not noticed, which is said."""
    change = lie(messages.ROUND, lambda f: {"values": f["values"] * 4})
    assert run(Recipe(), change)[1].clients_left == [0, 1, 2]
    unbound = lie(messages.ROUND, lambda f: {"values": f["values"] * 1e6})
    assert run(Recipe(), unbound, robust="none")[1].clients_left == [0, 1, 2]


def larger(fields: Fields) -> Fields:
    """Entries beside the diagonal that no text has."""
    first = fields["gram0"].clone()
    first[1] = 1e30 if first.is_floating_point() else torch.iinfo(first.dtype).max
    return {"gram0": first}


def all_larger(fields: Fields) -> Fields:
    return {n: v * 1e8 for n, v in fields.items() if n.startswith(("gram", "rest"))}


GRAM_LIES: dict[str, tuple[int, Callable[[Fields], Fields], dict[str, Any], str]] = {
    "an entry": (messages.GRAMS, larger, {}, "Gram matrix that is none"),
    "an entry in units": (messages.GRAMS, larger, {"gram_bits": 32}, "Gram matrix that is none"),
    "all entries": (messages.GRAMS, all_larger, {}, "Gram matrix that is none"),
    "all entries where nothing else is sent": (
        messages.GRAMS,
        all_larger,
        {"recipe": Recipe("magnitude", update="lsq")},
        "as usual",
    ),
    "lengths": (
        messages.ROUND,
        lambda f: {"values": f["values"] * 1e8},
        {"gram_bits": 16},
        "as usual",
    ),
}


@pytest.mark.parametrize("name", GRAM_LIES)
def test_a_gram_matrix_of_large_numbers_is_left_out(name: str) -> None:
    kind, change, options, culprit = GRAM_LIES[name]
    _, result = run(**{"recipe": GRAM, **options}, change=lie(kind, change))
    assert left(result, culprit), result.report.notes


def test_who_comes_first_does_not_round_the_others_to_nothing() -> None:
    """All round by the first client's first sample: 1e30 there would leave nothing of theirs."""

    def first(client: int, message: int, reply: bytes) -> bytes:
        if client or messages.read_head(reply)[1] != messages.ROUND:
            return reply
        fields = decode_message(reply)
        return encode_message({**fields, "scale": fields["scale"] * 2.0**60})

    model, result = run(GRAM, first)
    assert result.clients_left == [1, 2] and "as usual" in result.report.notes[-1]
    assert same(model, central(GRAM, torch.cat(shares()[1:])))


def test_an_average_of_weights_takes_no_large_ones() -> None:
    change = lie(messages.ROUND, lambda f: {"values0": one(f["values0"], 5, 1e30)})
    _, result = run(GRAM, change, aggregate="average")
    assert left(result, "largest dense one"), result.report.notes


def masked(change: float) -> Callable[[int, int, bytes], bytes]:
    """What a client behind its masks adds to one sum of squares."""

    def more(fields: Fields) -> Fields:
        whole = fields[masking.WIDE]
        values = torch.zeros(len(whole), dtype=torch.float64)
        values[COUNTS + 3] = change
        extra = masking.to_fixed(values, torch.zeros_like(values), 1)
        total = masking.total([{masking.WIDE: whole}, {masking.WIDE: extra}])
        return {masking.WIDE: total[masking.WIDE]}

    return lie(messages.ROUND, more)


def test_behind_masks_an_absurd_sum_stops_the_run_and_a_plausible_one_does_not() -> None:
    pytest.importorskip("cryptography")
    with pytest.raises(SympruneError, match="who it was cannot be told"):
        run(Recipe(), masked(1e15), secure=True)
    assert run(Recipe(), masked(10.0), secure=True)[1].clients_left == [0, 1, 2]


def test_noise_hides_no_more_than_clip_and_noise() -> None:
    promised = Privacy(50.0, 1e-3, 1.0)
    change = lie(messages.ROUND, lambda f: {"values": f["values"] * 0 + 1e14})
    options: dict[str, Any] = {"privacy": promised, "reference": tokens()}
    _, result = run(Recipe(), change, **options)
    assert left(result, "clipped samples and their noise"), result.report.notes
    assert run(Recipe(), **options)[1].clients_left == [0, 1, 2]


def test_nobody_counts_for_a_million_times_the_text_of_the_others() -> None:
    def boast(fields: Fields) -> Fields:
        head = fields["head"].clone()
        head[2] = 4_000_000
        return {"head": head}

    model, result = run(Recipe(), lie(messages.HELLO, boast))
    assert left(result, "claims 4000000 samples"), result.report.notes
    assert same(model, central(Recipe(), torch.cat([shares()[0], shares()[2]])))


def removed(model: Any) -> list[Tensor]:
    return [p == 0 for p in model.parameters()]


def differing(one: Any, other: Any) -> int:
    pairs = zip(removed(one), removed(other), strict=True)
    return sum(int((a != b).sum()) for a, b in pairs)


@pytest.mark.parametrize("rule", ["trimmed:0.2", "geometric-median", "krum:1"])
def test_rules_in_the_place_of_the_sum_bear_a_plausible_lie(rule: str) -> None:
    """A channel that one of five clients says is 15 times as long as it is."""
    parts = [*shares(), *(tokens().flip(0).split((3, 4)))]
    honest = pruning.prune(_model(), parts, Recipe()).report.masks
    lying = lie(
        messages.ROUND, lambda f: {"values": one(f["values"], 3, 225 * float(f["values"][3]))}
    )

    def changed(robust: str) -> int:
        result = _federation(parts, lying, robust)
        return sum(int((result.report.masks[n] != keep).sum()) for n, keep in honest.items())

    assert changed(rule) < changed("norm:20")


def _model() -> Any:
    import families

    return families.model()


def _federation(parts: list[Tensor], change: Any, robust: str) -> Any:
    clients = [pruning.Client(_model(), part, allow_few_tokens=True) for part in parts]
    server = pruning.Server(_model(), Recipe(), len(parts), robust=robust)

    def send(outgoing: Any) -> dict[int, bytes]:
        return {n: change(n, 0, clients[n](data)) for n, data in outgoing.items()}

    return pruning.run(server, send)


@pytest.mark.parametrize(
    ("rule", "options", "culprit"),
    [
        ("krum:1", {"secure": True}, "which --secure-sum hides"),
        ("trimmed:0.1", {"privacy": Privacy(8.0), "reference": tokens()}, "which --epsilon hides"),
        ("geometric-median", {"aggregate": "votes"}, "is for sums per channel"),
        ("median", {}, "is no defence"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(
    rule: str, options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(SympruneError, match=culprit):
        pruning.Server(_model(), Recipe(), 3, robust=rule, **options)
    with pytest.raises(SympruneError, match="Gram matrices of swap"):
        pruning.Server(_model(), GRAM, 3, robust="krum:1")


def test_an_error_that_a_reply_provokes_is_its_clients_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever nobody foresaw: the client is left out, and the server goes on."""
    from symprune.fed.pruning.aggregate.judging import Judge

    check = Judge.check

    def fail(self: Judge, fields: Fields, known: Any) -> None:
        if known.samples == 4:  # as client 1 alone has
            raise RuntimeError("of the inside")
        check(self, fields, known)

    monkeypatch.setattr(Judge, "check", fail)
    _, result = run(Recipe())
    assert left(result, "cannot be read (RuntimeError)"), result.report.notes


def test_experts_that_few_tokens_reach_do_not_make_a_client_odd() -> None:
    few, many = torch.full((8,), 3.0), torch.full((8,), 1.0)
    said: dict[int, bounds.Lengths] = {0: [many], 1: [many], 2: [few], 3: [None]}
    assert bounds.too_long(said, [None], 20.0) == {}
    assert list(bounds.too_long({**said, 3: [many * 100]}, [None], 20.0)) == [3]
    assert bounds.too_long({0: [many], 1: [many * 100]}, [many], 20.0) == {}
    assert list(bounds.too_long({0: [many], 1: [many * 1e4]}, [many], 20.0)) == [1]
