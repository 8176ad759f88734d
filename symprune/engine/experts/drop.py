"""Taking experts out of a model in memory: their weights, the router's rows, the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from symprune.engine import forward
from symprune.engine.experts.measure import Load, watching
from symprune.engine.experts.mixtures import COUNTS, TOP_K, Plan, find_mixtures, plan_drop
from symprune.errors import SympruneError
from symprune.experts import Drop, choose_kept
from symprune.machine import distributed
from symprune.models.layout import device_of


def check_processes() -> None:
    """Fail where several processes would have to agree on which experts go."""
    if distributed.size() > 1:
        raise SympruneError("Experts are dropped in one process: start one.")


def drop_experts(model: Any, tokens: Tensor, drop: Drop) -> tuple[dict[str, Any], list[str]]:
    """Drop the experts of a model in memory that say least on `tokens` (`[samples, length]`); what
    was measured and done, as a record has it, and notes."""
    check_processes()
    plan = plan_drop(model.config, drop)
    loads: dict[str, Load] = {}
    with forward.ready(model), watching(find_mixtures(model, plan.count), loads):
        for row in tokens:
            model(input_ids=row[None].to(device_of(model)), use_cache=False)
    found = describe(plan, loads)
    weights = take_out(model, plan, kept_of(found))
    return {**found, "weights": weights}, plan.notes()


def describe(plan: Plan, loads: Mapping[str, Load]) -> dict[str, Any]:
    """What was measured of every expert, and which are dropped, as a record has it."""
    layers = []
    for name, load in loads.items():
        kept = choose_kept(load.scores, load.tokens, plan.dropped, plan.groups)
        gone = [number for number in range(plan.count) if number not in kept]
        layers.append({"name": name, "dropped": gone, "tokens": load.tokens, "scores": load.scores})
    return {"count": plan.count, "left": plan.left, "top_k": plan.top_k, "layers": layers}


def kept_of(described: Mapping[str, Any]) -> dict[str, list[int]]:
    """The experts that stay, by layer, from a description."""
    every = range(described["count"])
    return {
        layer["name"]: [number for number in every if number not in layer["dropped"]]
        for layer in described["layers"]
    }


def take_out(model: Any, plan: Plan, kept: Mapping[str, list[int]]) -> int:
    """Leave the experts that are `kept`, by layer, and nothing of the others; how many
    weights went.
    """
    before = _count_weights(model)
    for mixture in find_mixtures(model, plan.count):
        rows = torch.tensor(kept[mixture.name])
        for module in (mixture.experts, mixture.router):
            _select_rows(module, rows, plan.count)
    for module in model.modules():
        for name in ("num_experts", "num_local_experts"):
            if getattr(module, name, None) == plan.count:
                setattr(module, name, plan.left)
        for name in ("top_k", TOP_K):
            if getattr(module, name, None) == plan.top_k_before:
                setattr(module, name, plan.top_k)
    setattr(model.config, COUNTS[model.config.model_type], plan.left)
    setattr(model.config, TOP_K, plan.top_k)
    return before - _count_weights(model)


def _count_weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _select_rows(module: nn.Module, rows: Tensor, count: int) -> None:
    """Of every parameter and buffer with an entry for each expert, those entries."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        chosen = parameter.data.index_select(0, rows.to(parameter.device))
        setattr(module, name, nn.Parameter(chosen, parameter.requires_grad))
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.shape[:1] == (count,):
            module._buffers[name] = buffer.index_select(0, rows.to(buffer.device))
