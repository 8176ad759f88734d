"""How much there is to do in a run, and how long it takes where each step was timed once.

Formulas only: a `Pace` says how long a block takes for a window, `Work` how many windows and blocks
there are, a recipe which steps are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from symprune.engine import decide
from symprune.engine.text.self_written import AT_ONCE, BEGINNING
from symprune.engine.text.tokens import tries
from symprune.recipe import Recipe

ENDS_EARLY = 0.6  # of a forward that measures one group of several, on average


@dataclass(frozen=True)
class Pace:
    """Seconds. Of a window through what is in front of the blocks (embed), through one block
    (forward), the same measured (collect), or trained on (train), through the head (head); of a
    block's masks and values (decide), its masks as a search makes them (mask), its reading and
    writing (load, write); of a token through a block (token), and of one of each of 16 windows
    (tokens); and of reading the parts around the blocks (around)."""

    embed: float = 0.0
    forward: float = 0.0
    collect: float = 0.0
    train: float = 0.0
    head: float = 0.0
    decide: float = 0.0
    mask: float = 0.0
    load: float = 0.0
    write: float = 0.0
    token: float = 0.0
    tokens: float = 0.0
    around: float = 0.0


@dataclass(frozen=True)
class Work:
    """What there is: blocks still to prune, of all; windows to calibrate on, of the model's own and
    held out, in all processes; windows perplexity is measured on, how often, and at once; groups of
    matrices in a block; tokens in a window, and the share of them that the last block is trained to
    predict from."""

    blocks: int
    of_blocks: int
    samples: int = 0
    written: int = 0
    unwritten: int = 0  # of the windows to calibrate on, those the model writes from nothing
    together: int = AT_ONCE  # of these, as many as it writes at a time
    held_out: int = 0
    windows: int = 0
    measured: int = 2
    at_once: int = 1
    groups: int = 1
    seqlen: int = 0
    predicted: float = 1.0
    processes: int = 1
    report_error: bool = False
    decided: int = 1  # times over, where several parties decide each for itself
    shown: int = 0  # prompts that are continued
    new_tokens: int = 0  # of each of them
    writers: int = 2  # models that continue them
    looked: int = 0  # times all blocks are read for their zeros
    turns: int = 0  # of a bench, each so many tokens read and written
    turn_tokens: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Seconds:
    """How long each step takes, by name."""

    steps: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.steps.values())


def count_seconds(recipe: Recipe, work: Work, pace: Pace) -> Seconds:
    """How long a run takes from here."""
    needs, trained = decide.needs(recipe, work.report_error), recipe.reconstruction
    share, blocks = 1 / work.processes, work.blocks
    of_samples = 1.0 if recipe.trains_apart else share  # processes have all, and other blocks
    watching = work.held_out if needs.gram or trained is not None else 0
    every = work.samples + work.written + watching
    sides = 1 if recipe.targets == "own" else 2
    steps = {"perplexity": _perplexity(work, pace) * work.measured * share}
    if needs or trained is not None:
        streams = 1 + (recipe.follows_dense and recipe.follows_pruned)
        steps["embedding"] = (every * pace.embed * of_samples + pace.around) * streams
        measured = work.samples + (watching if needs.gram else 0)
        early = 1.0 if work.groups == 1 else ENDS_EARLY * work.groups
        steps["measuring"] = blocks * measured * pace.collect * early * sides * share
        if needs.gradients:
            steps["measuring"] += blocks * work.samples * pace.train * share
        passes = (recipe.inputs == "pruned" or streams == 2) + (
            recipe.follows_dense and recipe.inputs == "pruned"
        )
        steps["passing on"] = blocks * every * pace.forward * passes * share
        steps["passing on"] += blocks * every * pace.forward * (of_samples - share)
    steps["masking"] = blocks * pace.decide * work.decided * share
    if trained is not None:
        watched = watching or max(1, every // 8)
        passed = trained.epochs * max(0, every - watched)  # windows of a training
        looked = (trained.epochs + 1) * watched
        once = passed * pace.train + looked * pace.forward
        divided = share if recipe.trains_apart else 1.0
        steps["training"] = blocks * (1 + trained.by_parts) * once * divided
        if recipe.trains_predictions and blocks:
            # The head sees the dense model's states, the block's, and these on the way back.
            head = pace.head * work.predicted
            steps["training"] += once + passed * 3 * head + looked * 2 * head + pace.around
    steps["allocating"] = _allocation(recipe, work, pace) * share
    begun = max(0, work.seqlen - min(BEGINNING, work.seqlen // 4))
    tokens = -(-work.written // work.together) * begun
    tokens += -(-work.unwritten // work.together) * work.seqlen
    each = work.of_blocks * pace.tokens + work.together * pace.head / max(work.seqlen, 1)
    steps["writing text"] = tokens * each
    if work.shown:
        written = work.shown * work.new_tokens * _token(work, pace)
        steps["continuing prompts"] = work.writers * (_whole(work, pace) + written)
    if work.turns:
        read, written = work.turn_tokens
        turn = read / work.seqlen * (pace.embed + work.of_blocks * pace.forward)
        turn += written * _token(work, pace)
        steps["speed"] = _whole(work, pace) + work.turns * turn
    steps["reading and writing"] = blocks * (pace.load + pace.write)
    steps["looking for zeros"] = work.looked * work.of_blocks * pace.load
    return Seconds({name: value for name, value in steps.items() if value > 0})


def _token(work: Work, pace: Pace) -> float:
    """One more, behind others that are known."""
    return work.of_blocks * pace.token + pace.head / max(work.seqlen, 1)


def _whole(work: Work, pace: Pace) -> float:
    """Reading all of the model."""
    return work.of_blocks * pace.load + pace.around


def _perplexity(work: Work, pace: Pace) -> float:
    """Once."""
    if not work.windows:
        return 0.0
    window = pace.embed + work.of_blocks * pace.forward + pace.head
    groups = -(-work.windows // max(work.at_once, 1))
    return work.windows * window + groups * (work.of_blocks * pace.load + 2 * pace.around)


def _allocation(recipe: Recipe, work: Work, pace: Pace) -> float:
    chosen = recipe.allocation
    if chosen is None or not chosen.needs or work.blocks < work.of_blocks:
        return 0.0
    # Sums of squares cost hardly more than the forward they are collected in.
    blocks = work.of_blocks
    seconds = work.samples * (pace.embed + blocks * pace.forward) + blocks * pace.load
    for windows, count in tries(recipe):
        tried = windows * (count + 1) * (blocks * pace.forward + pace.head)
        seconds += tried + blocks * (count * pace.mask + pace.load)
    return seconds
