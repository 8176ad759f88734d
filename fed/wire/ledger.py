"""Who sent how many bytes to whom, and what the papers would have counted (32 bits a value)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Ledger:
    """Running totals per client: encoded bytes up and down, and the papers' bits."""

    up_bytes: Tensor
    down_bytes: Tensor
    up_bits: Tensor
    down_bits: Tensor

    @classmethod
    def empty(cls, clients: int) -> Ledger:
        return cls(*(torch.zeros(clients, dtype=torch.int64, device="cpu") for _ in range(4)))

    def up(self, clients: Tensor, sizes: Tensor, bits: Tensor) -> None:
        """Clients sent messages of these sizes in bytes; a paper would have counted these bits."""
        self.up_bytes[clients] += sizes
        self.up_bits[clients] += bits

    def down(self, clients: Tensor, sizes: Tensor, bits: Tensor) -> None:
        """Clients received messages of these sizes in bytes."""
        self.down_bytes[clients] += sizes
        self.down_bits[clients] += bits

    def totals(self) -> dict[str, float]:
        """Bytes over all clients, and the papers' bits per client (mean)."""
        return {
            "bytes_up": int(self.up_bytes.sum()),
            "bytes_down": int(self.down_bytes.sum()),
            "paper_bits_up": float(self.up_bits.double().mean()),
            "paper_bits_down": float(self.down_bits.double().mean()),
        }

    def bill(self, rounds: int) -> dict[str, dict[str, float]]:
        """Bytes up and down: in all, per round, per client, per client and round, and those of the
        clients with the fewest and the most."""
        out = {}
        for way, sizes in (("up", self.up_bytes), ("down", self.down_bytes)):
            total, clients = int(sizes.sum()), len(sizes)
            out[way] = {
                "total": total,
                "per round": total / max(rounds, 1),
                "per client": total / clients,
                "per client and round": total / clients / max(rounds, 1),
                "smallest client": int(sizes.min()),
                "largest client": int(sizes.max()),
            }
        return out

    def state(self) -> dict[str, Tensor]:
        return dict(vars(self))
