"""Private statistics: the promised (epsilon, delta), the sensitivity, and what noise ends in."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import families
import pytest
import torch
from torch import Tensor

from symprune.engine import walk
from symprune.engine.decide import Needs
from symprune.errors import SympruneError
from symprune.fed import pruning
from symprune.fed.mechanism import UNITS, seeded_draw
from symprune.fed.owner.guard import Guard
from symprune.fed.owner.policy import Policy
from symprune.fed.pruning import Client, Privacy, Server, messages, noise
from symprune.fed.pruning.aggregate import packed_stats
from symprune.fed.pruning.noise import check_sharing
from symprune.fed.pruning.refusals import check_asked
from symprune.fed.wire.payload import decode_message, encode_message
from symprune.recipe import Recipe
from symprune.stats import MOMENTS, SQUARE, ChannelStats

NO_NOISE = 1e9


def prune(epsilon: float, reference: Tensor, recipe: Recipe, **options: Any) -> Any:
    model = families.model()
    clients = [families.tokens(12, 12, seed=1), families.tokens(12, 12, seed=2)]
    result = pruning.prune(
        model, clients, recipe, privacy=Privacy(epsilon, **options), reference=reference,
        noise_seed=0,
    )  # fmt: skip
    return model, result


def agreement(one: Any, other: Any) -> float:
    """The share of prunable weights on which two pruned models agree."""
    pairs = [
        (p != 0) == (q != 0)
        for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True)
        if "proj" in name
    ]
    return float(torch.cat([pair.flatten() for pair in pairs]).float().mean())


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
@pytest.mark.parametrize("blocks", [2, 32])
def test_all_blocks_together_spend_what_was_promised(epsilon: float, blocks: int) -> None:
    accounting = pytest.importorskip("dp_accounting")
    multiplier = Privacy(epsilon, 1e-5).multiplier(blocks)
    event = accounting.GaussianDpEvent(multiplier)
    oracles = [
        accounting.rdp.RdpAccountant(),
        accounting.pld.PLDAccountant(value_discretization_interval=1e-3),
    ]
    for oracle in oracles:
        oracle.compose(event, blocks)
    assert 0.99 * epsilon <= oracles[1].get_epsilon(1e-5) <= epsilon * (1 + 1e-6)
    assert oracles[0].get_epsilon(1e-5) > epsilon  # the bound that is not exact asks for more noise


def test_one_sample_moves_the_sum_by_no_more_than_the_noise_is_made_for() -> None:
    generator = torch.Generator().manual_seed(0)
    d, clip = 500, 0.7
    centre, scale = torch.rand(d, generator=generator), torch.rand(d, generator=generator) + 0.1
    for size in (0.0, 0.01, 1.0, 1e3, 1e12):
        values = size * torch.randn(d, dtype=torch.float64, generator=generator)
        whole = noise.clip_difference(values, centre, scale, clip)
        assert sum(n * n for n in whole.tolist()) <= UNITS**2
    near = centre.double() + 0.5 * scale.double()
    found = noise.clip_difference(near, centre, scale, clip).double() * (clip * d**0.5 / UNITS)
    assert torch.allclose(found, torch.full((d,), 0.5, dtype=torch.float64), atol=2e-6, rtol=0)


@pytest.mark.parametrize("clip", [1e-170, 1e-300, 5e-324, 1e300])
def test_no_clip_makes_a_sample_longer_than_the_noise_is_made_for(clip: float) -> None:
    """Below 1e-154 the squares of clipped values underflow to a length of zero."""
    d = 300
    centre, scale = torch.zeros(d), torch.ones(d)
    for size in (1e-320, 1e-100, 1.0, 1e300):
        values = torch.full((d,), size, dtype=torch.float64)
        whole = noise.clip_difference(values, centre, scale, clip)
        assert sum(n * n for n in whole.tolist()) <= UNITS**2


def test_the_noise_has_the_size_of_the_mechanism() -> None:
    total = torch.zeros(20_000, dtype=torch.int64)
    whole = noise.noisy(total, 3.0, seeded_draw(0))
    assert torch.equal(whole, whole.round())  # sums of them are exact, whoever adds them up
    found = noise.in_differences(whole, 0.5)
    assert float(found.std()) == pytest.approx(3.0 * 0.5 * math.sqrt(20_000), rel=0.02)


def test_what_a_client_sends_is_the_clipped_sum_and_fresh_noise() -> None:
    """Client and server by hand: the reply differs from the clipped sum by the promised noise."""
    model, data, reference = families.model(), families.tokens(5, 12), families.tokens(3, 12, 9)
    server = Server(model, Recipe(), 1, privacy=Privacy(2.0), reference=reference)
    replies = []
    for seed in (0, 1):
        client = Client(model, data, Privacy(2.0), noise_seed=seed)
        server.welcome({0: client(server.hello()[0])})
        replies.append(
            messages.read(client(server.ask(0)[0]), messages.ROUND, reply_fields(server))
        )
    values = [fields["values"] for _, fields in replies]
    deviation = server.settings.noise * UNITS
    assert float((values[0] - values[1]).std()) == pytest.approx(deviation * 2**0.5, rel=0.2)
    for _, fields in replies:
        assert fields["counts"].tolist() == [[5, 60]] * len(fields["counts"])


def reply_fields(server: Server) -> Any:
    return messages.reply_fields(server.settings, server._parts, server.layout.matrices(0), {})


@pytest.mark.parametrize(("method", "refine"), [("ria", None), ("symwanda", "dsnot")])
def test_without_noise_only_the_clipping_shows_and_with_much_the_reference_decides(
    method: str, refine: str | None
) -> None:
    recipe = Recipe(method=method, refine=refine)
    reference = families.tokens(6, 12, seed=3)
    data = torch.cat([families.tokens(12, 12, seed=1), families.tokens(12, 12, seed=2)])
    exact, public = families.model(), families.model()
    walk.prune(exact, data, recipe)
    walk.prune(public, reference, recipe)
    faint, _ = prune(NO_NOISE, reference, recipe, clip=3.0)
    strong, _ = prune(0.01, reference, recipe)
    assert agreement(faint, exact) > agreement(public, exact)
    assert agreement(faint, exact) > 0.995
    assert agreement(strong, public) > 0.99


def test_the_estimate_is_exact_without_noise() -> None:
    stats = ChannelStats(6, {SQUARE, MOMENTS})
    stats.add(torch.randn(4, 9, 6, generator=torch.Generator().manual_seed(1)) + 0.3)
    part = packed_stats.Part("inputs", ("w",), 6, frozenset({SQUARE, MOMENTS}))
    packed = packed_stats.pack([part], {"w": stats}, {})
    centre, scale = noise.reference([part], packed)
    shift = (packed.values - 4 * centre.double()) / scale.double() + 0.4
    found = noise.estimate([part], shift, centre, scale, 4, 36, 0.0, 0.5)
    expected = packed.values + 0.4 * scale.double()
    assert torch.allclose(found.values, expected, rtol=1e-5)
    assert found.counts.tolist() == [[4, 36]]


def test_masked_and_noised_statistics_go_together() -> None:
    reference, tokens = families.tokens(4, 12, seed=3), families.tokens(8, 12)
    models = []
    for secure in (False, True):
        models.append(families.model())
        pruning.prune(
            models[-1], list(tokens.split((3, 5))), Recipe(), secure=secure, noise_seed=4,
            privacy=Privacy(8.0), reference=reference,
        )  # fmt: skip
    assert agreement(*models) == 1.0


def test_a_client_insists_on_its_protection() -> None:
    model, data = families.model(), families.tokens(3, 12)
    open_server = Server(model, Recipe(), 2)
    with pytest.raises(SympruneError, match="insists on masked"):
        Client(model, data, secure=True)(open_server.hello()[0])
    with pytest.raises(SympruneError, match="insists on more noise"):
        Client(model, data, Privacy(1.0))(open_server.hello()[0])
    weak = Server(model, Recipe(), 2, privacy=Privacy(2.0), reference=data)
    with pytest.raises(SympruneError, match="insists on more noise"):
        Client(model, data, Privacy(1.0))(weak.hello()[0])


def test_a_client_does_not_spend_its_privacy_twice() -> None:
    model, data = families.model(), families.tokens(3, 12)
    server = Server(model, Recipe(), 1, privacy=Privacy(1.0), reference=data)
    client = Client(model, data, Privacy(1.0))
    server.welcome({0: client(server.hello()[0])})
    client(server.ask(0)[0])
    with pytest.raises(SympruneError, match="spend its privacy twice"):
        client(server.hello()[0])


def test_a_client_does_not_measure_in_units_of_zero() -> None:
    model, data = families.model(), families.tokens(3, 12)
    server = Server(model, Recipe(), 1, privacy=Privacy(1.0), reference=data)
    client = Client(model, data, Privacy(1.0))
    server.welcome({0: client(server.hello()[0])})
    fields = decode_message(server.ask(0)[0])
    with pytest.raises(SympruneError, match="units of zero"):
        client(encode_message({**fields, "scale": torch.zeros_like(fields["scale"])}))


def test_a_repeated_round_sends_the_same_noise_again() -> None:
    """Otherwise a server could average the noise away by asking often."""
    model, data = families.model(), families.tokens(3, 12)
    server = Server(model, Recipe(), 3, True, Privacy(1.0), data)
    clients = [Client(model, data, Privacy(1.0), secure=True) for _ in range(3)]
    server.welcome({n: clients[n](m) for n, m in server.hello().items()})
    server.take(0, {n: clients[n](m) for n, m in server.ask(0).items()})
    replies = {n: clients[n](m) for n, m in server.ask(0).items()}
    before = clients[0].state.measured.values.clone()
    assert {n: clients[n](m) for n, m in server.ask(0).items()} == replies
    assert torch.equal(clients[0].state.measured.values, before)
    assert not server.take(0, {n: replies[n] for n in (0, 1)})
    shares = {n: clients[n](m) for n, m in server.ask(0).items()}
    assert shares.keys() == {0, 1} and server.take(0, shares)


def test_privacy_needs_public_tokens_of_the_clients_length() -> None:
    data = [families.tokens(3, 12)] * 2
    with pytest.raises(SympruneError, match="public reference tokens"):
        pruning.prune(families.model(), data, Recipe(), privacy=Privacy(1.0))
    with pytest.raises(SympruneError, match=r"one length, not of \[8, 12\]"):
        pruning.prune(
            families.model(), data, Recipe(), privacy=Privacy(1.0), reference=families.tokens(2, 8)
        )


def test_criteria_without_data_spend_nothing() -> None:
    data = [families.tokens(3, 12)] * 2
    recipe = Recipe(method="magnitude")
    result = pruning.prune(
        families.model(), data, recipe, privacy=Privacy(1.0), reference=families.tokens(2, 12)
    )
    assert result.privacy is None and "privacy" not in result.to_dict()["federated"]


def test_how_many_tokens_an_expert_saw_stays_private() -> None:
    """Every expert reports the public counts, also one that saw nothing."""
    model = families.model("qwen3-moe")
    clients = [families.tokens(2, 4, seed=1), families.tokens(3, 4, seed=2)]
    result = pruning.prune(
        model,
        clients,
        Recipe(),
        privacy=Privacy(8.0),
        reference=families.tokens(2, 4),
        noise_seed=1,
    )
    assert {layer.tokens for layer in result.report.layers} == {20}
    assert result.report.notes == []


def test_settings_survive_the_wire() -> None:
    needs = Needs(frozenset({SQUARE, MOMENTS}), frozenset({SQUARE}))
    settings = messages.Settings(2, 5, needs, True, 3.25, 0.5)
    assert messages.read_settings(messages.write_settings(settings)) == settings


def test_behind_a_secure_sum_clients_add_shares_of_the_noise_that_are_enough_together() -> None:
    """The sum's noise is at least the promised one, and less than everybody's whole noise."""
    pytest.importorskip("cryptography")
    reference, found = families.tokens(3, 12, 9), {}
    for honest in (None, 1):
        promised = Privacy(2.0, honest=honest)
        server = Server(families.model(), Recipe(), 5, True, promised, reference)
        assert server.settings.honest == (2 if honest is None else 1)
        numbers, share = torch.zeros(4000, dtype=torch.int64), server.settings.share
        drawn = [noise.noisy(numbers, share, seeded_draw(seed)) for seed in range(5)]
        size = float(torch.stack(drawn).sum(0).std())
        found[honest] = size / UNITS / server.settings.noise
    assert found[None] == pytest.approx((5 / 2) ** 0.5, rel=0.05)
    assert found[1] == pytest.approx(5**0.5, rel=0.05)


def test_a_client_is_not_told_to_count_on_more_honest_ones_than_there_are() -> None:
    reference = families.tokens(3, 12, 9)
    with pytest.raises(SympruneError, match="there may be as few as 1"):
        Server(families.model(), Recipe(), 3, True, Privacy(2.0, honest=3), reference)
    with pytest.raises(SympruneError, match="behind a secure sum alone"):
        Server(families.model(), Recipe(), 3, False, Privacy(2.0, honest=2), reference)
    with pytest.raises(SympruneError, match="honest must be 1 or more"):
        Privacy(2.0, honest=0)
    settings = messages.Settings(0, 3, Needs(frozenset({SQUARE})), True, 2.0, 0.5, honest=3)
    assert messages.read_settings(messages.write_settings(settings)) == settings
    with pytest.raises(SympruneError, match="there may be as few as 1"):
        check_sharing(3, 3)
    for wrong in (replace(settings, honest=0), replace(settings, secure=False)):
        with pytest.raises(SympruneError, match="clients share the noise"):
            messages.read_settings(messages.write_settings(wrong))
    with pytest.raises(SympruneError, match="noise that others add to"):
        check_asked(Guard(Policy(), "own.txt"), settings, 5)
    check_asked(Guard(Policy(protection="shared-noise"), "own.txt"), settings, 5)
