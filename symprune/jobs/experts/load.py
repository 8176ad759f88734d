"""What the router of a model on disk gives each expert to do, on a little text, block by block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from symprune import calibration
from symprune.checkpoint.packed_shards import open_shards
from symprune.checkpoint.streamed_model import StreamedModel, stored_dtype
from symprune.engine import forward
from symprune.engine.arguments import Allocate
from symprune.engine.experts.measure import Load, watching
from symprune.engine.experts.mixtures import COUNTS, TOP_K, find_mixtures
from symprune.engine.text import bos
from symprune.engine.text.tokens import cap_seqlen
from symprune.jobs import streamed_perplexity
from symprune.jobs.measures import read_bos
from symprune.machine import compute
from symprune.models import hub

Tick = Callable[[int, int], None]


def pass_through(
    streamed: StreamedModel,
    count: int,
    tokens: Tensor,
    allocate: Allocate | None = None,
    tick: Tick = lambda *_: None,
) -> dict[str, Load]:
    """What passes the experts of every mixture, by its name; `count` experts in each."""
    loads = dict[str, Load]()
    with forward.ready(streamed.model):
        with streamed.around():
            activations = forward.embed(streamed.layout, tokens, allocate=allocate)
        for index in range(len(streamed)):
            with streamed.block(index) as block:
                prefix = f"{streamed.layout.prefix}.{index}."
                with watching(find_mixtures(block, count, prefix), loads):
                    activations.advance(index, block)
            tick(index + 1, len(streamed))
    return loads


def measure(
    folder: Path,
    access: hub.Access,
    text: str,
    nsamples: int,
    seqlen: int,
    tick: Tick = lambda *_: None,
) -> dict[str, Any] | None:
    """The load of every expert as the model in a folder is now; None for a model that has no
    experts, or none whose routers are known."""
    origin = hub.resolve(str(folder), access)
    config = hub.load_config(origin)
    kind = str(getattr(config, "model_type", ""))
    if kind not in COUNTS:
        return None
    count = int(getattr(config, COUNTS[kind]))
    seqlen, _ = cap_seqlen(config, seqlen)
    tokenizer, where = hub.load_tokenizer(origin), hub.pick_device("auto")
    source = open_shards(folder)
    computed = compute.pick("auto", stored_dtype("auto", config, source), where)
    streamed = StreamedModel(source, config, "auto", where, access.trust_remote_code, computed)
    found = read_bos(folder) or bos.decide(
        "auto", tokenizer, config, streamed_perplexity.losses_of(streamed)
    )
    tokens = calibration.calibration_tokens(text, tokenizer, nsamples, seqlen, 0)
    tokens = calibration.begin_with(tokens, found.token)
    loads = pass_through(streamed, count, tokens, tick=tick)
    layers = [
        {"name": name, "tokens": load.tokens, "gates": load.gates} for name, load in loads.items()
    ]
    about = {"text": text, "windows": len(tokens), "seqlen": seqlen}
    return {"count": count, "top_k": int(getattr(config, TOP_K)), **about, "layers": layers}
