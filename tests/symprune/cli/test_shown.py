"""What a terminal of 80 or 40 columns shows, a pipe, and one that wants no colours."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from symprune.cli import console, main
from symprune.cli.screen.fitted_table import share_width
from symprune.cli.screen.progress import Lines, Live, say_time
from symprune.cli.screen.terminal import Paper
from symprune.eval import tables
from symprune.fed.cli import deploy
from symprune.fed.cli.main import _summary_table

LAYERS = [
    {
        "name": f"model.layers.{n}.self_attn.q_proj", "kind": "self_attn.q_proj", "rows": 4096,
        "columns": 11008, "removed": 22544384, "relative_error_base": 0.123,
        "relative_error": 0.1, "held_out_error_base": 0.2, "held_out_error": 0.12,
        "expected_error_before": 1e-3, "expected_error_after": 1e-4, "exchanged": 12345,
    }
    for n in (3, 4)
]  # fmt: skip
MATRICES = [
    {"name": f"model.layers.{n}.mlp.down_proj.weight", "shape": [4096, 11008], "zeros": 22544384,
     "size": 45088768, "kind": "mlp.down_proj", "sparsity": 0.5 + n / 100,
     "pattern": "unstructured"}
    for n in (1, 2)
]  # fmt: skip
RECORD = {
    "model": "meta-llama/Llama-2-7b-hf",
    "description": "wanda, 50 % per row + lsq in 4 rounds allocated by search",
    "perplexity": [
        {"data": "wikitext2", "windows": 141, "seqlen": 2048, "dense": 5.47, "pruned": 6.42}
    ],
    "layers": LAYERS, "parameters": 6738415616, "removed": 3238002688, "sparsity": 0.5,
    "bits_per_weight": 3.28, "seconds": {"mask": 12.0}, "peak_memory_bytes": 2e9,
    "output_bytes": 3e9, "input_bytes": 13e9,
}  # fmt: skip
SWEPT = {
    "model": "m", "data": "wikitext2", "dense": 36.0, "perplexity": 58.3, "deviation": 1.2,
    "seeds": 3, "sparsity": 0.5, "seconds": 123.0, "valid": 44.0,
    "description": "symwanda-general alpha=1.0 beta=1.0, 50 % per row + r2-dsnot layers=all",
}  # fmt: skip
PLAN = {"prompt_tokens": 128, "new_tokens": 32, "threads": 2, "rounds": 5}
BENCHED = {
    "decode_tokens_per_second": 12.3, "decode_times_first": 1.0, "prefill_tokens_per_second": 99.0,
    "prefill_times_first": 1.0, "first_token_seconds": 0.5, "memory_bytes": 5e8,
    "file_bytes": 3e8, "bits_per_weight": 5.25, "packed": ["int8"], "engine": "symprune",
    "perplexity": {"data": "builtin", "windows": 24, "seqlen": 512, "perplexity": 33.1},
}  # fmt: skip
BILL = {"total": 503920.0, "per round": 25196.0, "per client and round": 2520.0}
COMPARED = {"algorithm": "accelerated-server-pruning-modified", "accuracy": 0.91, "bytes": 12345678}

AGAINST = {"model": "smollm2-135m", "windows": 2, "seqlen": 32, "kl": 0.0002, "agreement": 0.98}
FORESEEN = {
    "what": "Comparing 2", "where": "on cpu (as asked for)", "seconds": 99.0,
    "seconds_of": {"perplexity": 90.0, "looking for zeros": 9.0}, "memory_bytes": 5e8,
    "memory_there": 16e9, "disk_bytes": 0, "disk_there": 5e10,
}  # fmt: skip


def made() -> dict[str, Table]:
    """Every table that commands make from records, with names as long as they come."""
    names = ["meta-llama/Llama-2-7b-hf", "smollm2-135m-wanda-50-packed-int8"]
    bench = {"plan": PLAN, "models": [{**BENCHED, "label": name} for name in names]}
    return {
        "summary": tables.summary(RECORD),
        "by kind": tables.by_kind(LAYERS),
        "errors": tables.errors_by_kind(LAYERS),
        "sweep": tables.sweep([SWEPT, SWEPT]),
        "bench": tables.bench(bench),
        "inspected": tables.inspected(MATRICES),
        "inspected by kind": tables.inspected_by_kind(MATRICES),
        "bill": deploy.bill_table({"up": BILL, "down": BILL}),
        "compared": _summary_table([COMPARED], "digits"),
        "against": tables.against(AGAINST),
        "forecast": tables.forecast(FORESEEN),
    }


def shown(table: Table, width: int) -> str:
    paper = Paper(width=width, markup=False, emoji=False)
    with paper.capture() as captured:
        paper.print(table)
    return captured.get()


def words(table: Table, seen: str) -> set[str]:
    """Everything in a table that must not be cut; a list does without the first column's name."""
    cells = [cell for column in table.columns for cell in (column.header, *column.cells)]
    cells = cells if "┃" in seen else cells[1:]
    texts = [cell.plain if isinstance(cell, Text) else str(cell) for cell in cells]
    return {word for text in texts for word in text.split()}


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("name", list(made()))
def test_no_name_in_a_table_is_cut(name: str, width: int) -> None:
    table = made()[name]
    seen = shown(table, width)
    pieces = {part.strip(",:") for part in re.split(r"[\s│┃]+", seen)}
    missing = {word for word in words(table, seen) if word.strip(",:") not in pieces}
    assert not missing and "…" not in seen
    longest = max(len(word) for word in words(table, seen)) + 6
    longest = max([longest, *(len(word) for word in str(table.title or "").split())])
    assert all(len(line) <= max(width, longest) for line in seen.splitlines())


@pytest.mark.parametrize("name", list(made()))
def test_a_table_is_a_list_at_40_columns(name: str) -> None:
    assert not set("┃│━─") & set(shown(made()[name], 40))


def test_a_list_says_what_each_figure_is() -> None:
    seen = " ".join(shown(made()["against"], 40).split())
    assert "KL, nats a token: 0.0002" in seen and "same likeliest token: 98.00 %" in seen


LISTING = [("models",), ("methods",), ("fed", "list"), ("fed", "list", "--all")]


@pytest.mark.parametrize("command", LISTING)
@pytest.mark.parametrize("width", [40, 80])
def test_commands_that_list_things_cut_no_name(command: tuple[str, ...], width: int) -> None:
    wide, seen = (
        CliRunner().invoke(main.app, list(command), env={"COLUMNS": str(columns)}).output
        for columns in (400, width)
    )
    rows = [line for line in wide.splitlines() if line.startswith("│")]
    names = {row.split("│")[1].strip() for row in rows}
    assert rows and all("…" not in line for line in seen.splitlines())
    flat = " ".join(re.sub("[│┃]", " ", seen).split())
    for name in names if width == 40 or command[0] != "fed" else ():
        assert name in flat
    assert (width == 40) == (not set("┃│") & set(seen)) or command[-1] == "--all"


def test_the_short_answer_of_fed_list_fits_on_a_screen() -> None:
    seen = CliRunner().invoke(main.app, ["fed", "list"], env={"COLUMNS": "80"}).output
    assert len(seen.splitlines()) < 40 and "44 algorithms" in seen


def test_what_is_left_of_the_width_goes_where_it_is_needed() -> None:
    assert share_width([(3, 5), (4, 40)], 30) == [4, 26]
    assert share_width([(3, 5), (4, 6)], 30) == [5, 6]


@pytest.mark.parametrize(("width", "bar"), [(40, 7), (80, 10), (140, 30)])
def test_a_bar_has_more_than_five_characters_and_no_line_is_wider(width: int, bar: int) -> None:
    screen = Console(width=width, force_terminal=True, record=True, file=StringIO())
    live = Live(screen)
    assert [c.bar_width for c in live.progress.columns if isinstance(c, BarColumn)] == [bar]
    for step in range(3):
        live.watch("reconstruct", 11 + step, 30, 3, 8, "model.layers.11.self_attn.q_proj")
    live.progress.update(live.blocks, figures="12,345 tok/s 0.5/0.6 GB")  # type: ignore[arg-type]
    screen.print(live.progress)
    line = screen.export_text().splitlines()[-1]
    assert len(line) <= width and "12/30" in line.replace("13/30", "12/30")
    assert line.count("━") + line.count("╸") + line.count("╺") >= bar - 1
    assert "reconstructing" in line


FIGURES: dict[str, Any] = {
    "blocks": 30, "done": 1, "of": 8, "layer": "", "tokens_per_second": 1234.5,
    "seconds_left": 250.0, "memory_bytes": 5e8, "peak_memory_bytes": 6e8,
}  # fmt: skip


def lines(width: int, *, verbose: bool = False) -> tuple[Lines, Console]:
    paper = Console(width=width, record=True, file=StringIO())
    return Lines(paper, verbose), paper


def test_without_a_terminal_each_block_is_one_line_with_the_time_left() -> None:
    shown, paper = lines(40)
    for block in (1, 2):
        for stage in ("collect", "mask", "advance", "done"):
            shown.show({**FIGURES, "stage": stage, "block": block})
    seen = paper.export_text().splitlines()
    assert seen == [
        f"block {block} of 30 done: 1,234 tokens/s, 0.50 GB, peak 0.60 GB, 4:10 left"
        for block in (1, 2)
    ]


def test_verbose_names_every_matrix() -> None:
    shown, paper = lines(80, verbose=True)
    shown.watch("mask", 3, 30, 0, 7, "model.layers.3.self_attn.q_proj")
    assert paper.export_text() == "block 4: masking model.layers.3.self_attn.q_proj\n"


def test_cells_of_a_sweep_are_a_line_each_and_pieces_of_one_work_are_two() -> None:
    shown, paper = lines(80)
    for done, name in enumerate(["ria", "wanda", ""]):
        shown.begin(done, 2, name)
    assert paper.export_text().splitlines() == ["1 of 2: ria", "2 of 2: wanda", "2 of 2 done"]
    shown, paper = lines(80)
    for done in range(51):
        shown.begin(done, 50, "packing")
    assert paper.export_text().splitlines() == ["1 of 50: packing", "50 of 50 done"]


def test_many_rounds_are_about_ten_lines() -> None:
    shown, paper = lines(80)
    for done in range(1001):
        shown.count("rounds", done, 1000, "loss 1.0")
    assert 10 <= len(paper.export_text().splitlines()) <= 12


@pytest.mark.parametrize(("seconds", "said"), [(0, "0:00"), (65.4, "1:05"), (7450, "2:04:10")])
def test_times_are_said_as_a_clock_shows_them(seconds: float, said: str) -> None:
    assert say_time(seconds) == said


def test_quiet_leaves_the_result(tiny_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        console.speak(quiet=True)
        with console.display() as shown:
            shown.tell("Loading")
        assert capfd.readouterr().err == ""
        console.speak()
        with console.display() as shown:
            shown.tell("Loading")
        assert capfd.readouterr().err == "Loading\n"
    finally:
        console.speak()


SAID = """
from symprune.cli import console

with console.display() as shown:
    shown.tell("Reading a model")
    shown.progress.refresh()
console.complain("there is none")
"""


def in_a_terminal(**variables: str) -> str:
    """What a terminal is sent."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **variables}
    command = [sys.executable, "-c", SAID]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        try:
            while part := os.read(ours, 65536):
                seen += part
        except OSError:  # how a terminal says that nobody writes to it any more
            pass
        process.wait()
    os.close(ours)
    return seen.decode()


def test_no_color_leaves_no_colour_and_a_terminal_spins() -> None:
    colour = r"\x1b\[[\d;]*\b(3[0-8]|9[0-7])(;[\d;]*)?m"
    plain = in_a_terminal(NO_COLOR="1")
    assert "Reading a model" in plain and set(plain) & set("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
    assert "there is none" in plain and not re.search(colour, plain)
    coloured = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    assert "NO_COLOR" in os.environ or re.search(colour, in_a_terminal(**coloured))
