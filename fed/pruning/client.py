"""A client of federated pruning: a function from a message's bytes to the reply's bytes.

It holds the dense model and tokens that never leave it. What it remembers between messages (the
hidden states in front of the next block, mostly) is an explicit state that can live in a folder, so
that each message may be answered by a new process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from symprune.engine import forward
from symprune.engine.collect import Collector, collect
from symprune.errors import SympruneError
from symprune.fed.mechanism import seeded_draw, system_draw
from symprune.fed.owner.guard import UNGUARDED, Guard
from symprune.fed.privacy import WINDOW, Release
from symprune.fed.problems.models.fingerprint import digest
from symprune.fed.pruning import (
    client_state,
    exposure,
    messages,
    noise,
    secure_rounds,
)
from symprune.fed.pruning.aggregate import ballots, grams, packed_stats
from symprune.fed.pruning.messages import FINISH, GRAMS, HELLO, ROUND, SHARE, UNMASK, Settings
from symprune.fed.pruning.refusals import check_asked, check_insisted, check_once
from symprune.fed.secure import masking
from symprune.fed.secure.party import Party, Trust
from symprune.fed.wire.payload import check_finite
from symprune.maskset import MaskSet
from symprune.models.layout import Layout, find_layout
from symprune.models.matrices import Matrix
from symprune.stats import GRAM, Needs

Tick = Callable[[str, int, int, int], None]
"""tick(stage, block, samples done, samples)"""


class Client:
    """One owner of private calibration tokens `[samples, length]`.

    privacy and secure are what the owner insists on, whatever the server says. With a folder, the
    state is read from it and written to it after each message. noise_seed makes the noise
    repeatable, for experiments only: noise that can be guessed protects nothing. stored names the
    parameters that are stored in another type than they are computed in here. Without gram, the
    owner does not have Gram matrices sent; with allow_few_tokens, the owner accepts that plain sums
    of so little text give its words away. guard is the owner's policy, words the tokenizer's
    digest, trust whom secure sums are made with.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: Tensor,
        privacy: noise.Privacy | None = None,
        secure: bool = False,
        folder: Path | None = None,
        noise_seed: int | None = None,
        tick: Tick = lambda *_: None,
        stored: Mapping[str, torch.dtype] | None = None,
        gram: bool = True,
        allow_few_tokens: bool = False,
        trust: Trust | None = None,
        guard: Guard = UNGUARDED,
        words: bytes = b"",
    ) -> None:
        if tokens.dim() != 2 or tokens.numel() == 0:
            raise SympruneError("A client's tokens must be a filled [samples, length] tensor.")
        self.layout: Layout = find_layout(model)
        self.tokens = tokens
        self.privacy = privacy
        self.secure = secure
        self.gram = gram
        self.allow_few_tokens = allow_few_tokens
        self.trust = trust or Trust()
        self.guard = guard
        self.words = words
        self.tick = tick
        self.folder = folder
        self.stored = stored or {}
        self.state = client_state.load(folder) if folder else client_state.State()
        self._masks = MaskSet()
        self._weights: dict[str, Tensor] = {}
        self._walking: forward.Activations | None = None
        self._draw = system_draw if noise_seed is None else seeded_draw(noise_seed)

    def __call__(self, data: bytes) -> bytes:
        """Answer one message of the server."""
        kind = messages.read_head(data)[1]
        answers = {HELLO: self._introduce, ROUND: self._measure}
        answers |= {GRAMS: self._send_grams, FINISH: self._finish}
        answers |= {SHARE: self._share, UNMASK: self._unmask}
        if kind not in answers:
            raise SympruneError(f"A message is of the unknown kind {kind}.")
        with forward.ready(self.layout.model):
            reply = answers[kind](data)
        if self.folder:
            client_state.save(self.folder, self.state)
        return reply

    @property
    def masks(self) -> MaskSet:
        """The masks received so far, of the blocks that are pruned."""
        return client_state.load_masks(self.folder) if self.folder else self._masks

    def _introduce(self, data: bytes) -> bytes:
        settings = messages.read_settings(data)
        self._agree(settings)
        few = self.allow_few_tokens
        exposure.check(settings, self.layout.matrices(0), self.tokens, few)
        self.state = client_state.State(settings, story=messages.beginning(settings))
        fields = {"model": digest(self.layout.model, self.stored, self.words)}
        if settings.secure:
            party = self.state.party = Party.enter(settings.number, self.trust)
            fields["card"] = torch.frombuffer(bytearray(party.card), dtype=torch.uint8)
        samples, length = self.tokens.shape
        return messages.write(messages.head(HELLO, samples, length), fields)

    def _agree(self, settings: Settings) -> None:
        """Insist on the protection that was promised, for one run only."""
        check_asked(self.guard, settings, len(self.tokens))
        least = 0.0 if self.privacy is None else self.privacy.multiplier(len(self.layout.blocks))
        check_insisted(settings, self.secure, self.gram, least)
        if self.state.block >= 0:
            check_once(settings, self.state.summed, self.privacy is not None)

    def _measure(self, data: bytes) -> bytes:
        """A block's statistics. A request that comes again gets the same statistics again, noise
        included; hidden states are passed on once."""
        block, attempt, participants, values, index = messages.read_head(data)[2:7]
        state, settings = self.state, self._settings
        new = block == state.block + 1 and attempt == 0
        again = block == state.block and attempt >= 0 and state.answered
        if not new and not again:
            raise SympruneError(f"A client at block {state.block} was asked for block {block}.")
        if not 0 <= block < len(self.layout.blocks) or not 0 < participants <= settings.clients:
            raise SympruneError(f"A client was asked for block {block} of {participants} clients.")
        if settings.secure:
            self.guard.cohort(participants)
        matrices = self.layout.matrices(block)
        widest = packed_stats.length(
            packed_stats.layout(matrices, torch.arange(len(matrices)), settings.needs)
        )
        if not 0 <= values <= widest:
            raise SympruneError(f"A client was asked for {values} statistics of {widest}.")
        asked = messages.round_fields(settings, participants, len(matrices), values)
        before = self.layout.matrices(block - 1) if block and attempt == 0 else []
        masks = messages.mask_fields(before, self.stored, settings.weights)
        _, fields = messages.read(data, ROUND, {**asked, **masks})
        parts = packed_stats.layout(matrices, fields["groups"], settings.needs)
        if packed_stats.length(parts) != values:
            raise SympruneError(f"A client was asked for {values} statistics that do not fit.")
        if new:
            if settings.noise and not bool((fields["scale"] > 0).all()):
                raise SympruneError("A client was told to measure in units of zero.")
            if block == 0 and settings.noise and parts:
                release = Release(1.0, settings.noise, len(self.layout.blocks), WINDOW)
                self.guard.spend(release, "pruning", str(self.folder or ""))
            self._advance(block, before, fields)
            state.begin(block)
            state.summed = settings.secure
            self._answer(block, matrices, parts, fields)
        reply, story = self._reply(matrices), messages.story(state.before, ROUND, block, fields)
        if settings.secure:
            purpose = f"the sums of block {block}"
            reply = secure_rounds.mask(self._party, index, fields, purpose, reply, story)
        state.story = story
        return messages.write(messages.head(ROUND, block, attempt), reply)

    def _answer(
        self,
        block: int,
        matrices: list[Matrix],
        parts: list[packed_stats.Part],
        fields: dict[str, Tensor],
    ) -> None:
        """What a block is answered with, into the state."""
        state, settings = self.state, self._settings
        if settings.recipe is not None:
            measured = Collector()
            if settings.needs:
                measured = self._run(block, matrices, settings.needs)
            types = {self.stored.get(m.parameter_name, m.parameter.dtype) for m in matrices}
            stored = types.pop() if len(types) == 1 else None
            state.ballot = ballots.cast(matrices, measured, settings.recipe, stored)
        elif settings.exact:
            first = self._run(block, matrices, Needs(frozenset({GRAM})), range(1))
            state.scale = grams.first_scale(parts, first.inputs)
        else:
            state.measured = self._collect(block, matrices, parts, fields)

    def _reply(self, matrices: list[Matrix]) -> dict[str, Tensor]:
        """What the state holds, as a message; for a secure sum, as whole numbers."""
        state, settings = self.state, self._settings
        if state.ballot is not None and not settings.secure:
            return ballots.plain_fields(state.ballot)
        if state.ballot is not None:
            dense = list(messages.parameters(matrices).values())
            return ballots.whole_fields(state.ballot, dense, settings.clients)
        if settings.exact:
            assert state.scale is not None
            return {"scale": state.scale}
        assert state.measured is not None
        if settings.secure:
            return {masking.WIDE: self._whole(state.measured)}
        return {k: getattr(state.measured, k) for k in client_state.PACKED}

    def _send_grams(self, data: bytes) -> bytes:
        """A block's Gram matrices, in the units or by the scale that the clients agreed on."""
        block, attempt, participants, index = messages.read_head(data)[2:6]
        state, settings = self.state, self._settings
        if block != state.block or not state.answered or not settings.sends_grams:
            raise SympruneError(f"A client was asked for Gram matrices of block {block}.")
        if not 0 < participants <= settings.clients or attempt < 0:
            raise SympruneError(f"A client was asked for block {block} of {participants} clients.")
        if settings.secure:
            self.guard.cohort(participants)
        matrices = self.layout.matrices(block)
        asked = messages.gram_request(settings, participants, matrices)
        _, fields = messages.read(data, GRAMS, asked)
        parts = packed_stats.layout(matrices, fields["groups"], settings.needs)
        scale = fields["scale"]
        if bool((scale < 0).any()):
            raise SympruneError("A client was told of negative lengths.")
        reply: dict[str, Tensor] = {}
        if settings.exact:
            if state.told is None or not torch.equal(state.told, scale):
                state.measured = self._collect(block, matrices, parts, fields)
                state.told = scale
            reply = {k: getattr(state.measured, k) for k in client_state.PACKED}
            for number, (sums, rests) in enumerate(state.halves):
                reply |= {f"gram{number}": sums, f"rest{number}": rests}
        else:
            lengths = grams.by_part(parts, scale)
            pairs = zip(state.halves, lengths, strict=True)
            how = (settings.gram_bits, settings.clients)
            reply = {f"gram{n}": grams.to_units(*pair, *how) for n, pair in enumerate(pairs)}
        if settings.secure:
            purpose = f"the Gram matrices of block {block}"
            what = messages.story(state.story, GRAMS, block, fields)
            reply = secure_rounds.mask(self._party, index, fields, purpose, reply, what)
        return messages.write(messages.head(GRAMS, block, attempt), reply)

    def _finish(self, data: bytes) -> bytes:
        last = len(self.layout.blocks) - 1
        if self.state.block not in (last, last + 1):
            raise SympruneError(f"A client at block {self.state.block} was told it is finished.")
        matrices = self.layout.matrices(last)
        expected = messages.mask_fields(matrices, self.stored, self._settings.weights)
        _, fields = messages.read(data, FINISH, expected)
        self._apply(last, matrices, fields)
        self.state = client_state.State(self.state.settings, last + 1, summed=self.state.summed)
        return messages.write(messages.head(FINISH))

    @property
    def _settings(self) -> Settings:
        if self.state.settings is None:
            raise SympruneError("A client was asked for statistics before it was introduced.")
        return self.state.settings

    def _apply(self, block: int, matrices: list[Matrix], fields: dict[str, Tensor]) -> None:
        masks, weights = (MaskSet(), {}) if self.folder else (self._masks, self._weights)
        for number, (name, parameter) in enumerate(messages.parameters(matrices).items()):
            masks[name] = keep = fields[f"mask{number}"]
            parameter.data.masked_fill_(~keep.to(parameter.device), 0)
            if f"values{number}" in fields:
                weights[name] = fields[f"values{number}"]
                client_state.put_kept(parameter, keep, weights[name])
        if self.folder and matrices:
            client_state.save_masks(self.folder, block, masks, weights)

    def _advance(self, block: int, before: list[Matrix], fields: dict[str, Tensor]) -> None:
        """Prune the block before and pass the hidden states through it; first of all, embed."""
        self._apply(block - 1, before, fields)
        if not self._settings.needs:
            return
        samples = len(self.tokens)
        if block == 0:
            self._walking = forward.embed(
                self.layout, self.tokens, lambda n: self.tick("embed", 0, n, samples)
            )
            self.state.hidden = self._walking.hidden
        else:
            self._activations().advance(
                block - 1,
                self.layout.blocks[block - 1],
                lambda n: self.tick("advance", block - 1, n, samples),
            )

    def _activations(self) -> forward.Activations:
        """The hidden states in front of the block; a new process finds its way back to them."""
        assert self.state.hidden is not None
        if self._walking is None:
            self._walking = forward.embed(self.layout, self.tokens)
            if self._walking.arguments.carry_state:
                self._pass_again(self._walking, self.state.block)
            else:
                self._walking.hidden = self.state.hidden
        return self._walking

    def _pass_again(self, walking: forward.Activations, block: int) -> None:
        """Through the pruned blocks before `block`, which left something for later ones."""
        masks = self.masks
        masks.apply(self.layout.model)
        weights = client_state.load_weights(self.folder) if self.folder else self._weights
        for name, kept in weights.items():
            client_state.put_kept(self.layout.model.get_parameter(name), masks[name], kept)
        for passed in range(block):
            walking.advance(passed, self.layout.blocks[passed])
        self.state.hidden = walking.hidden

    def _collect(
        self,
        block: int,
        matrices: list[Matrix],
        parts: list[packed_stats.Part],
        fields: dict[str, Tensor],
    ) -> packed_stats.Packed:
        """The block's statistics; with noise, each sample's part clipped and noise on their sum."""
        settings, samples = self._settings, len(self.tokens)
        if not parts:
            return packed_stats.empty(parts)
        scales = None
        if settings.exact:
            there = [part for part in parts if part.gram]
            pairs = zip(there, grams.by_part(parts, fields["scale"]), strict=True)
            scales = {name: scale for part, scale in pairs for name in part.names}

        def measure(some: range) -> packed_stats.Packed:
            measured = self._run(block, matrices, settings.needs, some, scales)
            if settings.sends_grams:
                self.state.halves = grams.halves(parts, measured.inputs)
            packed = packed_stats.pack(parts, measured.inputs, measured.outputs)
            check_finite(packed.values, f"What a client measured in block {block}")
            return packed

        if not settings.noise:
            return measure(range(samples))
        total = packed_stats.empty(parts)
        whole = torch.zeros(total.values.numel(), dtype=torch.int64)
        for sample in range(samples):
            values = measure(range(sample, sample + 1)).values
            bounds = (fields["centre"], fields["scale"], settings.clip)
            whole += noise.clip_difference(values, *bounds)
        total.values = noise.noisy(whole, settings.share, self._draw)
        total.counts[:] = torch.tensor([samples, self.tokens.numel()])  # these are public
        return total

    def _run(
        self,
        block: int,
        matrices: list[Matrix],
        needs: Needs,
        some: range | None = None,
        scales: Mapping[str, Tensor] | None = None,
    ) -> Collector:
        """Some samples, or all, through the block as it is."""
        samples = len(self.tokens)
        some = range(samples) if some is None else some
        needs = replace(needs, token_limit=self._settings.needs.token_limit)
        return collect(
            self._activations().only(some),
            block,
            self.layout.blocks[block],
            matrices,
            needs,
            lambda n: self.tick("collect", block, some.start + n, samples),
            gram_scales=scales,
        )

    @property
    def _party(self) -> Party:
        if self.state.party is None:
            raise SympruneError("A client was asked for a secure sum it was not told of.")
        return self.state.party

    def _share(self, data: bytes) -> bytes:
        return secure_rounds.answer_share(data, self._party, self.trust, self._settings)

    def _unmask(self, data: bytes) -> bytes:
        self.guard.cohort(messages.read_head(data)[3])  # who is said to be left counts as well
        return secure_rounds.answer_unmask(data, self._party, self._settings.clients)

    def _whole(self, measured: packed_stats.Packed) -> Tensor:
        """The measured vector, counts first, as whole numbers."""
        values = torch.cat([measured.counts.flatten().double(), measured.values])
        rests = torch.cat([torch.zeros(measured.counts.numel()).double(), measured.rests])
        return masking.to_fixed(values, rests, self._settings.clients)
