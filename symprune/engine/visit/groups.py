"""The matrices of a block in groups, in the order in which data flows through them.

Found by what one sample shows, not by names: matrices that are given the same tensor are a group
(q/k/v, gate/up), and so are all of one kind (the experts' first matrices, then their second ones).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from symprune.engine.collect import look
from symprune.engine.forward import Activations
from symprune.machine import distributed
from symprune.models.matrices import Matrix
from symprune.update.targets import OWN


def find_groups(
    activations: Activations, index: int, block: nn.Module, found: list[Matrix]
) -> tuple[list[list[Matrix]], frozenset[str]]:
    """The groups of a block, the same in all processes, and the matrices that it multiplies with
    more than once."""
    seen = look(activations, index, block, found)
    group_of, repeated = distributed.agree((order_kinds(found, seen.inputs), seen.repeated))
    last = max(group_of.values(), default=0)
    groups: dict[int, list[Matrix]] = {}
    for matrix in found:  # what the sample did not come by may still be met by others
        groups.setdefault(group_of.get(matrix.kind, last), []).append(matrix)
    return [groups[number] for number in sorted(groups)], frozenset(repeated)


def order_kinds(found: list[Matrix], inputs: Mapping[str, object]) -> dict[str, int]:
    """The number of the group that each kind of matrix belongs to. inputs are by name, in the order
    in which the matrices were met; those that are one object make two kinds one group."""
    kinds = {matrix.name: matrix.kind for matrix in found}
    group_of: dict[str, int] = {}
    fed: dict[int, int] = {}
    for number, (name, given) in enumerate(inputs.items()):
        joined = {group_of.get(kinds[name], number), fed.get(id(given), number)}
        first = min(joined)
        group_of = {kind: first if g in joined else g for kind, g in group_of.items()}
        fed = {each: first if g in joined else g for each, g in fed.items()}
        group_of[kinds[name]] = fed[id(given)] = first
    return group_of


def describe_cost(groups: int, targets: str) -> str:
    """What measuring group by group takes, as a sentence."""
    models = 1 if targets == OWN else 2
    return (
        f"Group by group: {groups} in a block, so {models * (groups + 1)} forwards of it and not "
        "2; those that measure end where their group does"
    )
