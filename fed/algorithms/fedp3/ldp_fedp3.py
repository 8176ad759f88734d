"""LDP-FedP3 (thesis Algorithm 11, appendix C): FedP3 with local differential privacy.

Clients clip the gradient of every record to whole numbers, add discrete Gaussian noise (see
`mechanism.py`) and send d/n coordinates. Records are drawn independently of each other, as the
accountant of `privacy.py` supposes. Two points differ from the print: the noise is scaled by the
step size, as in the proof (unscaled it under-protects for gamma > 1), and clipping, which the print
replaces by an assumption, is done per record.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.algorithms.fedp3.permutation_upload import PermutationUpload
from symprune.fed.algorithms.shared.local_steps import step_size
from symprune.fed.mechanism import UNITS, clip_to_whole, release
from symprune.fed.privacy import Release, closed_form_multiplier, noise_multiplier
from symprune.fed.problems.problem import Constants, Problem, Rows
from symprune.fed.protocol import Algorithm, Message, Received, State, Turn, check, given
from symprune.fed.randomness import Stream, SystemStream
from symprune.fed.registry import register

CALIBRATIONS = ("accountant", "closed-form")


@register
@dataclass(frozen=True)
class LdpFedP3(PermutationUpload):
    """FedP3 with an (epsilon, delta) guarantee for every record against the server.

    The guarantee rests on noise and batches the server cannot recompute. It knows the run's seed,
    so outside a simulation set `private_randomness`: clients then ask their operating system, and
    runs do not repeat."""

    name = "ldp-fedp3"
    paper = "LDP-FedP3 (thesis chapter 4), Algorithm 11, Theorem 4.3.4"
    sends = "up: d/n noisy coordinates each; down: model"
    iterations: int = 150
    epsilon: float | None = 8.0
    delta: float = 1e-5
    clip: float = 1.0
    batch: int = 64
    calibration: str = "accountant"
    private_randomness: bool = False
    multiplier: float | None = None

    def prepare(self, constants: Constants) -> Algorithm:
        """The noise multiplier z for `iterations` steps, at the sampling rate of the client with
        the fewest records; epsilon = None means no noise. A multiplier that is given is used
        as it is, whatever epsilon says."""
        known = ", ".join(CALIBRATIONS)
        check(self.calibration in CALIBRATIONS, f"ldp-fedp3: calibration is one of {known}.")
        check(self.clip > 0 and self.batch > 0, "ldp-fedp3: clip and batch must be positive.")
        rate = min(1.0, self.batch / min(constants.sizes))
        gamma = step_size(self.gamma, constants, self.name)
        if self.epsilon is None or self.multiplier is not None:
            return replace(self, gamma=gamma, multiplier=self.multiplier or 0.0)
        chosen = noise_multiplier if self.calibration == "accountant" else closed_form_multiplier
        z = chosen(self.epsilon, self.delta, rate, self.iterations)
        return replace(self, gamma=gamma, multiplier=z)

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        check(
            turn.number < self.iterations,
            f"ldp-fedp3: the privacy budget is for {self.iterations} steps and is spent.",
        )
        w, noise = received["x"], self.stream("noise", turn)
        total = clipped_sum(problem, w, self.batch, self.clip, self.stream("batch", turn))
        if given(self.multiplier):
            rows = zip(total, noise.by_row(), strict=True)
            total = torch.stack([self.release(row, alone) for row, alone in rows])
        g = (total.double() * (self.clip / (UNITS * self.batch))).to(w.dtype)
        step = given(self.gamma) * (g + penalty(problem, w))
        return client, self.reply(w - step, turn)

    def release(self, total: Tensor, stream: Stream) -> Tensor:
        """One client's sum with noise, both whole numbers."""
        return release(total, given(self.multiplier), lambda count: stream.bits(count)[0])

    def check_across_machines(self) -> None:
        hidden = self.private_randomness or not self.multiplier
        check(hidden, f"{self.name} needs private_randomness=true here: the server knows the seed.")

    def stream(self, purpose: str, turn: Turn) -> Stream:
        if not self.private_randomness:
            return turn.stream(purpose)
        return SystemStream(len(turn.clients))

    def releases(self, rows: int) -> Release | None:
        """What one step of a client with so many records spends."""
        if not self.multiplier:
            return None
        return Release(min(1.0, self.batch / rows), self.multiplier)


def clipped_sum(problem: Problem, w: Tensor, batch: int, clip: float, stream: Stream) -> Tensor:
    """`sum_j g_j min(1, C/||g_j||)` in whole units of C / UNITS, over records that are drawn with
    probability b/m each. It is divided by b, the expected number of them, not the drawn one, so a
    record changes the result by C/b at most."""
    rows, out = problem.rows, []
    chance = (batch / problem.counts).clamp_max(1).unsqueeze(1)
    drawn = (stream.uniform(rows.y.shape[1]) < chance) & (rows.weights != 0)
    for i, use in enumerate(drawn):
        g = record_gradients(problem, w[i], rows[i][use])
        out.append(clip_to_whole(g.double() / clip).sum(0))
    return torch.stack(out)


def record_gradients(problem: Problem, w: Tensor, rows: Rows) -> Tensor:
    """The gradient of every record of one client `[m, d]`."""
    m = len(rows.y)
    if m == 0:
        return w.new_zeros(0, len(w))
    one = torch.ones(m, 1, dtype=w.dtype)
    each = w.expand(m, -1).contiguous()
    return problem.loss.gradient(each, rows.x.unsqueeze(1), rows.y.unsqueeze(1), one)


def penalty(problem: Problem, w: Tensor) -> Tensor:
    """The gradient of the regulariser alone, which no record enters and no noise need hide."""
    nothing = replace(problem.rows[:, :1], weights=torch.zeros_like(problem.rows.weights[:, :1]))
    return problem.gradient(w, nothing)
