"""A saved model against the dense one it came from, and a run's output against its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from symprune import calibration
from symprune.checkpoint.load import load_computing, local_folder
from symprune.checkpoint.packed_shards import open_shards
from symprune.checkpoint.streamed_model import Source, StreamedModel, stored_dtype
from symprune.engine.arguments import Allocate
from symprune.errors import SympruneError
from symprune.eval.perplexity import cut
from symprune.jobs import streamed_perplexity
from symprune.jobs.quality.divergence import WINDOWS, InMemory, OnDisk, Walkable, diverge
from symprune.machine import compute
from symprune.models import hub

SAMPLE = 10_000  # characters that two tokenizers must make the same of


def measure_against(
    model: Walkable,
    dense_name: str,
    tokenizer: Any,
    ids: Tensor,
    seqlen: int,
    max_windows: int | None,
    bos: int | None,
    dtype: str = "auto",
    device: str = "auto",
    compute_dtype: str = "auto",
    access: hub.Access | None = None,
    tell: Callable[[str], None] = lambda _: None,
    tick: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """How far a model is from the dense one of that name, as a record has it; on the first windows
    of the text."""
    origin, where = hub.resolve(dense_name, access), hub.pick_device(device)
    _check_tokenizers(tokenizer, hub.load_tokenizer(origin), dense_name)
    windows = cut(ids, seqlen, max_windows or WINDOWS, bos)
    folder = local_folder(origin)
    dense: Walkable
    if folder is None:
        tell(f"Loading {dense_name}")
        dense = InMemory(load_computing(origin, dtype, where, compute_dtype, dequantize=False)[0])
    else:
        source, config = open_shards(folder), hub.load_config(origin)
        computed = compute.pick(compute_dtype, stored_dtype(dtype, config, source), where)
        trusted = origin.access.trust_remote_code
        dense = OnDisk(StreamedModel(source, config, dtype, where, trusted, computed))
    tell(f"Comparing with {dense_name} on {len(windows)} windows")
    found = diverge(dense, model, windows, _at_once(dense, model, seqlen), tick)
    return {"model": dense_name, **found.to_dict()}


def _check_tokenizers(mine: Any, other: Any, name: str) -> None:
    """Fail where the models do not read the same tokens."""
    sample = calibration.text("builtin", "test")[:SAMPLE]
    first, second = (calibration.encode(tokenizer, sample).tolist() for tokenizer in (mine, other))
    if first != second:
        raise SympruneError(f"{name} has another tokenizer, so its predictions cannot be compared.")


def _at_once(dense: Walkable, pruned: Walkable, seqlen: int) -> int:
    """Windows whose hidden states take the room of a block, where a model is on disk."""
    on_disk = [model.streamed for model in (dense, pruned) if isinstance(model, OnDisk)]
    if not on_disk:
        return 1
    return min(streamed_perplexity.windows_at_once(model, seqlen, 1) for model in on_disk)


def diverge_from_input(
    streamed: StreamedModel,
    written: Source,
    config: Any,
    dtype: str,
    trusted: bool,
    windows: Tensor,
    tick: Callable[[int, int], None] = lambda *_: None,
    allocate: Allocate | None = None,
) -> dict[str, float]:
    """How far what a run wrote, with its configuration, is from the model it read."""
    pruned = StreamedModel(written, config, dtype, streamed.device, trusted, streamed.compute)
    pruned.place(streamed.devices)
    models = OnDisk(streamed), OnDisk(pruned)
    at_once = _at_once(*models, windows.shape[1])
    return diverge(*models, windows, at_once, tick, allocate).to_dict()
