"""A gate on every group of weights: the formulas of the spike-and-slab prior, what FedSparse's
clients do with them, and the traffic.

An Expectation-Maximization Perspective on Federated Learning, sections 3 and 3.2, Algorithm 2. A
group's gate is open with probability `sigmoid((||w_g|| - softplus(v_g)) / T)`. Logits are in the
hundreds, so nothing here takes the logarithm of a probability. Clients send a binary sample of
their gates and the weights behind the open ones; the server sends only the groups it has not
pruned. A pruned group stays pruned: the paper only zeroes it, but the server's momentum would bring
it back for a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.algorithms.fedsparse.em import GroupedWeights, remember
from symprune.fed.algorithms.shared.layer_masks import pack
from symprune.fed.problems.losses import sigmoid, softplus
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Like, Message, Received, Sent, State, Turn, check

# Constants of the hard concrete distribution (Louizos et al.: L0 regularisation).
BETA, LOW, HIGH = 2 / 3, -0.1, 1.1
SHIFT = -BETA * math.log(-LOW / HIGH)  # P(z > 0) = sigmoid(log_alpha + SHIFT)
DATA_SCALES = ("mean", "sum")


def gate_logit(norm: Tensor, v: Tensor, temperature: float) -> Tensor:
    """`(||w_g|| - softplus(v_g)) / T`; no gradient flows from the gate to the weights."""
    return (norm - softplus(v)) / temperature


def initial_threshold(norm: Tensor, temperature: float, theta: float) -> Tensor:
    """`v` for which the gates are open with probability theta. A group whose norm is below
    `T logit(theta)` cannot get there; its threshold is 1e-6."""
    tau = (norm.double() - temperature * math.log(theta / (1 - theta))).clamp_min(1e-6)
    return torch.log(torch.expm1(tau)).to(norm.dtype)


def hard_concrete(log_alpha: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A relaxed gate in [0, 1] from uniform u, and its derivative in log_alpha."""
    noise = (torch.log1p(u - 1) - torch.log1p(-u)).to(log_alpha.dtype)
    s = sigmoid((noise + log_alpha) / BETA)
    stretched = s * (HIGH - LOW) + LOW
    inside = (stretched > 0) & (stretched < 1)
    return stretched.clamp(0, 1), inside * (s * (1 - s) * ((HIGH - LOW) / BETA))


def open_chance(log_alpha: Tensor) -> Tensor:
    """`P(z > 0)` of the hard concrete gate, which stands for pi in the penalties."""
    return sigmoid(log_alpha + SHIFT)


def penalty_slope(
    log_alpha: Tensor,
    prior_logit: Tensor,
    sizes: Tensor,
    drift: Tensor,
    l0: float,
    cross_entropy: float,
) -> Tensor:
    """Derivative in log_alpha of `R (drift + l0 n_g - c logit_g)`, R the chance to be open: what
    is paid for drifting from the server, for the weights kept, for leaving the prior."""
    chance = open_chance(log_alpha)
    return chance * (1 - chance) * (drift + l0 * sizes - cross_entropy * prior_logit)


def threshold_slope(v: Tensor, temperature: float) -> Tensor:
    """`d logit / d v = -sigmoid(v) / T`."""
    return -sigmoid(v) / temperature


def total_variation(chance: Tensor, prior: Tensor, alive: Tensor) -> Tensor:
    """Mean and maximum over the gates that are alive of `|pi_s - theta|`, `[C, 2]` (appendix C)."""
    away = (chance - prior)[:, alive].abs()
    if not away.shape[1]:
        return away.new_zeros(len(away), 2)
    return torch.stack([away.mean(1), away.amax(1)], 1)


def server_directions(
    z: Tensor, w_s: Tensor, w: Tensor, z_weights: Tensor, logit: Tensor, v: Tensor, T: float
) -> tuple[Tensor, Tensor]:
    """Directions of ascent of `sum_s log Bern(z_s | theta) - 1/2 sum_s z_s ||w_s - w||^2` for w
    and v. The paper prints `z (1 - theta) - (1 - z) theta`, which is `z - theta`."""
    for_weights = (z_weights * (w_s - w)).sum(0)
    for_thresholds = (z - sigmoid(logit)).sum(0) * threshold_slope(v, T)
    return for_weights, for_thresholds


@dataclass(frozen=True)
class Gated(GroupedWeights):
    """Hyper-parameters and functions of methods with gates. A subclass gives `logit`,
    `logit_slope`, `initial_gates` and `server_step`."""

    l0: float = 5e-6  # lambda_0: the price of one weight
    cross_entropy: float = 1e-4  # of the client's gates against the server's
    theta: float = 0.99  # the gates' first probability
    prune_below: float = 0.1
    prune_at_server: bool = True
    gate_lr: float = 1e-3  # of the clients' Adamax
    data_scale: str = "mean"  # or sum: the likelihood of all rows, as in the paper's Eq. 17

    def prepare(self, constants: Constants) -> Algorithm:
        ready = super().prepare(constants)
        check(0 < self.theta < 1, f"theta = {self.theta} is outside (0, 1).")
        check(0 <= self.prune_below < 1, f"prune_below = {self.prune_below} is outside [0, 1).")
        check(self.l0 >= 0, f"l0 = {self.l0} must not be negative.")
        known = ", ".join(DATA_SCALES)
        check(self.data_scale in DATA_SCALES, f"Unknown data_scale {self.data_scale!r}; {known}.")
        assert isinstance(ready, Gated)
        check(ready.groups.count > 0, "fedsparse: every layer is exempt, nothing can be pruned.")
        return ready

    # How a gate's logit follows from the weights and the free parameter v.
    def logit(self, w: Tensor, v: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no logit.")

    def logit_slope(self, v: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no logit_slope.")

    def initial_gates(self, x0: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no initial_gates.")

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        alive = torch.ones(self.groups.count, dtype=torch.bool)
        return {"x": x0, "v": self.initial_gates(x0), "alive": alive}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        apart = torch.zeros(problem.clients, 2, dtype=problem.dtype)
        return {**super().client_init(problem, turn), "apart": apart}

    def broadcast(self, server: State, turn: Turn) -> Message:
        alive = server["alive"]
        return {"alive": alive, "w": server["x"][self.kept_weights(alive)], "v": server["v"][alive]}

    def kept_weights(self, alive: Tensor) -> Tensor:
        """The weights of these groups and the exempt ones, `[d]` boolean."""
        return self.groups.spread(alive.unsqueeze(0))[0].bool()

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        x, v, alive = self.unpack_broadcast(received)
        prior = sigmoid(self.logit(x, v))
        w, v = self._train(x, v, alive, problem, turn)
        return self.sample_reply(client, w, v, alive, prior, turn)

    def unpack_broadcast(self, received: Received) -> tuple[Tensor, Tensor, Tensor]:
        """The server's weights and gates as stacks, zero where pruned, and the groups alive."""
        alive = received["alive"][0]  # the same for everyone
        x = place_values(received["w"], self.kept_weights(alive))
        return x, place_values(received["v"], alive), alive

    def sample_reply(
        self, client: State, w: Tensor, v: Tensor, alive: Tensor, prior: Tensor, turn: Turn
    ) -> tuple[State, Message]:
        """The reply: a binary sample of the gates and the weights behind the open ones. `prior` is
        what the server's gates were, for the record."""
        chance = sigmoid(self.logit(w, v))
        z = (turn.stream("gates").uniform(self.groups.count) < chance) & alive
        sent = self.groups.spread(z).bool()
        w = w * sent
        state = {**remember(client, w), "apart": total_variation(chance, prior, alive)}
        return state, {"z": z[:, alive], "w": Sent(pack(sent, w))}

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        x, alive = server["x"], int(server["alive"].sum())
        return {"z": Like(torch.bool, (alive,)), "w": Like(x.dtype, None, len(x))}

    def prune_groups(self, server: State) -> State:
        """Groups whose gate is open with too small a chance die; the dead are exactly zero."""
        alive = server["alive"]
        if self.prune_at_server:
            alive = alive & self._probable(server)
        kept = self.groups.spread(alive.unsqueeze(0))[0]
        return {**server, "x": server["x"] * kept, "alive": alive}

    def model(self, server: State) -> Tensor:
        kept = server["alive"] & self._probable(server)
        return server["x"] * self.groups.spread(kept.unsqueeze(0))[0]

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """Share of weights, and of groups, that the model no longer has; how far the clients'
        gates were from the server's when they last replied, on average and at most (Fig. 5)."""
        kept = server["alive"] & self._probable(server)
        weights = self.groups.spread(kept.unsqueeze(0))
        apart = client["apart"][client["seen"]].double()
        return {
            "sparsity": 1 - float(weights.double().mean()),
            "groups_pruned": 1 - float(kept.double().mean()),
            "gates_apart": float(apart[:, 0].mean()) if len(apart) else 0.0,
            "gates_apart_most": float(apart[:, 1].max()) if len(apart) else 0.0,
        }

    def _probable(self, server: State) -> Tensor:
        chance = sigmoid(self.logit(server["x"].unsqueeze(0), server["v"].unsqueeze(0))[0])
        return chance > self.prune_below

    def unpack_replies(self, server: State, replies: Received) -> tuple[Tensor, Tensor, Tensor]:
        """Gates `[B, G]`, the same per weight `[B, d]`, and the weights behind them."""
        alive, received = server["alive"], replies["z"]
        z = torch.zeros(len(received), len(alive), dtype=torch.bool)
        z[:, alive] = received
        sent = self.groups.spread(z).bool()
        w_s = torch.zeros(len(received), len(server["x"]), dtype=server["x"].dtype)
        for i, values in enumerate(replies["w"]):
            fits = values.numel() == int(sent[i].sum())
            check(fits, f"{self.name}: a reply has not one weight behind every open gate.")
            w_s[i, sent[i]] = values
        return z.to(w_s.dtype), sent.to(w_s.dtype), w_s

    def _train(
        self,
        x: Tensor,
        v: Tensor,
        alive: Tensor,
        problem: Problem,
        turn: Turn,
        correction: Tensor | float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Local epochs on weights (SGD) and gates (Adamax) from the server's; gradients by hand
        because the gate is a function of few numbers and clients are a stack. A correction is
        added to every gradient of the weights."""
        groups, batches = self.groups, turn.stream("batch")
        prior, w = self.logit(x, v), x
        mean, size = torch.zeros_like(v), torch.zeros_like(v)
        steps = torch.zeros(len(x), 1, dtype=x.dtype)
        scale = 1.0 if self.data_scale == "mean" else problem.counts.unsqueeze(1).to(x.dtype)
        for epoch in range(self.epochs):
            noise = turn.stream(f"noise {epoch}")  # anew: clients have different numbers of batches
            for rows, active in problem.epoch(batches, self.batch):
                log_alpha = self.logit(w, v)
                z, z_slope = hard_concrete(log_alpha, noise.uniform(groups.count))
                z_weights = groups.spread(z * alive)
                g = scale * problem.gradient(w * z_weights, rows)
                away = w - x
                slope = z_slope * groups.sum(g * w) + penalty_slope(
                    log_alpha,
                    prior,
                    groups.sizes,
                    self.pull / 2 * groups.sum(away.square()),
                    self.l0,
                    self.cross_entropy,
                )
                for_v = slope * self.logit_slope(v) * alive
                pull = self.pull * groups.spread(open_chance(log_alpha)) * away
                going = active.unsqueeze(1)
                steps = steps + going
                mean = torch.where(going, 0.9 * mean + 0.1 * for_v, mean)
                size = torch.where(going, torch.maximum(0.999 * size, for_v.abs() + 1e-8), size)
                w = torch.where(going, w - self.lr * (g * z_weights + pull + correction), w)
                move = self.gate_lr / (1 - 0.9**steps) * mean / size
                v = torch.where(going, v - move, v)
        return w, v


def place_values(values: Tensor, where: Tensor) -> Tensor:
    """Values `[C, k]` at the k places that are True in `where [d]`, zero elsewhere: `[C, d]`."""
    out = values.new_zeros(len(values), len(where))
    out[:, where] = values
    return out
