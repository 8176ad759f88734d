"""The forecast of a sweep: every cell that is not done yet."""

from __future__ import annotations

from symprune import calibration
from symprune.engine.predictions import step_between
from symprune.engine.text.tokens import cap_seqlen, windows_to_try
from symprune.jobs.estimate.forecast import Forecast
from symprune.jobs.estimate.loaded import count_words, forecast_recipes
from symprune.jobs.estimate.timed import InMemory
from symprune.jobs.estimate.work import Work
from symprune.jobs.sweep import Sweep, read_results
from symprune.recipe import Recipe


def forecast_sweep(
    sweep: Sweep, every: list[Recipe], device: str = "auto", spent: float = 0.0
) -> Forecast:
    """every: the recipes of all cells, done or not; spent: seconds that have passed."""
    grid, done = sweep.grid, read_results(sweep.results)
    recipes = [recipe for recipe in every if sweep.key(recipe) not in done]
    seqlen, _ = cap_seqlen(sweep.model.config, grid.seqlen)
    texts = [each for each in (grid.eval_data, grid.valid_data) if each is not None]
    rows = [calibration.encode(sweep.tokenizer, calibration.text(t, "test")) for t in texts]
    windows = [min(len(ids) // seqlen, grid.eval_windows or len(ids)) for ids in rows]
    place = InMemory(sweep.model, sweep.stored)
    tried = max((windows_to_try(recipe) for recipe in recipes), default=0)
    work = Work(
        blocks=len(place.layout.blocks),
        of_blocks=len(place.layout.blocks),
        samples=grid.nsamples,
        written=grid.self_samples or 0,
        held_out=max(1, tried, grid.nsamples // 8),
        windows=sum(windows),
        seqlen=seqlen,
        predicted=1 / step_between(seqlen, count_words(sweep.model)),
        report_error=grid.report_error,
    )
    kept = sum(each.numel() * each.element_size() for each in sweep.changing(recipes))
    what = f"{len(recipes)} of {len(every)} cells to do"
    return forecast_recipes(
        place, recipes, rows[0], work,
        what=what, device=device, folder=sweep.results, beside=kept, spent=spent,
    )  # fmt: skip
