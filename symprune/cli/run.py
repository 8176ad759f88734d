"""The commands that run models: bench, generate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from symprune.cli import console
from symprune.cli import options as o
from symprune.cli.groups import Loading, expand
from symprune.cli.showing import Foreseen, show_forecast
from symprune.machine import durable

if TYPE_CHECKING:
    from symprune.jobs.generate import Continuation

MODEL_HELP = (
    "Hub id, local folder (packed or not), .gguf file or short name; MODEL:bfloat16 gives it a "
    "type of its own."
)
PERPLEXITY = "Perplexity"


@expand
def bench(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help=MODEL_HELP)],
    *,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to continue it by.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which each has a turn.")] = 5,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="Threads for each model. [dim]\\[the physical cores][/dim]"
        ),
    ] = None,
    evaluate: Annotated[
        bool,
        typer.Option("--eval/--no-eval", help="Measure perplexity.", rich_help_panel=PERPLEXITY),
    ] = True,
    data: Annotated[
        str,
        typer.Option(help="builtin, wikitext2, c4 or a text file.", rich_help_panel=PERPLEXITY),
    ] = "builtin",
    windows: Annotated[
        int, typer.Option(min=1, help="Windows of that text.", rich_help_panel=PERPLEXITY)
    ] = 24,
    seqlen: Annotated[
        int, typer.Option(min=2, help="Tokens per window.", rich_help_panel=PERPLEXITY)
    ] = 512,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    dry_run: o.DryRun = False,
    json_file: o.JsonFile = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Also draw the result as one HTML page.")
    ] = None,
    loading: Loading,
) -> None:
    """Compare models that are dense, packed or GGUF: speed, memory, size and perplexity.

    Each is in a process of its own and they take turns, so that all meet the same machine; figures
    are medians over the rounds. A .gguf file without a type runs in llama.cpp, if llama-cpp-python
    is installed.

    [bold]Example[/bold]

      symprune bench smollm2-135m:bfloat16 ./packed
    """
    from symprune.eval import tables
    from symprune.eval.report import bench as page
    from symprune.eval.report import check_page
    from symprune.jobs.bench.turns import Plan
    from symprune.jobs.bench.turns import bench as measure

    durable.check_file(json_file, o.JSON)
    durable.check_file(html_file)
    if html_file is not None:
        check_page(html_file)
    console.mind_network()
    plan = Plan(
        prompt_tokens, new_tokens, rounds, threads, data if evaluate else None, windows, seqlen,
        device,
    )  # fmt: skip
    with console.display() as shown:
        foreseen = Foreseen(shown.tell, dry_run)
        record = measure(
            models, plan, dtype, shown.tell, shown.begin, shown.watch_eval, loading.access(),
            foreseen.go_on,
        )  # fmt: skip
    if dry_run:
        show_forecast(foreseen.found, json_file)
        return
    console.out.print(tables.bench(record))
    console.notes(record["notes"])
    console.conclude(page.verdict(record))
    o.write_json(json_file, record)
    if html_file is not None:
        from symprune.eval.report import write_bench

        console.say_saved(write_bench(record, html_file))


@expand
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    *,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens at most.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0, help="0: the likeliest token, always; 1: as the model has it.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn at a temperature.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask as the model's chat template has it.")
    ] = False,
    compare: Annotated[
        str | None,
        typer.Option(metavar="DENSE", help="Continue it with this model, too, to compare."),
    ] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    json_file: o.JsonFile = None,
    loading: Loading,
) -> None:
    """Continue a text, shown as it comes; with --compare, by two models.

    [bold]Example[/bold]

      symprune generate ./packed --prompt "The capital of France" --compare smollm2-135m
    """
    from symprune.jobs import generate as job

    durable.check_file(json_file, o.JSON)
    request = job.Request(prompt, max_new_tokens, temperature, seed, chat, device)
    request.check()
    console.prepare_libraries()
    # Alone, a text is all that goes to the output: it can be piped.
    aside = console.err if compare is None else console.out
    found = []
    for given in [model] if compare is None else [model, compare]:
        with console.doing(f"Loading {given}"):
            loaded = job.load(given, request, dtype, loading.access())
        if compare is not None:
            console.out.rule(Text(given), align="left")
        if not chat:
            console.write(prompt)
        came = job.continue_prompt(loaded, request, console.write)
        del loaded
        console.write("\n")
        aside.print(Text(_speed(came), style="dim"), highlight=False)
        found.append(came.to_dict())
    o.write_json(json_file, {"prompt": prompt, "continuations": found})


def _speed(came: Continuation) -> str:
    rate = came.tokens_per_second
    each = "" if rate is None else f", {rate:.1f} tokens/s"
    return f"{came.tokens} tokens{each}, the first after {came.first_token_seconds:.2f} s"
