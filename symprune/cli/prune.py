"""The commands that change a model: prune, refine, sweep."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from symprune.cli import console
from symprune.cli import options as o
from symprune.cli.groups import (
    Choosing,
    Experts,
    Loading,
    Measuring,
    Permute,
    Reconstructing,
    Refining,
    Running,
    SelfSamples,
    Valuing,
    expand,
)
from symprune.cli.share import Public, PushToHub, check_target, send_output
from symprune.cli.showing import (
    Showing,
    conclude,
    conclude_sweep,
    show_forecast,
    show_samples,
)
from symprune.errors import Interrupted


@expand
def prune(
    model: o.Model,
    *,
    choosing: Choosing,
    permute: Permute = None,
    experts: Experts = None,
    calibration: o.Calibration = None,
    nsamples: o.NSamples = None,
    seqlen: o.SeqLen = None,
    self_samples: SelfSamples = None,
    seed: o.Seed = None,
    bos: o.Bos = None,
    refine: Annotated[
        str | None,
        typer.Option(
            help="Improve the masks: swap, dsnot or r2-dsnot.", rich_help_panel=o.REFINEMENT
        ),
    ] = None,
    max_swaps: o.MaxSwaps = None,
    refining: Refining,
    update: o.UpdateName = None,
    update_iters: o.UpdateIters = None,
    rounds: o.Rounds = None,
    allocate: o.Allocate = None,
    spread: o.Spread = None,
    valuing: Valuing,
    reconstructing: Reconstructing,
    measuring: Measuring,
    showing: Showing,
    running: Running,
    dry_run: o.DryRun = False,
    loading: Loading,
    push_to_hub: PushToHub = None,
    private: Public = True,
) -> None:
    """Make a model sparse and show its perplexity before and after.

    [bold]Examples[/bold]

      symprune prune --model llama2-7b --sparsity 0.5

      symprune prune --model ./my-model --method wanda --pattern 2:4 --calibration builtin

      symprune prune --model llama3-8b --sparsity 0.6 --refine r2-dsnot --report-error

      symprune prune --model llama3-8b --recipe balanced --values int4

      symprune prune --model ./my-mixtral --experts drop:25% --sparsity 0
    """
    from symprune.jobs import pruning

    chosen = choosing.build(
        calibration=calibration, nsamples=nsamples, seqlen=seqlen, self_samples=self_samples,
        seed=seed, bos=bos,
    )  # fmt: skip
    steps = refining.select_given() | o.select_given(max_swaps=max_swaps)
    chosen = o.with_step(chosen, "refine", refine, steps)
    chosen = o.with_step(
        chosen, "update", update, o.select_given(iters=update_iters, rounds=rounds)
    )
    chosen = o.with_step(chosen, "allocate", allocate, o.select_given(spread=spread))
    chosen = measuring.apply(reconstructing.apply(valuing.apply(chosen)))
    if permute is not None:
        chosen = chosen.with_changes(permute=None if permute == "none" else permute)
    if experts is not None:
        chosen = chosen.with_changes(experts=None if experts == "none" else experts)
    settings = {**running.settings(), "prompts": showing.prompts()}
    job = pruning.Job(model, chosen, **settings, access=loading.access())
    console.mind_network()
    target = check_target(push_to_hub, private, loading.token)
    if do(job, running.json_file, dry_run, running.report_to):
        send_output(job.folder, target)


@expand
def refine_masks(
    model: o.Model,
    *,
    masks: Annotated[
        Path, typer.Option(help="Folder or file with the masks to start from (masks.safetensors).")
    ],
    method: Annotated[
        str | None,
        typer.Option(
            help="The criterion that made them; needed if it is your own module:function. "
            "[dim]\\[as recorded][/dim]"
        ),
    ] = None,
    refine: Annotated[
        str, typer.Option(help="How to refine them: dsnot, r2-dsnot or swap.")
    ] = "dsnot",
    max_swaps: o.MaxSwaps = None,
    refining: Refining,
    update: o.UpdateName = None,
    update_iters: o.UpdateIters = None,
    calibration: o.Calibration = None,
    nsamples: o.NSamples = None,
    seqlen: o.SeqLen = None,
    self_samples: SelfSamples = None,
    seed: o.Seed = None,
    bos: o.Bos = None,
    token_limit: o.TokenLimit = None,
    valuing: Valuing,
    reconstructing: Reconstructing,
    measuring: Measuring,
    showing: Showing,
    running: Running,
    dry_run: o.DryRun = False,
    loading: Loading,
) -> None:
    """Refine saved masks of a dense model, without training.

    MODEL is the dense model the masks belong to. Method, pattern and calibration are those of the
    run that made the masks, unless given here. Its other steps are not repeated: without --update
    the kept weights have the dense model's values.
    """
    from symprune.criteria import allow_code
    from symprune.jobs import pruning
    from symprune.update import under_masks

    changes = o.select_given(
        calibration=calibration, nsamples=nsamples, seqlen=seqlen, self_samples=self_samples,
        seed=seed, bos=bos,
    )  # fmt: skip
    allow_code(method)
    made = pruning.recipe_of(masks, method)
    chosen = made.with_changes(
        refine=None, update=None, allocate=None, values=None, reconstruct=None,
        inputs="pruned", sequential=False, targets="own", values_head=None, **changes,
    )  # fmt: skip
    chosen = o.with_token_limit(chosen, token_limit)
    steps = refining.select_given() | o.select_given(max_swaps=max_swaps)
    chosen = o.with_step(chosen, "refine", refine, steps)
    fitting = under_masks(update) | o.select_given(iters=update_iters)
    chosen = o.with_step(chosen, "update", update, fitting)
    chosen = measuring.apply(reconstructing.apply(valuing.apply(chosen)))
    settings = {**running.settings(), "prompts": showing.prompts(), "access": loading.access()}
    job = pruning.Job(model, chosen, masks=masks, **settings)
    if job.output is None:
        job = replace(job, output=Path(f"{job.folder}-{refine}"))
    do(job, running.json_file, dry_run, running.report_to)


def do(
    job: Any, json_file: Path | None, dry_run: bool = False, report_to: list[str] | None = None
) -> bool:
    """Prune and show what came out; whether this is the process that speaks."""
    from symprune.checkpoint import resume
    from symprune.eval import tables
    from symprune.eval.verdict import verdict
    from symprune.jobs import pruning
    from symprune.machine import distributed, durable
    from symprune.tracking import figures as logged
    from symprune.tracking.tracker import choose, tracked

    durable.check_file(json_file, o.JSON)
    loggers = choose(report_to or []) if distributed.is_first() else []
    console.prepare_libraries()
    if dry_run:
        from symprune.jobs.estimate.pruning import forecast

        with console.display() as shown:
            found = forecast(job, shown.tell)
        show_forecast(found, json_file)
        return False
    settings = {"model": job.model, **job.recipe.to_dict()}
    try:
        with tracked(loggers, job.folder.name, settings, console.remark, console.warn) as tracker:
            with console.display(distributed.is_first()) as shown:

                def show(figures: dict[str, Any]) -> None:
                    shown.show(figures)
                    logged.add_step(tracker, figures)

                record = pruning.prune(job, shown.tell, show, shown.watch_eval)
            logged.add_record(tracker, record)
            tracker.note("verdict", verdict(record))
    except KeyboardInterrupt as error:
        raise Interrupted(resume.describe_kept(job.folder)) from error
    distributed.stop()
    if not distributed.is_first():
        return False
    console.out.print(tables.by_kind(record["layers"]))
    if job.report_error:
        console.out.print(tables.errors_by_kind(record["layers"]))
    show_samples(record)
    console.out.print(tables.summary(record))
    console.notes(record["notes"])
    console.say_saved(record["output"])
    conclude(record)
    o.write_json(json_file, record)
    return True


@expand
def sweep(
    model: o.Model,
    *,
    grid: Annotated[
        Path,
        typer.Option(
            help="YAML file: lists of methods, sparsities, patterns, groups, alphas, betas, seeds, "
            "refinements, updates, allocations, values, reconstructions and permutes to combine; "
            "nsamples, seqlen, calibration, bos, values_head, eval_data, valid_data (measured as "
            "well) and eval_windows apply to every combination."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Results, one JSON line per cell; an existing file is continued."
        ),
    ] = Path("sweep.jsonl"),
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Do only the Kth of N parts of the grid, as one job of an array; results go to "
            "OUTPUT with `.KofN` in its name. `symprune merge` puts them together.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A criterion of your own that the grid may name; repeatable.",
        ),
    ] = None,
    dtype: o.Dtype = "auto",
    compute_dtype: o.ComputeDtype = "auto",
    device: o.Device = "auto",
    report_to: o.ReportTo = None,
    dry_run: o.DryRun = False,
    loading: Loading,
) -> None:
    """Prune a model in many ways and compare the results; finished cells are not repeated.

    [bold]Example grid[/bold]

      methods: \\[wanda, ria, {name: stochria, beta: 0.1}]

      sparsities: \\[0.5, 0.6]

      patterns: \\["2:4"]

      refinements: \\[null, dsnot, {name: r2-dsnot, layers: all}]
    """
    from symprune.checkpoint.load import load_computing
    from symprune.criteria import allow_code
    from symprune.eval import tables
    from symprune.jobs.estimate.cells import forecast_sweep
    from symprune.jobs.estimate.forecast import attempt
    from symprune.jobs.sharing.shards import Shard
    from symprune.jobs.sweep import Grid, Sweep, check_results, over_seeds
    from symprune.models import hub
    from symprune.tracking.figures import add_cell
    from symprune.tracking.tracker import choose, tracked

    for name in method or []:
        allow_code(name)
    chosen, part = Grid.load(grid), None if shard is None else Shard.parse(shard)
    recipes = chosen.recipes()
    recipes = recipes if part is None else part.pick(recipes)
    output = output if part is None else part.name(output)
    check_results(output)
    loggers = [] if dry_run else choose(report_to or [])
    console.prepare_libraries()
    begun = time.perf_counter()
    settings = {"model": model, "grid": str(grid), "cells": len(recipes)}
    with (
        tracked(loggers, output.stem, settings, console.remark, console.warn) as tracker,
        console.display() as shown,
    ):
        shown.tell(f"Loading {model}")
        origin, where = hub.resolve(model, loading.access()), hub.pick_device(device)
        loaded, stored = load_computing(origin, dtype, where, compute_dtype)
        tokenizer = hub.load_tokenizer(origin)
        name = f"{model}@{loading.revision}" if loading.revision else model
        job = Sweep(loaded, tokenizer, name, chosen, output, stored)
        shown.tell("Timing the first block")
        spent = time.perf_counter() - begun
        found = attempt(lambda: forecast_sweep(job, recipes, device, spent))
        if not dry_run and found is not None:
            found.check()
            for said in found.sentences():
                shown.tell(said)
        try:
            if not dry_run:
                finish = partial(add_cell, tracker)
                steps = (shown.watch, shown.watch_eval, shown.begin)
                results = job.run(*steps, recipes, finish)
        except KeyboardInterrupt as error:
            kept = f"Interrupted: finished cells are kept in {output}; the same command goes on."
            raise Interrupted(kept) from error
    if dry_run:
        show_forecast(found, None)
        return
    console.out.print(tables.sweep(over_seeds(results)))
    console.notes(dict.fromkeys(note for cell in results for note in cell.get("notes", [])))
    conclude_sweep(results, output)
