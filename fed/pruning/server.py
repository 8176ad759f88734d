"""The server of federated pruning: asks for a block's statistics, adds them up, decides, goes on.

It has the dense model and no private data. A client that does not answer, or whose answer is not
what was asked for, is left out from then on; with masked summation the block's round is repeated
without it, since the others' masks only cancel among those who all answered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from symprune.engine import decide, forward, walk
from symprune.engine.arguments import Arguments
from symprune.engine.collect import Collector, collect
from symprune.errors import SympruneError
from symprune.fed.pruning import messages, noise, packed_stats, secure_sum
from symprune.fed.pruning.client import digest
from symprune.fed.pruning.messages import FINISH, HELLO, ROUND, Settings
from symprune.fed.pruning.noise import Privacy
from symprune.models.layout import device_of, find_layout
from symprune.models.matrices import Matrix
from symprune.models.support import check_supported
from symprune.recipe import Recipe
from symprune.stats import GRAM, TOTAL

Numbered = dict[int, bytes]
PROBE_TOKENS = 8
MOST_TOKENS = 1 << 48


@dataclass(frozen=True)
class Known:
    """What the server knows of a client."""

    samples: int
    length: int
    key: Tensor | None


class Server:
    """The server's side of one run. `report` is what `symprune.prune` returns, masks included.

    reference are public tokens `[samples, length]`: needed with privacy, where statistics are
    measured against them. stored names the parameters that are stored in another type than they are
    computed in here.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        clients: int,
        secure: bool = False,
        privacy: Privacy | None = None,
        reference: Tensor | None = None,
        stored: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self.needs = decide.needs(recipe)
        check_recipe(recipe)
        if clients < 1 + secure:
            least = "two clients for masked summation" if secure else "one client"
            raise SympruneError(f"Federated pruning needs at least {least}.")
        if privacy is not None and reference is None:
            raise SympruneError("Privacy needs public reference tokens to measure against.")
        check_supported(getattr(model, "config", None))
        self.layout = find_layout(model)
        walk.check_pattern(self.layout, recipe)
        self.secure = secure
        self.privacy = privacy
        self.stored = stored or {}
        self.digest = digest(model, self.stored)
        self.report = walk.Report(recipe, 0)
        self.report.parameters = self.layout.weights
        self.members: dict[int, Known | None] = dict.fromkeys(range(clients))
        self.settings = Settings(0, clients, self.needs, secure)
        if privacy is not None and self.needs:
            multiplier = privacy.multiplier(len(self.layout.blocks))
            self.settings = Settings(0, clients, self.needs, secure, multiplier, privacy.clip)
        probe = torch.arange(PROBE_TOKENS).unsqueeze(0) if reference is None else reference
        self.length = 0 if reference is None or privacy is None else reference.shape[1]
        self._public = forward.Activations(torch.empty(0), Arguments([], 0))
        self._probed = Collector()
        if self.needs:
            with forward.ready(model):
                self._public = forward.embed(self.layout, probe)
        self._attempt = 0
        self._ask: dict[str, Tensor] = {}
        self._parts: list[packed_stats.Part] = []

    def hello(self) -> Numbered:
        """What every client is told first."""
        return {
            number: messages.write_settings(replace(self.settings, number=number))
            for number in self.members
        }

    def welcome(self, replies: Mapping[int, bytes]) -> None:
        """Take in the clients that have the same model, and samples as long as most others'."""
        self._take(replies, self._introduce)
        lengths = Counter(known.length for known in self._known().values())
        self.report.seqlen = self.length or lengths.most_common(1)[0][0]
        for number, known in self._known().items():
            if known.length != self.report.seqlen:
                self._leave_out(
                    number,
                    f"Its samples have {known.length} tokens, not {self.report.seqlen}.",
                )
        self._check_enough()

    def _introduce(self, number: int, data: bytes) -> None:
        numbers, fields = messages.read(data, HELLO, messages.hello_fields(self.secure))
        samples, length = numbers[:2]
        if samples < 1 or length < 1 or samples * length > MOST_TOKENS:
            raise SympruneError(f"It claims {samples} samples of {length} tokens.")
        if not torch.equal(fields["model"], self.digest):
            raise SympruneError("It has another model.")
        self.members[number] = Known(samples, length, fields.get("key"))

    def ask(self, block: int) -> Numbered:
        """The request for a block's statistics, with the masks of the block before."""
        matrices = self.layout.matrices(block)
        fields: dict[str, Tensor] = {}
        if self._attempt == 0:
            self._prepare(block, matrices)
            if block:
                before = self.layout.matrices(block - 1)
                fields = messages.mask_tensors(before, self.report.masks)
        asked = dict(self._ask)
        if self.secure:
            asked["participants"] = torch.tensor(list(self.members))
            if block == 0 and self._attempt == 0:
                keys = [known.key for known in self._known().values() if known.key is not None]
                asked["keys"] = torch.stack(keys)
        order = ("groups", "participants", "keys", "centre", "scale")
        asked = {name: asked[name] for name in order if name in asked}
        values = packed_stats.length(self._parts)
        first = messages.head(ROUND, block, self._attempt, len(self.members), values)
        return dict.fromkeys(self.members, messages.write(first, {**asked, **fields}))

    def _prepare(self, block: int, matrices: list[Matrix]) -> None:
        """Which matrices share an input, and what public text measures in this block."""
        inputs: dict[str, packed_stats.ChannelStats] = {}
        measured = Collector()
        if self.needs:
            with forward.ready(self.layout.model):
                if block:
                    self._public.advance(block - 1, self.layout.blocks[block - 1])
                measured = collect(
                    self._public,
                    block,
                    self.layout.blocks[block],
                    matrices,
                    self.needs,
                )
            inputs = measured.inputs
        self._probed = measured
        self._ask = {"groups": packed_stats.sharing(matrices, inputs)}
        self._parts = packed_stats.layout(matrices, self._ask["groups"], self.needs)
        if self.settings.noise:
            public = packed_stats.pack(self._parts, measured.inputs, measured.outputs)
            self._ask["centre"], self._ask["scale"] = noise.reference(self._parts, public)

    def skip(self, block: int) -> None:
        """Go to a block whose predecessors are pruned already."""
        if self.needs:
            with forward.ready(self.layout.model):
                for passed in range(block - 1):
                    self._public.advance(passed, self.layout.blocks[passed])

    def take(self, block: int, replies: Mapping[int, bytes]) -> bool:
        """Decide the block from the replies; False if it must be asked for again."""
        got: dict[int, dict[str, Tensor]] = {}

        def check(number: int, data: bytes) -> None:
            got[number] = self._statistics(number, block, data)

        before = len(self.members)
        self._take(replies, check)
        if self.secure and len(self.members) < before:
            self._attempt += 1
            return False
        self._attempt = 0
        total = self._secure_total(got) if self.secure else self._plain_total(got)
        if self.settings.noise:
            total = self._estimate(total)
        measured, device = Collector(), device_of(self.layout.blocks[block])
        measured.inputs, measured.outputs = packed_stats.unpack(self._parts, total, device)
        measured.choosing, measured.unknown = self._probed.choosing, self._probed.unknown
        plan = walk.WalkPlan(self.report.recipe, self.needs)
        with torch.no_grad():
            matrices = self.layout.matrices(block)
            pruned = walk.prune_block(matrices, measured, self.report, plan)
            self.report.masks.update(pruned.masks)
        return True

    def finish(self) -> Numbered:
        """The masks of the last block."""
        matrices = self.layout.matrices(len(self.layout.blocks) - 1)
        data = messages.write(
            messages.head(FINISH), messages.mask_tensors(matrices, self.report.masks)
        )
        return dict.fromkeys(self.members, data)

    def promise(self) -> dict[str, float] | None:
        """What the noise guarantees for the whole run, if there is noise."""
        if self.privacy is None or not self.settings.noise:
            return None
        return {
            **asdict(self.privacy),
            "noise_multiplier": self.settings.noise,
            "releases": len(self.layout.blocks),
        }

    def _statistics(self, number: int, block: int, data: bytes) -> dict[str, Tensor]:
        """One client's reply, checked as far as it can be."""
        shape = messages.reply_fields(
            self.secure, len(self._parts), packed_stats.length(self._parts)
        )
        numbers, fields = messages.read(data, ROUND, shape)
        if numbers[:2] != [block, self._attempt]:
            raise SympruneError(f"It answered for block {numbers[0]}, not {block}.")
        if not self.secure:
            known = self._known()[number]
            most = torch.tensor([known.samples, known.samples * known.length])
            if (fields["counts"] < 0).any() or (fields["counts"] > most).any():
                raise SympruneError("It counted more samples than it has.")
            if not self.settings.noise and self._negative_squares(fields["values"]):
                raise SympruneError("It sent sums of squares below zero.")
        return fields

    def _negative_squares(self, values: Tensor) -> bool:
        names = [name for part in self._parts for name in part.sums]
        widths = [part.channels for part in self._parts for _ in part.sums]
        pieces = zip(names, values.split(widths), strict=True)
        return any(bool((piece < 0).any()) for name, piece in pieces if name != TOTAL)

    def _plain_total(self, got: Mapping[int, Mapping[str, Tensor]]) -> packed_stats.Packed:
        total = packed_stats.empty(self._parts)
        for number in sorted(got):
            total.add(packed_stats.Packed(**got[number]))
        return total

    def _secure_total(self, got: Mapping[int, Mapping[str, Tensor]]) -> packed_stats.Packed:
        fixed = secure_sum.total(got[number]["masked"] for number in sorted(got))
        values, rests = secure_sum.from_fixed(fixed)
        counted = 2 * len(self._parts)
        counts = values[:counted].to(torch.int64).view(-1, 2)
        known = self._known().values()
        most = torch.tensor(
            [[sum(k.samples for k in known), sum(k.samples * k.length for k in known)]]
        )
        negative = not self.settings.noise and self._negative_squares(values[counted:])
        if negative or (counts < 0).any() or (counts > most).any():
            raise SympruneError("The clients' masked sum is not one: somebody sent something else.")
        return packed_stats.Packed(counts, values[counted:], rests[counted:])

    def _estimate(self, total: packed_stats.Packed) -> packed_stats.Packed:
        known = self._known().values()
        values = packed_stats.length(self._parts)
        deviation = self.settings.noise * self.settings.clip * math.sqrt(values * len(known))
        return noise.estimate(
            self._parts,
            total.values,
            self._ask["centre"],
            self._ask["scale"],
            sum(k.samples for k in known),
            sum(k.samples * k.length for k in known),
            deviation,
            self.settings.clip,
        )

    def _take(self, replies: Mapping[int, bytes], accept: Callable[[int, bytes], None]) -> None:
        """Hand every member's reply on; leave out, with a note, whose is missing or wrong."""
        for number in list(self.members):
            try:
                if number not in replies:
                    raise SympruneError("It did not answer.")
                accept(number, replies[number])
            except SympruneError as error:
                self._leave_out(number, str(error))
        self._check_enough()

    def _leave_out(self, number: int, why: str) -> None:
        del self.members[number]
        self.report.notes.append(f"Client {number} was left out: {why}")

    def _check_enough(self) -> None:
        if len(self.members) < 1 + self.secure:
            last = self.report.notes[-1]
            raise SympruneError(f"Too few clients are left to go on. {last}")

    def _known(self) -> dict[int, Known]:
        return {number: known for number, known in self.members.items() if known is not None}


def check_recipe(recipe: Recipe) -> None:
    """Refuse what cannot be decided from a few sums per channel."""
    if "regional_gradient" in recipe.criterion.needs:
        raise SympruneError(
            f"Method {recipe.method} needs a gradient for every weight, of which federated pruning "
            "sends none; choose another method."
        )
    if recipe.weight_update is not None:
        raise SympruneError(
            f"--update {recipe.weight_update.name} changes weights, which federated pruning does "
            "not send; leave it out."
        )
    if recipe.rounding is not None or recipe.head_grid is not None:
        option = "--values" if recipe.rounding is not None else "--values-head"
        raise SympruneError(
            f"{option} changes weights, which federated pruning does not send; prune without it, "
            "then put the values on a grid by symprune refine --masks FOLDER --refine none."
        )
    if recipe.self_samples is not None:
        raise SympruneError(
            "--self-samples adds text of the model's own, federated pruning takes the clients' "
            "alone; leave it out."
        )
    if recipe.reconstruction is not None:
        raise SympruneError(
            "--reconstruct trains weights, which federated pruning does not send; prune without "
            "it, then train them by symprune refine --masks FOLDER --refine none --reconstruct."
        )
    if recipe.permute is not None:
        raise SympruneError(
            "A permutation moves weights, which federated pruning does not send; leave it out."
        )
    if recipe.allocation is not None:
        raise SympruneError(
            f"--allocate {recipe.allocation.name} is not for federated pruning, which takes the "
            "same share from every layer; leave it out."
        )
    if recipe.refinement is not None and recipe.refinement.needs == GRAM:
        raise SympruneError(
            f"--refine {recipe.refinement.name} needs the clients' Gram matrices, which are as "
            "large as the weights and tell much more of the data; use dsnot or r2-dsnot."
        )
