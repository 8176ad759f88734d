"""Measuring a saved model from its name: perplexity on a held-out text. What `symprune eval` calls.

The model stays on disk, as in `run`, if it is made of safetensors files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from symprune import calibration
from symprune.checkpoint.load import load_computing, local_folder
from symprune.checkpoint.packed_shards import open_shards
from symprune.checkpoint.streamed_model import StreamedModel, stored_dtype
from symprune.engine.text import bos
from symprune.engine.text.tokens import cap_seqlen
from symprune.eval.perplexity import perplexity
from symprune.jobs import streamed_perplexity
from symprune.jobs.measures import read_bos
from symprune.machine import compute
from symprune.models import hub
from symprune.validation import check_choice


def evaluate(
    model_name: str,
    data: str,
    seqlen: int,
    max_windows: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    tell: Callable[[str], None] = lambda _: None,
    tick: Callable[[int, int], None] = lambda *_: None,
    access: hub.Access | None = None,
    begin: str = "auto",
    compute_dtype: str = "auto",
) -> dict[str, Any]:
    """Perplexity of a saved model on a held-out text, as a record. begin says whether windows begin
    with BOS."""
    hub.check_dtype(dtype)
    check_choice("compute-dtype", compute_dtype, compute.CHOICES)
    origin = hub.resolve(model_name, access)
    where = hub.pick_device(device)
    config = hub.load_config(origin)
    seqlen, notes = cap_seqlen(config, seqlen)
    tokenizer = hub.load_tokenizer(origin)
    ids = calibration.encode(tokenizer, calibration.text(data, "test"))
    folder = local_folder(origin)
    if folder is None:
        tell(f"Loading {model_name}")
        model, _ = load_computing(origin, dtype, where, compute_dtype, dequantize=False)
        computed = model.dtype
        found = bos.decide(begin, tokenizer, config, bos.in_memory(model))
        tell(f"Perplexity on {data}")
        result = perplexity(model, ids, seqlen, max_windows, tick, found.token)
    else:
        trusted = origin.access.trust_remote_code
        source = open_shards(folder)
        computed = compute.pick(compute_dtype, stored_dtype(dtype, config, source), where)
        streamed = StreamedModel(source, config, dtype, where, trusted, computed)
        kept = read_bos(folder) if begin == "auto" else None
        found = kept or bos.decide(
            begin, tokenizer, config, streamed_perplexity.losses_of(streamed)
        )
        at_once = streamed_perplexity.windows_at_once(streamed, seqlen, 1)
        tell(f"Perplexity on {data}")
        result = streamed_perplexity.perplexity(
            streamed, ids, seqlen, max_windows, tick, at_once=at_once, bos=found.token
        )
    return {
        "model": model_name,
        "revision": hub.version_of(origin),
        "data": data,
        "compute_dtype": compute.name_of(computed),
        "bos": found.to_dict(),
        **result.to_dict(),
        "notes": [*notes, *found.notes],
    }
