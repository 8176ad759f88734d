"""G + R, the Gram matrix of a layer's inputs with a damped diagonal, and descent along it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from symprune.scores import inverse

ROWS_AT_ONCE, ROWS_AT_ONCE_ELSEWHERE = 512, 4096  # on a CPU, on an accelerator
NARROW = 2048  # channels up to which G + R is worth a matrix of its own
STEPS_UNSEEN = 8  # between looks at whether all rows are done; a look waits for an accelerator


@dataclass(frozen=True)
class Room:
    """What some rows' steps are computed in, made once: fresh memory costs more than a pass over
    it does."""

    scale: Tensor
    step: Tensor
    image: Tensor
    spare: Tensor
    before: Tensor
    pulled: Tensor

    @classmethod
    def for_rows_of(cls, weight: Tensor) -> Room:
        """As many as are worked on at once."""
        at_once = ROWS_AT_ONCE if weight.device.type == "cpu" else ROWS_AT_ONCE_ELSEWHERE
        return cls(*(torch.empty_like(weight[:at_once]) for _ in fields(cls)))

    def first(self, rows: int) -> Room:
        """Room for fewer rows, in the same place."""
        if rows == len(self.scale):
            return self
        return Room(*(getattr(self, each.name)[:rows] for each in fields(self)))


@dataclass(frozen=True)
class DampedGram:
    """d^T (G + R) d, what a row's loss d costs; R is a diagonal, `added`."""

    gram: Tensor
    added: Tensor

    @classmethod
    def from_gram(cls, gram: Tensor, damping: float, shrink: float) -> DampedGram:
        """R is `damping` times the mean of G's diagonal, so that nothing is singular, and `shrink`
        times the diagonal itself, as channels are less correlated than few tokens say."""
        diagonal = gram.diagonal()
        return cls(gram, damping * diagonal.mean() + shrink * diagonal)

    @property
    def diagonal(self) -> Tensor:
        return self.gram.diagonal() + self.added

    @cached_property
    def _whole(self) -> Tensor | None:
        """G + R, where a pass over the rows would show beside a product with it."""
        return self.square(slice(None)) if len(self.added) <= NARROW else None

    def square(self, columns: slice) -> Tensor:
        """G + R among some columns."""
        return self.gram[columns, columns] + self.added[columns].diag()

    def pull(self, lost: Tensor, out: Tensor | None = None) -> Tensor:
        """(G + R) d for what each row has lost: how strongly every weight is drawn upwards."""
        if self._whole is not None:
            return torch.mm(lost, self._whole, out=out)
        return torch.mul(lost, self.added, out=out).addmm_(lost, self.gram)

    def error(self, lost: Tensor) -> Tensor:
        """d^T (G + R) d for what each row has lost."""
        return torch.linalg.vecdot(lost, self.pull(lost))

    def descend(
        self,
        weight: Tensor,
        fitted: Tensor,
        keep: Tensor,
        iters: int,
        tolerance: float = 0.0,
        room: Room | None = None,
    ) -> Tensor:
        """At most `iters` steps of conjugate gradients over the kept weights of `fitted`, in place,
        towards `weight`; the others become zero. No row's error rises. Returns the pull of what is
        still lost. Who comes again brings the room."""
        scale, pull = inverse(self.diagonal), torch.empty_like(fitted)
        room = room or Room.for_rows_of(fitted)
        at_once = len(room.scale)
        parts = zip(*(t.split(at_once) for t in (weight, fitted, keep, pull)), strict=True)
        for whole, rows, kept, pulls in parts:
            here = room.first(len(rows))
            rows.mul_(here.scale.copy_(kept))
            lost = torch.sub(whole, rows, out=here.step)
            self.pull(lost, out=pulls)
            noise = self._noise(rows, lost, here.image)
            here.scale.mul_(scale)
            self._descend(rows, pulls, here, noise, iters, tolerance)
        return pull

    def _noise(self, fitted: Tensor, lost: Tensor, spare: Tensor) -> Tensor:
        """How large what rounding makes of a row's pull may be, in units of `diagonal`.

        Every weight is known to a rounding of its size, and so is a product with it. At worst the
        n channels are one and the same: then the roundings of all appear in the pull of each.
        """
        squares = [torch.mul(each, each, out=spare) @ self.diagonal for each in (fitted, lost)]
        known = (squares[0] + squares[1]).unsqueeze(1)
        return torch.finfo(fitted.dtype).eps * (fitted.shape[1] * known).sqrt()

    def _descend(
        self,
        fitted: Tensor,
        pull: Tensor,
        room: Room,
        noise: Tensor,
        iters: int,
        tolerance: float,
    ) -> None:
        """The steps for some rows, all at once. room.scale preconditions, and is 0 where nothing
        may change.

        Along a step the error falls as long as its true slope is above half of the one computed,
        which is the residual's size since the steps before have left none along themselves. So a
        row is done when that is no more than twice the noise in it: going on would divide noise by
        noise. A row is done as well at `tolerance` of its first residual.
        """
        rounding = torch.finfo(fitted.dtype).eps
        step, image, scale, spare = room.step, room.image, room.scale, room.spare
        before, pulled = room.before.copy_(fitted), room.pulled.copy_(pull)
        torch.mul(pull, scale, out=step)
        size = length = _dot(pull, step, spare)
        enough, twice = tolerance**2 * size, 2 * noise
        going = size > enough
        for number in range(iters):
            if number and number % STEPS_UNSEEN == 0 and not going.any():
                break
            self.pull(step, out=image)
            curvature = _dot(step, image, spare)
            going = going & (size > twice * length.sqrt()) & (curvature > rounding * length)
            rate = torch.where(going, size / curvature, 0.0)
            fitted.addcmul_(rate, step)
            pull.addcmul_(rate, image, value=-1)
            scaled = torch.mul(pull, scale, out=image)
            new_size = _dot(pull, scaled, spare)
            turn = torch.where(going, new_size / size, 0.0)
            torch.addcmul(scaled, turn, step, out=step)
            if tolerance:
                going = going & (new_size > enough)
            size, length = new_size, torch.addcmul(new_size, turn * turn, length)
        # The error fell by the change times the sum of the pulls before and after it.
        changed, pulls = torch.sub(fitted, before, out=step), torch.add(pulled, pull, out=image)
        fell = _dot(changed, pulls, spare) > 0
        if fell.device.type == "cpu" and fell.all():
            return
        torch.where(fell, fitted, before, out=fitted)
        torch.where(fell, pull, pulled, out=pull)


def _dot(left: Tensor, right: Tensor, spare: Tensor) -> Tensor:
    """Row by row, as a column; spare is overwritten."""
    return torch.mul(left, right, out=spare).sum(1, keepdim=True)
