"""What algorithms that know layers make of a model with masks: the structure of the whole model,
for the weights that are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.fed.algorithms import build
from symprune.fed.algorithms.fedp3.layer_subsets import by_weight, layer_sizes, prune_mask
from symprune.fed.algorithms.fedspa.local_scores import weight_scores
from symprune.fed.algorithms.fedsparse.em import weight_groups
from symprune.fed.algorithms.fedsparse.feddrop import FedDrop, draw_units, remaining_weights
from symprune.fed.algorithms.shared.layer_masks import layer_ones
from symprune.fed.algorithms.similarity_network.personal_parts import make_placement
from symprune.fed.problems.layout import FlatLayout, KeptLayout, keep_layout
from symprune.fed.problems.make import make_problem
from symprune.fed.protocol import Turn
from symprune.fed.randomness import Stream

NAMES = ("1.weight", "1.bias", "3.weight", "3.bias")
WHOLE = FlatLayout(NAMES, ((3, 4), (3,), (2, 3), (2,)))
KEEP = {
    "1.weight": torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]]).bool(),
    "1.bias": torch.tensor([1, 0, 1]).bool(),
    "3.weight": torch.tensor([[0, 1, 1], [1, 0, 0]]).bool(),
}


def kept_layout() -> KeptLayout:
    return keep_layout(WHOLE, KEEP)


def stream(rows: int = 2) -> Stream:
    return Stream.of(0, 0, "test", torch.arange(rows))


def test_vectors_go_to_the_whole_model_and_back() -> None:
    layout = kept_layout()
    assert layout.sizes == [4, 2, 3, 2] and layout.dimension == 11
    assert layout.positions.tolist() == [0, 3, 8, 9, 12, 14, 16, 17, 18, 21, 22]
    w = torch.arange(1.0, 12.0)
    assert torch.equal(layout.gather(layout.scatter(w)), w)
    parts = layout.split(w.expand(2, -1))
    assert parts["1.weight"][0].tolist() == [[1, 0, 0, 2], [0, 0, 0, 0], [3, 4, 0, 0]]
    assert torch.equal(layout.join({name: part[0] for name, part in parts.items()}), w)
    assert layout.slices()["3.weight"] == slice(6, 9)
    ones = torch.ones(2, 6, dtype=torch.bool)
    assert layout.gather_part(2, ones).shape == (2, 3)
    assert layout.gather_part(2, torch.arange(6)).tolist() == [1, 2, 3]


def test_equal_masks_have_equal_digests_and_others_have_not() -> None:
    other = {**KEEP, "1.bias": torch.tensor([1, 1, 1]).bool()}
    assert kept_layout() == kept_layout() and kept_layout().digest
    assert keep_layout(WHOLE, other).digest != kept_layout().digest
    assert kept_layout() != WHOLE


def test_a_gate_guards_the_kept_weights_of_its_neuron() -> None:
    groups = weight_groups(kept_layout(), "neuron")
    assert groups.of.tolist() == [0, 0, 1, 1, 0, 1, 2, 2, 3, 2, 3]  # the second neuron is gone
    assert groups.count == 4 and groups.sizes.tolist() == [3, 3, 3, 2]
    open_layer = weight_groups(kept_layout(), "neuron", ("output",))
    assert open_layer.count == 2 and int(open_layer.exempt.sum()) == 5
    single = weight_groups(kept_layout(), "weight")
    assert single.of.tolist() == list(range(11))


def test_dropped_units_are_those_of_the_whole_model() -> None:
    layout, turn = kept_layout(), Turn(3, 5, 2, torch.arange(2))
    drop = build("feddrop", rate=0.4).located(layout)
    assert isinstance(drop, FedDrop)
    units = draw_units(WHOLE.shapes, 0.4, turn.stream("drop"))
    assert torch.equal(drop.mask(turn), layout.gather(remaining_weights(WHOLE.shapes, units)))


def test_personal_parts_are_places_in_the_whole_model() -> None:
    layout = kept_layout()
    own: Tensor = make_placement(layout, "output").personal >= 0
    assert own.tolist() == [False] * 6 + [True] * 5
    assert (make_placement(layout, "8:13").personal >= 0).nonzero().squeeze(1).tolist() == [2, 3, 4]
    assert make_placement(layout, "all").shared_size == 11


def test_layers_of_fedp3_are_pruned_to_a_share_of_what_is_kept() -> None:
    layout, owned = kept_layout(), torch.tensor([[False, True], [True, True]])
    assert layer_sizes(layout) == [6, 5]
    assert by_weight(owned, layout)[0].tolist() == [False] * 6 + [True] * 5
    half = prune_mask("random", 0.5, layout, owned, stream())
    assert half[0, :4].sum() == 2 and bool(half[0, 4:].all()) and bool(half[1].all())
    block = prune_mask("ordered", 0.5, layout, owned, stream())
    assert block[0].tolist() == [True, True, False, False] + [True] * 7  # rows 0 and 1


def test_personal_masks_have_a_share_of_the_kept_weights() -> None:
    layout = kept_layout()
    assert layer_ones(layout, 0.5, "uniform") == (2, 2, 2, 2)
    whole = keep_layout(WHOLE, {name: torch.ones_like(keep) for name, keep in KEEP.items()})
    for density in (0.3, 0.5, 0.9):
        assert layer_ones(whole, density, "erk") == layer_ones(WHOLE, density, "erk")


def test_criteria_rate_the_whole_matrix_with_its_zeros() -> None:
    problem = make_problem("digits", "mlp:6", clients=2)
    keep = torch.rand(6, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    masked = problem.masked({"1.weight": keep})
    w = masked.initial(0).expand(2, -1)
    rows = problem.rows
    short = weight_scores("ria", masked, w, rows, stream())
    dense = weight_scores("ria", problem, masked.layout.scatter(w), rows, stream())
    assert torch.equal(short, masked.layout.gather(dense))
