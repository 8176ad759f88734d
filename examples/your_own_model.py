"""A model family of your own: blocks and matrices are found by structure, so most need nothing.

What the model must be: decoder blocks in an `nn.ModuleList`, each called with the hidden states
first and returning the next ones, with `nn.Linear` layers inside. What it may have besides
(embeddings, norms, a head) stays dense. `find_layout` shows what was found before anything is run.
"""

from __future__ import annotations

import torch
from tiny import VOCABULARY, tiny_tokens
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from symprune import Recipe, prune
from symprune.models.layout import find_layout


class Mixer(nn.Module):
    """Mixes a token with the mean of those before it, then its channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(2 * width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.norm(hidden)
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(1)
        return hidden + self.down(torch.relu(self.up(torch.cat([x, before], -1))))


class MixerForCausalLM(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(Mixer(16) for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def forward(self, input_ids: Tensor, **_: object) -> CausalLMOutput:
        hidden = self.embeddings(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return CausalLMOutput(logits=self.head(hidden))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = MixerForCausalLM(PretrainedConfig())
    print("Found:", ", ".join(matrix.name for matrix in find_layout(model).all_matrices()))
    print(f"{prune(model, tiny_tokens(), Recipe('wanda')).sparsity:.0%} of it is pruned.")
