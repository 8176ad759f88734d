"""The mixtures of experts of a model whose experts can be dropped: each a router and its experts.

What follows from how many experts there are is known of a family, not seen in its tensors. So a
family is named here, and what its layers are made of is checked besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from symprune.errors import SympruneError
from symprune.experts import Drop
from symprune.models.matrices import is_experts

COUNTS = {
    "mixtral": "num_local_experts",
    "qwen3_moe": "num_experts",
    "olmoe": "num_experts",
    "deepseek_v3": "n_routed_experts",
    "gpt_oss": "num_local_experts",
}
"""What the configuration of each family calls the number of experts."""
TOP_K = "num_experts_per_tok"
ROUTERS = ("gate", "router")
GROUP_SCORE = 2  # a group's score is the sum of its best two experts'


@dataclass(frozen=True)
class Mixture:
    """A router and the experts it picks; name is that of the module around them."""

    name: str
    router: nn.Module
    experts: nn.Module
    count: int


@dataclass(frozen=True)
class Plan:
    """How many experts every layer has, how many go, and how many a token is then given to."""

    count: int
    dropped: int
    groups: int
    top_k: int
    top_k_before: int

    @property
    def left(self) -> int:
        return self.count - self.dropped

    def notes(self) -> list[str]:
        """What the user should know of it."""
        said = [f"{self.dropped} of the {self.count} experts of every layer were dropped."]
        if self.top_k < self.top_k_before:
            said.append(
                f"A token is given to {self.top_k} expert{'s' * (self.top_k > 1)} instead of "
                f"{self.top_k_before}: no more are left that it may go to."
            )
        return said


def plan_drop(config: Any, drop: Drop) -> Plan:
    """What a configuration's model loses; fails for models whose experts cannot be dropped."""
    kind = str(getattr(config, "model_type", ""))
    if kind not in COUNTS:
        raise SympruneError(
            f"Experts are dropped from {', '.join(COUNTS)}; the structure of {kind or 'this model'}"
            " is not one of them, so leave out --experts."
        )
    count, top_k = int(getattr(config, COUNTS[kind])), int(getattr(config, TOP_K))
    groups = int(getattr(config, "n_group", 1) or 1)
    dropped = drop.count(count, groups)
    if dropped == 0:
        raise SympruneError(f"--experts {drop} is less than one of the {count} experts of a layer.")
    left, least = (count - dropped) // groups, 1 if kind != "deepseek_v3" else GROUP_SCORE
    if left < least:
        raise SympruneError(
            f"--experts {drop} leaves {left} of the {count // groups} experts the router chooses "
            f"among, and {least} must be left; drop fewer."
        )
    within = int(getattr(config, "topk_group", groups) or groups) * left
    return Plan(count, dropped, groups, min(top_k, within), top_k)


def find_mixtures(model: nn.Module, count: int, prefix: str = "") -> list[Mixture]:
    """The mixtures in a model or block, in order; names start with `prefix`."""
    found = []
    for path, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if not isinstance(experts, nn.Module):
            continue
        name = f"{prefix}{path}"
        routers = [child for leaf, child in module.named_children() if leaf in ROUTERS]
        fits = len(routers) == 1 and is_experts(experts) and hasattr(routers[0], "top_k")
        own = [*experts.parameters(recurse=False), *routers[0].parameters()] if fits else []
        if not own or any(parameter.shape[0] != count for parameter in own):
            raise SympruneError(
                f"{name} is no router beside {count} experts in one parameter each, so no expert "
                "can be dropped from it."
            )
        found.append(Mixture(name, routers[0], experts, count))
    return found
