"""The server of federated pruning: asks for a block's statistics, adds them up, decides, goes on.

It has the dense model and no private data. A client that does not answer, or whose answer is not
what was asked for, is left out from then on. A secure sum is never asked for twice: it is of those
who answered, and the others' masks come off by their shares.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from symprune.engine import decide, forward, walk
from symprune.engine.arguments import Arguments
from symprune.engine.collect import Collector, collect
from symprune.engine.visit.pruning import WalkPlan, prune_block
from symprune.errors import SympruneError
from symprune.fed.problems.models.fingerprint import digest
from symprune.fed.pruning import exposure, messages, noise
from symprune.fed.pruning.aggregate import ballots, bounds, grams, packed_stats, totals
from symprune.fed.pruning.aggregate.ballots import STATISTICS
from symprune.fed.pruning.aggregate.judging import Judge
from symprune.fed.pruning.messages import FINISH, GRAMS, HELLO, ROUND, Known, Settings
from symprune.fed.pruning.noise import Privacy
from symprune.fed.pruning.refusals import check_defence, check_recipe
from symprune.fed.pruning.secure_rounds import SecureRounds, check_same
from symprune.fed.robust import NORM, read_defence
from symprune.models.layout import device_of, find_layout
from symprune.models.matrices import Matrix
from symprune.models.support import check_supported
from symprune.recipe import Recipe
from symprune.stats import ChannelStats

Numbered = dict[int, bytes]
Fields = Mapping[str, Tensor]
SUM = -1  # whose reply a secure sum stands for
MOST_TOKENS = 1 << 48


class Server:
    """The server's side of one run. `report` is what `symprune.prune` returns, masks included.

    reference are public tokens `[samples, length]`: needed with privacy, where statistics are
    measured against them. stored names the parameters that are stored in another type than they are
    computed in here. aggregate: clients send statistics, votes or averages. gram_bits is what a
    number of a Gram matrix takes, where these are sent. robust is the rule against hostile clients.
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
        aggregate: str = STATISTICS,
        gram_bits: int = grams.EXACT,
        words: bytes = b"",
        robust: str = bounds.DEPLOYED,
    ) -> None:
        check_recipe(recipe, aggregate, privacy, gram_bits)
        check_defence(robust, recipe, aggregate, secure, privacy)
        grams.check_bits(gram_bits, clients)
        self.needs = grams.with_squares(decide.needs(recipe), secure or gram_bits != grams.EXACT)
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
        self.digest = digest(model, self.stored, words)
        self.report = walk.Report(recipe, 0)
        self.report.parameters = self.layout.weights
        self.members: dict[int, Known | None] = dict.fromkeys(range(clients))
        self.settings = Settings(
            0, clients, self.needs, secure,
            aggregate=aggregate, gram_bits=gram_bits, weights=recipe.weight_update is not None,
            recipe=None if aggregate == STATISTICS else recipe,
        )  # fmt: skip
        if privacy is not None and self.needs:
            multiplier = privacy.multiplier(len(self.layout.blocks))
            honest = privacy.sharing(clients, secure)
            noised = replace(self.settings, noise=multiplier, clip=privacy.clip)
            self.settings = replace(noised, honest=honest)
        self.report.notes += exposure.warnings(self.settings)
        self.robust, self.defence = robust, read_defence(robust)
        self.judge = Judge(self.defence, self.settings)
        probe = packed_stats.own_tokens(model) if reference is None else reference
        self.length = 0 if reference is None or privacy is None else reference.shape[1]
        self._public = forward.Activations(torch.empty(0), Arguments([], 0))
        self._probed = Collector()
        if self.needs:
            with forward.ready(model):
                self._public = forward.embed(self.layout, probe)
        self.rounds = SecureRounds() if secure else None
        self._in_sum: dict[int, Known] = {}
        self._attempt = 0
        self._ask: dict[str, Tensor] = {}
        self._parts: list[packed_stats.Part] = []
        self._first: dict[int, dict[str, Tensor]] = {}

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
        if self.defence.rule == NORM:
            claimed = {number: known.samples for number, known in self._known().items()}
            for number in bounds.claims_too_many(claimed):
                self._leave_out(number, f"It claims {claimed[number]} samples, far more than most.")
        self._check_enough()
        if self.rounds is not None:
            self.rounds.begin(self.members, self.settings.honest)

    def _introduce(self, number: int, data: bytes) -> None:
        numbers, fields = messages.read(data, HELLO, messages.hello_fields(self.secure))
        samples, length = numbers[:2]
        if samples < 1 or length < 1 or samples * length > MOST_TOKENS:
            raise SympruneError(f"It claims {samples} samples of {length} tokens.")
        if not torch.equal(fields["model"], self.digest):
            raise SympruneError("It has another model.")
        self.members[number] = Known(samples, length)
        if self.rounds is not None:
            self.rounds.cards[number] = bytes(fields["card"].tolist())

    def ask(self, block: int) -> Numbered:
        """The request for a block's statistics, with the masks of the block before; where these
        are in, the one for its Gram matrices."""
        if self.rounds is not None and self.rounds.sharing:
            return dict.fromkeys(self.members, self.rounds.ask_shares())
        if self.rounds is not None and self.rounds.unmasking:
            return dict.fromkeys(self.members, self.rounds.ask_unmask())
        if self._first:
            return self._ask_grams(block)
        fields: dict[str, Tensor] = {}
        if self._attempt == 0:
            self._prepare(block, self.layout.matrices(block))
            if block:
                fields = self._decided(block - 1)
        values = packed_stats.length(self._parts)
        return self._write(ROUND, block, (values,), self._ask, fields)

    def _ask_grams(self, block: int) -> Numbered:
        asked = {"groups": self._ask["groups"], "scale": self._scale()}
        if self.rounds is not None:
            check_same(list(self._in_sum), self.rounds.sums.participants)
        return self._write(GRAMS, block, (), asked, {})

    def _write(
        self, kind: int, block: int, numbers: tuple[int, ...], asked: Fields, last: Fields
    ) -> Numbered:
        """One request to everybody; for a secure sum, to each with what others wrote to it."""
        count = (block, self._attempt, len(self.members), *numbers)
        first = {"groups": asked["groups"]}
        rest = {name: asked[name] for name in ("centre", "scale") if name in asked}
        if self.rounds is None:
            data = messages.write(messages.head(kind, *count), {**first, **rest, **last})
            return dict.fromkeys(self.members, data)
        head, ask = messages.head(kind, *count, self.rounds.sums.index), self.rounds.ask_masked
        asked_of = {number: {**first, **ask(number), **rest, **last} for number in self.members}
        return {number: messages.write(head, each) for number, each in asked_of.items()}

    def _scale(self) -> Tensor:
        """What Gram matrices are rounded by: as the first client's first sample says, which is what
        the whole text's first one says to central pruning; or the lengths of all channels."""
        if self.settings.exact:
            return self._first[min(self._first)]["scale"]
        return packed_stats.lengths(self._parts, self._total(self._first))

    def _decided(self, block: int) -> dict[str, Tensor]:
        """What became of a block."""
        masks, weights = self.report.masks, self.settings.weights
        return messages.mask_tensors(self.layout.matrices(block), masks, self.stored, weights)

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
                    self.needs if self.settings.noise else grams.of_channels(self.needs),
                )
            inputs = measured.inputs
        self._probed = measured
        self._ask = {"groups": packed_stats.sharing(matrices, inputs)}
        self._parts = packed_stats.layout(matrices, self._ask["groups"], self.needs)
        self.judge.begin(self._parts, measured.inputs, measured.outputs)
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
        """Decide the block from the replies; False if there is something left to be asked for."""
        got: dict[int, dict[str, Tensor]] = {}

        def check(number: int, data: bytes) -> None:
            got[number] = self._statistics(number, block, data)

        if self.rounds is not None and not self._take_securely(replies, check, got):
            return False
        if self.rounds is None:
            before = len(self.members)
            self._take(replies, check)
            odd = self.judge.odd(got, self._known(), self._dense(block))
            for number, why in odd.items():
                self._leave_out(number, why)
                del got[number]
            self._check_enough()
            self._in_sum = self._known()
            if self._first and len(self.members) < before:
                self._attempt += 1
                self._first = {}
                return False
        if self.settings.sends_grams and not self._first:
            self._first = got
            return False
        with torch.no_grad():
            if self.settings.aggregate == STATISTICS:
                self._decide(block, got)
            else:
                self._elect(block, got)
        self._attempt, self._first = 0, {}
        return True

    def _take_securely(
        self,
        replies: Mapping[int, bytes],
        check: Callable[[int, bytes], None],
        got: dict[int, dict[str, Tensor]],
    ) -> bool:
        """One exchange of a secure sum; True with the last one, and the sum is in `got` alone."""
        rounds, known = self.rounds, self._known()
        assert rounds is not None
        if rounds.sharing:
            self._take(replies, rounds.take_shares)
            rounds.sums.open_mail()
            return False
        if not rounds.unmasking:
            self._take(replies, check)
            if self._first:
                check_same(list(self._in_sum), list(got))
            self._in_sum = {number: known[number] for number in got}
            rounds.sums.take_masked(got)
            return False
        self._take(replies, rounds.take_unmask)
        got[SUM] = rounds.finish()
        return True

    def _decide(self, block: int, got: totals.Replies) -> None:
        """The block's masks and weights, as central pruning decides them."""
        first = {n: self._first[n] for n in got} if self._first else got
        if self.rounds is None and not self.settings.sends_grams:
            first, notes = self.judge.choose(block, first)
            self.report.notes += notes
        total = self._total(got if self.settings.exact else first)
        if self.settings.noise:
            total = self._estimate(total)
        measured, device = Collector(), device_of(self.layout.blocks[block])
        measured.inputs, measured.outputs = packed_stats.unpack(self._parts, total, device)
        if self.settings.sends_grams:
            summed = totals.gram_matrices(self._parts, got, self.settings, self._scale())
            grams.load(self._parts, summed, measured.inputs)
        measured.choosing, measured.unknown = self._probed.choosing, self._probed.unknown
        self._prune(block, measured, WalkPlan(self.report.recipe, self.needs))

    def _elect(self, block: int, got: totals.Replies) -> None:
        """The block's masks, and weights if they were updated, from what every client decided."""
        matrices, recipe = self.layout.matrices(block), self.report.recipe
        dense = self._dense(block)
        total = totals.ballot(got, dense, self.secure, len(self._in_sum), self._counted()[1])
        if self.secure:
            self.judge.check_ballot(total, dense)
        elected = ballots.count(matrices, total, recipe, self.settings.aggregate)
        measured, before = Collector(), len(self.report.layers)
        measured.choosing, measured.unknown = self._probed.choosing, self._probed.unknown
        for matrix, tokens in zip(matrices, total.tokens.tolist(), strict=True):
            stats = measured.inputs[matrix.name] = ChannelStats(0, ())
            stats.tokens = tokens
            if matrix.name in elected.weights and matrix.name not in measured.choosing:
                stored = self.stored_type(matrix)
                matrix.weight.copy_(elected.weights[matrix.name].to(stored))
        settled = recipe.with_changes(refine=None, update=None)
        self._prune(block, measured, WalkPlan(settled, self.needs, base=elected.masks))
        for number, layer in enumerate(self.report.layers[before:], before):
            if layer.name in elected.unseen and not layer.dense:
                self.report.layers[number] = replace(layer, dense=ballots.UNSEEN)

    def _prune(self, block: int, measured: Collector, plan: WalkPlan) -> None:
        matrices = self.layout.matrices(block)
        types = {self.stored_type(matrix) for matrix in matrices}
        plan = replace(plan, stored=types.pop() if len(types) == 1 else None)
        pruned = prune_block(matrices, measured, self.report, plan)
        self.report.masks.update(pruned.masks)

    def stored_type(self, matrix: Matrix) -> torch.dtype:
        """What its updated weights are rounded to."""
        return self.stored.get(matrix.parameter_name, matrix.parameter.dtype)

    def finish(self) -> Numbered:
        """What became of the last block."""
        data = messages.write(messages.head(FINISH), self._decided(len(self.layout.blocks) - 1))
        return dict.fromkeys(self.members, data)

    def promise(self) -> dict[str, float] | None:
        """What the noise guarantees for the whole run, if there is noise."""
        if self.privacy is None or not self.settings.noise:
            return None
        return {
            **{**asdict(self.privacy), "honest": self.settings.honest},
            "noise_multiplier": self.settings.noise,
            "releases": len(self.layout.blocks),
        }

    def _statistics(self, number: int, block: int, data: bytes) -> dict[str, Tensor]:
        """One client's reply, checked as far as it can be."""
        settings, matrices = self.settings, self.layout.matrices(block)
        kind = GRAMS if self._first else ROUND
        shape = messages.reply_fields(settings, self._parts, matrices, self.stored)
        if self._first:
            shape = messages.gram_fields(settings, self._parts)
        numbers, fields = messages.read(data, kind, shape)
        if numbers[:2] != [block, self._attempt]:
            raise SympruneError(f"It answered for block {numbers[0]}, not {block}.")
        if "tokens" in fields and not self.secure:
            kept = [fields[f"mask{n}"] for n in range(len(messages.parameters(matrices)))]
            ballots.check_count(matrices, kept, self.report.recipe)
        known = self._known()[number]
        if not self.secure:
            self.judge.check(fields, known)
        if self._first and not self.secure:
            self.judge.check_grams(fields, self._first[number], known, self._scale())
        return fields

    def _total(self, got: totals.Replies) -> packed_stats.Packed:
        if self.defence.replaces_mean:
            return totals.robust_statistics(self._parts, got, self.defence)
        total = totals.statistics(self._parts, got, self.settings, *self._counted())
        if self.secure:
            self.judge.check_sum(total, self._counted()[0], len(self._in_sum))
        return total

    def _dense(self, block: int) -> list[nn.Parameter]:
        return list(messages.parameters(self.layout.matrices(block)).values())

    def _counted(self) -> tuple[int, int]:
        """How many samples and tokens the clients in the sum have."""
        known = self._in_sum.values()
        return sum(k.samples for k in known), sum(k.samples * k.length for k in known)

    def _estimate(self, total: packed_stats.Packed) -> packed_stats.Packed:
        values = packed_stats.length(self._parts)
        deviation = self.settings.share * self.settings.clip
        deviation *= math.sqrt(values * len(self._in_sum))
        summed = noise.in_differences(total.values, self.settings.clip)
        public = (self._ask["centre"], self._ask["scale"], *self._counted())
        return noise.estimate(self._parts, summed, *public, deviation, self.settings.clip)

    def _take(self, replies: Mapping[int, bytes], accept: Callable[[int, bytes], None]) -> None:
        """Hand every member's reply on; leave out, with a note, whose is missing or wrong."""
        for number in list(self.members):
            try:
                if number not in replies:
                    raise SympruneError("It did not answer.")
                accept(number, replies[number])
            except SympruneError as error:
                self._leave_out(number, str(error))
            except Exception as error:  # whatever a stranger's bytes can provoke
                self._leave_out(number, f"Its reply cannot be read ({type(error).__name__}).")
        self._check_enough()

    def _leave_out(self, number: int, why: str) -> None:
        del self.members[number]
        self.report.notes.append(f"Client {number} was left out: {why}")

    def _check_enough(self) -> None:
        least = 1 if self.rounds is None else max(2, self.rounds.sums.least)
        if len(self.members) < least:
            last = self.report.notes[-1]
            raise SympruneError(f"Too few clients are left to go on. {last}")

    def _known(self) -> dict[int, Known]:
        return {number: known for number, known in self.members.items() if known is not None}
