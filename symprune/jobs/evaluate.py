"""Measuring a saved model from its name: perplexity on a held-out text. What `symprune eval` calls.

The model stays on disk, as in `run`, if it is made of safetensors files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from symprune import calibration
from symprune.checkpoint.load import load_computing, local_folder
from symprune.checkpoint.packed_shards import open_shards
from symprune.checkpoint.streamed_model import StreamedModel, stored_dtype
from symprune.engine.text import bos
from symprune.engine.text.tokens import cap_seqlen
from symprune.eval.perplexity import cut, perplexity
from symprune.jobs import streamed_perplexity
from symprune.jobs.estimate.forecast import Forecast, attempt
from symprune.jobs.estimate.loaded import MEASURE, forecast_recipes
from symprune.jobs.estimate.timed import InMemory as Loaded
from symprune.jobs.estimate.timed import Place
from symprune.jobs.estimate.work import Work
from symprune.jobs.measures import read_bos
from symprune.jobs.quality.against import measure_against
from symprune.jobs.quality.divergence import WINDOWS as COMPARED
from symprune.jobs.quality.divergence import InMemory, OnDisk, Walkable
from symprune.jobs.quality.overlap import warn_of_folder
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
    against: str | None = None,
    go_on: Callable[[Forecast | None], bool] | None = None,
    loaded: Any = None,
) -> dict[str, Any]:
    """Perplexity of a saved model on a held-out text, as a record. begin says whether windows begin
    with BOS; against is a dense model that it is compared with. go_on is told what it will take,
    None where that cannot be told, and says whether to go on: if not, nothing is measured. loaded:
    the model, if it is in memory already."""
    begun = time.perf_counter()
    hub.check_dtype(dtype)
    check_choice("compute-dtype", compute_dtype, compute.CHOICES)
    origin = hub.resolve(model_name, access)
    where = hub.pick_device(device)
    config = hub.load_config(origin)
    seqlen, notes = cap_seqlen(config, seqlen)
    tokenizer = hub.load_tokenizer(origin)
    ids = calibration.evaluation_tokens(data, tokenizer)
    folder = local_folder(origin)
    walk: Callable[[], Walkable]
    forecast = partial(_forecast, ids, seqlen, max_windows, device, begun, against is not None)
    if folder is None or loaded is not None:
        model = loaded
        if model is None:
            tell(f"Loading {model_name}")
            model, _ = load_computing(origin, dtype, where, compute_dtype, dequantize=False)
        computed = model.dtype
        if go_on is not None and not go_on(attempt(lambda: forecast(Loaded(model), 1))):
            return {}
        found = bos.decide(begin, tokenizer, config, bos.in_memory(model))
        tell(f"Perplexity on {data}")
        result = perplexity(model, ids, seqlen, max_windows, tick, found.token)
        walk = partial(InMemory, model)
    else:
        trusted = origin.access.trust_remote_code
        source = open_shards(folder)
        computed = compute.pick(compute_dtype, stored_dtype(dtype, config, source), where)
        streamed = StreamedModel(source, config, dtype, where, trusted, computed)
        at_once = streamed_perplexity.windows_at_once(streamed, seqlen, 1)
        if go_on is not None and not go_on(attempt(lambda: forecast(streamed, at_once))):
            return {}
        kept = read_bos(folder) if begin == "auto" else None
        found = kept or bos.decide(
            begin, tokenizer, config, streamed_perplexity.losses_of(streamed)
        )
        tell(f"Perplexity on {data}")
        result = streamed_perplexity.perplexity(
            streamed, ids, seqlen, max_windows, tick, at_once=at_once, bos=found.token
        )
        walk = partial(OnDisk, streamed)
    compared: dict[str, Any] = {}
    overlap = warn_of_folder(Path(origin.path), ids, data, seqlen, max_windows)
    if against is not None:
        compared["against"] = measure_against(
            walk(), against, tokenizer, ids, seqlen, max_windows, found.token, dtype, device,
            compute_dtype, access, tell, tick,
        )  # fmt: skip
    return {
        "model": model_name,
        "revision": hub.version_of(origin),
        "data": data,
        "compute_dtype": compute.name_of(computed),
        "bos": found.to_dict(),
        **result.to_dict(),
        **compared,
        "notes": [*notes, *found.notes, *overlap],
    }


def _forecast(
    ids: Tensor,
    seqlen: int,
    max_windows: int | None,
    device: str,
    begun: float,
    compared: bool,
    place: Place,
    at_once: int,
) -> Forecast:
    """What measuring takes; begun: when the command did; compared: with a dense model, of which is
    assumed that it is as fast."""
    windows = len(cut(ids, seqlen, max_windows))
    both = min(windows, max_windows or COMPARED) if compared else 0
    work = Work(
        blocks=0, of_blocks=len(place.layout.blocks), windows=windows + 2 * both, measured=1,
        at_once=at_once, seqlen=seqlen,
    )  # fmt: skip
    what = f"Perplexity on {windows} windows of {seqlen} tokens"
    if both:
        what += f", predictions beside another model's on {both}"
    return forecast_recipes(
        place, [MEASURE], ids, work, what=what, device=device, folder=Path(),
        spent=time.perf_counter() - begun,
    )  # fmt: skip
