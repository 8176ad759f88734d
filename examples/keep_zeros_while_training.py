"""Fine-tune a pruned model in a plain PyTorch loop: what was pruned stays zero.

An optimiser moves every weight, so the masks are applied again after every step. (With
transformers' Trainer: `trainer.add_callback(masks.trainer_callback())`.)
"""

from __future__ import annotations

import argparse

import torch
from tiny import tiny_model, tiny_tokens

from symprune import MaskSet, Recipe, prune


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a pruned model, zeros kept.")
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps

    model, tokens = tiny_model(), tiny_tokens()
    masks = prune(model, tokens, Recipe("wanda", pattern="2:4")).masks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        if step in (0, steps - 1):
            print(f"step {step}: loss {loss.item():.3f}, {MaskSet.of(model).sparsity():.1%} zeros")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        masks.apply(model)
    print(f"Afterwards {MaskSet.of(model).sparsity():.1%} of the weights are zero, as before.")


if __name__ == "__main__":
    main()
