"""Prune one model with the calibration text of three clients, which never leaves them.

Clients send sums per channel, added up behind masks that cancel, so that the server sees only the
total. The masks are those of pruning with all the text in one place, bit for bit.
"""

from __future__ import annotations

import torch
from tiny import tiny_model, tiny_tokens

import symprune
from symprune import Recipe, fed


def main() -> None:
    recipe = Recipe("wanda", pattern="2:4")
    clients = [tiny_tokens(samples=4, seed=client) for client in range(3)]

    model = tiny_model()
    result = fed.prune(model, clients, recipe, secure=True)

    together = tiny_model()
    central = symprune.prune(together, torch.cat(clients), recipe)
    same = all((result.report.masks[n] == central.masks[n]).all() for n in central.masks)
    sent = result.traffic.to_dict()
    print(f"{result.report.sparsity:.0%} of the weights are gone, from {len(clients)} clients.")
    print(f"The masks are those of central pruning: {'yes' if same else 'no'}.")
    print(f"Up {sent['bytes_up']:,} bytes, down {sent['bytes_down']:,} bytes.")


if __name__ == "__main__":
    main()
