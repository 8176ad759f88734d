"""One federated pruning job from names to a folder: load, measure, prune, measure, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symprune import calibration
from symprune.checkpoint import output_folder
from symprune.checkpoint.load import load_model
from symprune.engine import walk
from symprune.engine.text import bos
from symprune.errors import SympruneError
from symprune.eval.perplexity import perplexity
from symprune.fed.pruning.aggregate import grams
from symprune.fed.pruning.aggregate.ballots import STATISTICS
from symprune.fed.pruning.aggregate.bounds import DEPLOYED
from symprune.fed.pruning.driver import prune as prune_in_process
from symprune.fed.pruning.driver import split
from symprune.fed.pruning.noise import Privacy
from symprune.fed.pruning.refusals import check_defence, check_recipe
from symprune.jobs.estimate.forecast import Forecast, attempt
from symprune.jobs.estimate.loaded import forecast_recipes
from symprune.jobs.estimate.timed import InMemory
from symprune.jobs.estimate.work import Work
from symprune.jobs.preparation import (
    Tell,
    add_output,
    compare,
    default_held_out,
    default_output,
    make_record,
    prepare,
    read_held_out,
)
from symprune.machine import compute
from symprune.models import hub
from symprune.recipe import Recipe
from symprune.validation import check_choice

REFERENCE_WINDOWS = 16


@dataclass(frozen=True)
class PruningJob:
    """A `fed prune` command.

    texts: one per client, `recipe.nsamples` windows each; or none, and the recipe's calibration set
    is dealt out to so many clients.
    """

    model: str
    recipe: Recipe
    texts: tuple[str, ...] = ()
    clients: int | None = None
    secure: bool = False
    privacy: Privacy | None = None
    reference: str = "builtin"
    output: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    evaluate: bool = True
    eval_data: tuple[str, ...] = ()
    eval_windows: int | None = None
    force: bool = False
    access: hub.Access = field(default_factory=hub.Access)
    compute_dtype: str = "auto"
    aggregate: str = STATISTICS
    gram_bits: int = grams.EXACT
    allow_few_tokens: bool = False
    robust: str = DEPLOYED

    def __post_init__(self) -> None:
        if bool(self.texts) == (self.clients is not None):
            raise SympruneError("Give --client texts or a number of --clients, one of the two.")
        if self.clients is not None and self.clients < 1:
            raise SympruneError(f"There must be at least one client, not {self.clients}.")
        check_recipe(self.recipe, self.aggregate, self.privacy, self.gram_bits)
        check_defence(self.robust, self.recipe, self.aggregate, self.secure, self.privacy)
        check_choice("compute-dtype", self.compute_dtype, compute.CHOICES)

    @property
    def folder(self) -> Path:
        return self.output or Path(f"{default_output(self.model, self.recipe)}-federated")

    @property
    def names(self) -> list[str]:
        """What the record calls the clients; of a file its name, not where its owner keeps it."""
        if self.texts:
            return [calibration.without_folders(text) for text in self.texts]
        return [
            f"{self.recipe.calibration} {i + 1}/{self.clients}" for i in range(self.clients or 0)
        ]

    @property
    def held_out(self) -> tuple[str, ...]:
        sources = self.texts or [self.recipe.calibration]
        return self.eval_data or (default_held_out(sources),)

    @property
    def reads(self) -> list[str]:
        """What may be files of the user's, which the output must not take the place of."""
        texts = [self.recipe.calibration, self.reference, *self.texts, *self.held_out]
        return [self.model, *(file for text in texts for file in calibration.files_of(text))]

    def tokens(self, tokenizer: Any, seqlen: int) -> list[Tensor]:
        """Every client's calibration tokens. Clients that name one text draw other windows."""
        size, seed = self.recipe.nsamples, self.recipe.text_seed
        if not self.texts:
            source = self.recipe.calibration
            tokens = calibration.calibration_tokens(source, tokenizer, size, seqlen, seed)
            return split(tokens, self.clients or 1)
        return [
            calibration.calibration_tokens(text, tokenizer, size, seqlen, seed + number)
            for number, text in enumerate(self.texts)
        ]


def prune(
    job: PruningJob,
    tell: Tell = lambda _: None,
    watch: walk.Watch = lambda *_: None,
    watch_eval: Callable[[int, int], None] = lambda *_: None,
    begin: Callable[[Forecast | None], bool] = lambda _: True,
) -> dict[str, Any]:
    """Do the job and return its record; without times it is the output's `symprune.json`. begin is
    told what it will take, None where that cannot be told, and says whether to go on: if not,
    nothing is done."""
    begun = time.perf_counter()
    prepared = prepare(job, tell)
    tokenizer, seqlen, device = prepared.tokenizer, prepared.seqlen, prepared.device
    tell(f"Drawing calibration text for {len(job.names)} clients")
    clients = job.tokens(tokenizer, seqlen)
    reference = None
    if job.privacy is not None:
        seed = job.recipe.text_seed
        reference = calibration.calibration_tokens(
            job.reference, tokenizer, REFERENCE_WINDOWS, seqlen, seed
        )
    held_out = job.held_out if job.evaluate else ()
    texts = {data: read_held_out(data, tokenizer, seqlen) for data in held_out}
    tell(f"Loading {job.model}")
    model = load_model(prepared.origin, job.dtype).to(device)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    output_folder.check_room(job.folder, size)
    dtype = model.dtype
    stored = compute.widen(model, job.compute_dtype, device)
    spent = time.perf_counter() - begun
    found = attempt(lambda: _foresee(job, model, dtype, clients, texts, seqlen, size, spent))
    if not begin(found):
        return {}
    if found is not None:
        found.check()
        for said in found.sentences():
            tell(said)
    beginning = bos.decide(job.recipe.bos, tokenizer, model.config, bos.in_memory(model))
    clients = [calibration.begin_with(tokens, beginning.token) for tokens in clients]
    if reference is not None:
        reference = calibration.begin_with(reference, beginning.token)

    def measure(which: str) -> dict[str, Any]:
        measured = {}
        for data, ids in texts.items():
            tell(f"Perplexity of the {which} model on {data}")
            measured[data] = perplexity(
                model, ids, seqlen, job.eval_windows, watch_eval, beginning.token
            )
        return measured

    dense = measure("dense")
    tell(f"Pruning with {len(clients)} clients: {job.recipe.describe()}")
    result = prune_in_process(
        model, clients, job.recipe, job.secure, job.privacy, reference, watch=watch, stored=stored,
        aggregate=job.aggregate, gram_bits=job.gram_bits, tell=tell, robust=job.robust,
    )  # fmt: skip
    result.report.notes[:0] = [*prepared.notes, *beginning.notes]
    result.report.bos = beginning
    pruned = measure("pruned")
    figures = [
        compare(calibration.without_folders(data), dense[data].to_dict(), after.to_dict())
        for data, after in pruned.items()
    ]
    description = f"{job.recipe.describe()}, {len(clients)} clients"
    record = make_record(
        job, prepared, description, result.to_dict(),
        dtype=dtype, computed=model.dtype, perplexity=figures,
    )  # fmt: skip
    record["federated"] |= {"clients": job.names, "secure_sum": job.secure}
    tell(f"Writing {job.folder}")
    compute.restore(model, stored)
    output_folder.save(job.folder, model, tokenizer, record, result.report.masks)
    return add_output(record, prepared.origin, job.folder)


def _foresee(
    job: PruningJob,
    model: Any,
    stored: torch.dtype,
    clients: list[Tensor],
    texts: Mapping[str, Tensor],
    seqlen: int,
    disk: int,
    spent: float,
) -> Forecast:
    """disk: bytes of the output; spent: seconds that have passed. Encoding, masking and adding up
    what clients send is not counted."""
    place = InMemory(model, stored)
    blocks = len(place.layout.blocks)
    windows = [min(len(ids) // seqlen, job.eval_windows or len(ids)) for ids in texts.values()]
    samples = sum(map(len, clients))
    decided = 1 if job.aggregate == STATISTICS else len(clients)
    work = Work(
        blocks=blocks, of_blocks=blocks, samples=samples, windows=sum(windows), seqlen=seqlen,
        decided=decided,
    )  # fmt: skip
    what = f"{job.recipe.describe()}, {len(clients)} clients, {samples} windows of {seqlen} tokens"
    ids = clients[0].flatten()
    return forecast_recipes(
        place, [job.recipe], ids, work,
        what=what, device=job.device, folder=Path(job.folder), disk=disk, spent=spent,
    )  # fmt: skip
