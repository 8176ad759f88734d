"""Owners of text and a tiny language model, as code of their own on each one's node."""

from __future__ import annotations

from pathlib import Path

from symprune.fed.owner.policy import Policy
from symprune.fed.remote.client import answer
from symprune.fed.remote.transport import LocalTransport, Node

OWNERS = """
from pathlib import Path
import torch
from symprune import MaskSet
from transformers import LlamaConfig, LlamaForCausalLM
from symprune.fed import add_lora, text_data

def model(scale=1.0):
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(
        vocab_size=30, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16))
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("_proj" in name)
    with torch.no_grad():
        made.model.norm.weight *= scale
    return made

def other_model():
    return model(2.0)

def adapted():
    base, masks = model(), MaskSet.load(Path(__file__).parent / "masks")
    masks.apply(base)
    return add_lora(base, masks, rank=2, targets=("q_proj", "down_proj"))

def tokens(seed, count):
    return torch.randint(30, (count,), generator=torch.Generator().manual_seed(seed))

TEXTS = [tokens(1, 19), tokens(2, 32), tokens(3, 9)]
everyone = lambda: text_data(TEXTS, length=8, test=tokens(4, 16))
first, second, third = (lambda i=i: text_data([TEXTS[i]], length=8) for i in range(3))

def wrong():
    return [1, 2]

def broken():
    raise ValueError("no such corpus")
"""
OPTIONS = {"gamma": 0.3, "p": 0.5, "batch": 2, "random_steps": False}


def write_owners(folder: Path) -> str:
    """The file of code that every owner has."""
    file = folder / "owners.py"
    file.write_text(OWNERS)
    return str(file)


class Owners(LocalTransport):
    """Nodes whose owners have set these names; the functions of one file differ by the owner."""

    def __init__(
        self, owners: str, folder: Path, model: str = "model", masks: Path | None = None
    ) -> None:
        super().__init__(answer, 3, folder)
        names, policy = ("first", "second", "third"), folder / "policy.yaml"
        code = tuple(f"{owners}:{name}" for name in (*names, model))
        named = () if masks is None else (str(masks),)
        Policy(protection="plain", code=code, may_name=named).save(policy)
        shared = {"model": f"{owners}:{model}", "policy": str(policy)}
        self.settings = [{**shared, "data": f"{owners}:{name}"} for name in names]

    def node(self, number: int) -> Node:
        return Node(number, self.folder / f"client-{number}", self.settings[number])
