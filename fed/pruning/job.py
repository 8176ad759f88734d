"""One federated pruning job from names to a folder: load, measure, prune, measure, write."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from symprune import calibration
from symprune.checkpoint import output_folder
from symprune.checkpoint.load import load_model
from symprune.engine import bos, walk
from symprune.engine.tokens import cap_seqlen
from symprune.errors import SympruneError
from symprune.eval.perplexity import perplexity
from symprune.fed.pruning.driver import prune as prune_in_process
from symprune.fed.pruning.driver import split
from symprune.fed.pruning.noise import Privacy
from symprune.fed.pruning.server import check_recipe
from symprune.jobs.pruning import default_output
from symprune.machine import compute
from symprune.models import hub
from symprune.recipe import Recipe
from symprune.validation import check_choice

Tell = Callable[[str], None]
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

    def __post_init__(self) -> None:
        if bool(self.texts) == (self.clients is not None):
            raise SympruneError("Give --client texts or a number of --clients, one of the two.")
        if self.clients is not None and self.clients < 1:
            raise SympruneError(f"There must be at least one client, not {self.clients}.")
        check_recipe(self.recipe)
        check_choice("compute-dtype", self.compute_dtype, compute.CHOICES)

    @property
    def folder(self) -> Path:
        return self.output or Path(f"{default_output(self.model, self.recipe)}-federated")

    @property
    def names(self) -> list[str]:
        """What the record calls the clients; of a file its name, not where its owner keeps it."""
        if self.texts:
            return [Path(text).name for text in self.texts]
        return [
            f"{self.recipe.calibration} {i + 1}/{self.clients}" for i in range(self.clients or 0)
        ]

    @property
    def held_out(self) -> tuple[str, ...]:
        """What perplexity is measured on: WikiText-2, unless the run is meant to need no hub."""
        sources = set(self.texts or [self.recipe.calibration])
        return self.eval_data or ("builtin" if sources == {"builtin"} else "wikitext2",)

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
) -> dict[str, Any]:
    """Do the job and return its record; without times it is the output's `symprune.json`."""
    output_folder.check_output(job.folder, job.force)
    origin = hub.resolve(job.model, job.access)
    device = hub.pick_device(job.device)
    seqlen, notes = cap_seqlen(hub.load_config(origin), job.recipe.seqlen)
    tell(f"Loading the tokenizer of {job.model}")
    tokenizer = hub.load_tokenizer(origin)
    tell(f"Drawing calibration text for {len(job.names)} clients")
    clients = job.tokens(tokenizer, seqlen)
    reference = None
    if job.privacy is not None:
        seed = job.recipe.text_seed
        reference = calibration.calibration_tokens(
            job.reference, tokenizer, REFERENCE_WINDOWS, seqlen, seed
        )
    texts: dict[str, Tensor] = {}
    if job.evaluate:
        for data in job.held_out:
            texts[data] = calibration.encode(tokenizer, calibration.text(data, "test"))
    tell(f"Loading {job.model}")
    model = load_model(origin, job.dtype).to(device)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    output_folder.check_room(job.folder, size)
    dtype = model.dtype
    stored = compute.widen(model, job.compute_dtype, device)
    tell(f"Computing in {compute.describe(model.dtype, dtype, device)}")
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
        model, clients, job.recipe, job.secure, job.privacy, reference, watch=watch, stored=stored
    )
    result.report.notes[:0] = [*notes, *beginning.notes]
    result.report.bos = beginning
    pruned = measure("pruned")
    record = {
        "model": job.model,
        "origin": str(origin) if not origin.is_local else Path(str(origin)).name,
        "revision": hub.version_of(origin),
        "description": f"{job.recipe.describe()}, {len(clients)} clients",
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **result.to_dict(),
        "dtype": compute.name_of(dtype),
        "compute_dtype": compute.name_of(model.dtype),
        "device": device.type,
        "perplexity": [
            {
                "data": Path(data).name,
                "dense": dense[data].perplexity,
                "pruned": after.perplexity,
                "windows": after.windows,
                "seqlen": after.seqlen,
            }
            for data, after in pruned.items()
        ],
    }
    record["federated"] |= {"clients": job.names, "secure_sum": job.secure}
    tell(f"Writing {job.folder}")
    compute.restore(model, stored)
    output_folder.save(job.folder, model, tokenizer, record, result.report.masks)
    record["output"] = str(job.folder)
    record["output_bytes"] = output_folder.folder_size(job.folder)
    return record
