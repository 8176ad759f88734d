"""What plain sums tell of a client's text, and from how many tokens on they tell little.

What enters the first block's first matrices depends on a token alone, so the sums a client sends of
it are linear in how often it has which token: non-negative least squares finds the words of a short
text (`scripts/fed/attack_tokens.py`; docs/threat-model.md has the measurements).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.pruning.aggregate import packed_stats
from symprune.fed.pruning.aggregate.ballots import STATISTICS
from symprune.fed.pruning.messages import Settings
from symprune.models.matrices import Matrix

TOKENS_PER_NUMBER = 32  # with fewer the attack finds a good part of the words, at every width tried
WORDS_PER_NUMBER = 1  # with fewer words than equations one who knows which they may be counts them
RUN = 4  # tokens in a row by which a place in a text is known again
_FACTORS = torch.tensor([0x1E3779B97F4A7C15, 0x42B2AE3D27D4EB4F, 0x165667B19E3779F9, 1])  # odd


@dataclass(frozen=True)
class Text:
    """How much a client's windows say: places of the text in them, and different tokens."""

    places: int
    words: int

    @classmethod
    def of(cls, tokens: Tensor) -> Text:
        """Of windows `[samples, length]`. Windows are drawn at random places and overlap, so what
        is counted is different runs of tokens: there are no more of them than places in the text,
        however often it was drawn."""
        run = min(RUN, tokens.shape[1])
        runs = tokens.unfold(1, run, 1).reshape(-1, run)
        known = (runs * _FACTORS[-run:]).sum(1)  # modulo 2^64; two alike only count less
        return cls(len(known.unique()), len(tokens.unique()))


def equations(settings: Settings, matrices: Sequence[Matrix]) -> int:
    """How many numbers of the first block may be linear in the token counts, at most: the first
    matrix's input, and outputs of all matrices that may share it."""
    if not matrices:
        return 0
    width = matrices[0].weight.shape[1]
    first = packed_stats.Part("inputs", (), width, settings.needs.inputs)
    sharing = [matrix for matrix in matrices if matrix.weight.shape[1] == width]
    outputs = [
        packed_stats.Part("outputs", (), matrix.weight.shape[0], settings.needs.outputs)
        for matrix in sharing
    ]
    return first.size + sum(part.size for part in outputs)


def least_tokens(settings: Settings, matrices: Sequence[Matrix]) -> int:
    """With fewer tokens than this a client's own sums give its words away; 0 where it sends none
    that a server could read."""
    if settings.secure or settings.noise or settings.aggregate != STATISTICS:
        return 0
    return TOKENS_PER_NUMBER * equations(settings, matrices)


def check(settings: Settings, matrices: Sequence[Matrix], tokens: Tensor, allowed: bool) -> None:
    """Refuse to send plain sums of so little text that they give its words away."""
    least = least_tokens(settings, matrices)
    if not least or allowed:
        return
    text, words = Text.of(tokens), WORDS_PER_NUMBER * equations(settings, matrices)
    few = f"{text.places:,} tokens at different places" if text.places < least else ""
    few = few or (f"{text.words:,} different tokens" if text.words < words else "")
    if few:
        raise SympruneError(
            f"Client {settings.number} has {few}, too few to send plain sums: below {least:,} "
            f"tokens, {words:,} of them different, they give its words away. Use a secure sum or "
            "noise, or its owner sets allow_few_tokens."
        )


def risk(settings: Settings, matrices: Sequence[Matrix]) -> str | None:
    """What the owners of the data should read before a plain run, if there is something."""
    least = least_tokens(settings, matrices)
    if not least:
        return None
    words = WORDS_PER_NUMBER * equations(settings, matrices)
    return (
        "The server sees every client's own sums. Those of the first block tell which words a "
        f"short text has: a client needs {least:,} tokens at different places, {words:,} of them "
        "different, or --secure-sum or --epsilon."
    )


def warnings(settings: Settings) -> list[str]:
    """What the owners of the data should read of Gram matrices."""
    if not settings.sends_grams:
        return []
    whose = "the sum of all clients'" if settings.secure else "every client's"
    return [
        f"The server sees {whose} Gram matrices, which tell which channels of a layer act together "
        "and, in the first block, how often every word occurs: far more than sums per channel."
    ]
