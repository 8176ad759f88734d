"""The commands that change a model: prune, refine, sweep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from symprune.cli import console
from symprune.cli import options as o
from symprune.cli.groups import (
    Choosing,
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
from symprune.errors import Interrupted


@expand
def prune(
    model: o.Model,
    *,
    choosing: Choosing,
    permute: Permute = None,
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
    running: Running,
    loading: Loading,
) -> None:
    """Make a model sparse and show its perplexity before and after.

    [bold]Examples[/bold]

      symprune prune --model llama2-7b --sparsity 0.5

      symprune prune --model ./my-model --method wanda --pattern 2:4 --calibration builtin

      symprune prune --model llama3-8b --sparsity 0.6 --refine r2-dsnot --report-error

      symprune prune --model llama3-8b --recipe balanced --values int4
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
    job = pruning.Job(model, chosen, **running.settings(), access=loading.access())
    _do(job, running.json_file)


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
    running: Running,
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
    settings = {**running.settings(), "access": loading.access()}
    job = pruning.Job(model, chosen, masks=masks, **settings)
    if job.output is None:
        job = replace(job, output=Path(f"{job.folder}-{refine}"))
    _do(job, running.json_file)


def _do(job: Any, json_file: Path | None) -> None:
    from symprune.checkpoint import resume
    from symprune.eval import tables
    from symprune.jobs import pruning
    from symprune.machine import distributed, durable

    durable.check_file(json_file, o.JSON)
    console.prepare_libraries()
    try:
        with console.display(distributed.is_first()) as shown:
            record = pruning.prune(job, shown.tell, shown.show, shown.watch_eval)
    except KeyboardInterrupt as error:
        raise Interrupted(resume.describe_kept(job.folder)) from error
    distributed.stop()
    if not distributed.is_first():
        return
    console.out.print(tables.by_kind(record["layers"]))
    if job.report_error:
        console.out.print(tables.errors_by_kind(record["layers"]))
    console.out.print(tables.summary(record))
    console.notes(record["notes"])
    console.say_saved(record["output"])
    o.write_json(json_file, record)


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
    from symprune.jobs.sweep import Grid, Sweep, check_results, over_seeds
    from symprune.models import hub

    for name in method or []:
        allow_code(name)
    chosen = Grid.load(grid)
    chosen.recipes()
    check_results(output)
    console.prepare_libraries()
    with console.display() as shown:
        shown.tell(f"Loading {model}")
        origin, where = hub.resolve(model, loading.access()), hub.pick_device(device)
        loaded, stored = load_computing(origin, dtype, where, compute_dtype)
        tokenizer = hub.load_tokenizer(origin)
        name = f"{model}@{loading.revision}" if loading.revision else model
        job = Sweep(loaded, tokenizer, name, chosen, output, stored)
        try:
            results = job.run(shown.watch, shown.watch_eval, shown.begin)
        except KeyboardInterrupt as error:
            kept = f"Interrupted: finished cells are kept in {output}; the same command goes on."
            raise Interrupted(kept) from error
    console.out.print(tables.sweep(over_seeds(results)))
    console.say(f"{len(results)} cells in ", (str(output), "bold"))
