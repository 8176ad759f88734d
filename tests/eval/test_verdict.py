"""One sentence of what a run came to, what to do next, and its samples, from the record alone."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from fuzzing import EXAMPLES, fuzz
from fuzzing import changed as damaged
from rich.console import Console

from symprune.eval import samples, verdict
from symprune.eval.report import samples as section

RECORD: dict[str, Any] = {
    "model": "my model",
    "origin": "tiny",
    "dtype": "bfloat16",
    "sparsity": 0.5,
    "recipe": {"sparsity": 0.5, "pattern": None, "values": None, "values_head": None},
    "perplexity": [{"data": "builtin", "dense": 36.02, "pruned": 58.31}],
    "dense_bytes": 1000,
    "pruned_bytes": 560,
    "samples": [
        {
            "prompt": "The capital",
            "continuations": [
                {"by": "dense", "text": " of France\n\nis Paris", "tokens": 6, "same": 6},
                {"by": "pruned", "text": " of <b>all</b> \x1b[31m", "tokens": 6, "same": 1},
            ],
        }
    ],
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**RECORD, **changes}


def test_a_run_is_one_sentence() -> None:
    said = "Half the weights gone, perplexity 36.0 -> 58.3 (+62 %), 56 % of the file."
    assert verdict.verdict(RECORD) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": {"pattern": "2:4"}}, "Half the weights gone (2:4), "),
        ({"sparsity": 0.62504}, "62.5 % of the weights gone, "),
        ({"recipe": {"values": {"name": "int4"}}}, "Half the weights gone, the others in int4, "),
        ({"sparsity": 0, "recipe": {"values": "int4"}}, "All weights kept, in int4, "),
        ({"pruned_bytes": 1010}, "the file as large as before until it is packed."),
        ({"sparsity": 0.99996}, "99.996 % of the weights gone, "),
        ({"pruned_bytes": 1030}, "the file 3 % larger."),
        ({"pruned_bytes": 2700}, "the file 2.7 times as large."),
        ({"pruned_bytes": 2700, "origin": "a.gguf"}, "2.7 times the .gguf's size (bfloat16 now)."),
        ({"perplexity": []}, "Half the weights gone, 56 % of the file."),
    ],
)
def test_the_sentence_says_what_was_done(changes: dict[str, Any], said: str) -> None:
    assert said in verdict.verdict(changed(**changes))


def test_a_federated_run_says_what_went_over_the_wire() -> None:
    traffic = {"clients": 3, "bytes_up": 2000, "bytes_down": 1000, "weights_bytes": 100_000}
    said = verdict.verdict(changed(federated={"traffic": traffic}))
    assert said == (
        "Half the weights gone, perplexity 36.0 -> 58.3 (+62 %), 56 % of the file. 3 clients kept "
        "their text and exchanged 3.0 kB with the server, 3 % of what the weights would take."
    )


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (20.0, 20.5, "20.0 -> 20.5 (+2.5 %)"),
        (20.0, 19.0, "20.0 -> 19.0 (-5.0 %)"),
        (20.0, 20.005, "unchanged at 20.0"),
        (20.0, 19.98, "20.0 -> 20.0 (-0.1 %)"),
        (20.0, 41_000.0, "20.0 -> 41,000 (2,050 times)"),
        (20.0, math.inf, "20.0 -> inf"),
    ],
)
def test_a_change_is_told_in_the_digits_that_matter(before: float, after: float, said: str) -> None:
    assert verdict.change(before, after) == said


def test_the_next_steps_are_commands_with_the_names_there_are() -> None:
    commands = [command for command, _ in verdict.next_steps(RECORD, "out/my run")]
    assert commands == [
        "symprune pack 'out/my run' 'out/my run-packed'",
        "symprune bench 'my model' 'out/my run-packed'",
        "symprune report 'out/my run' -o 'my run.html'",
    ]
    packed = verdict.next_steps(changed(recipe={"values": {"name": "int4"}}), "run")
    assert next(command for command, _ in packed) == "symprune bench 'my model' run"


@pytest.mark.parametrize("width", [80, 40])
def test_samples_fit_the_terminal_and_cannot_steer_it(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    for each in samples.show(samples.read(RECORD), width):
        console.print(each)
    shown = console.export_text()
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    assert "is Paris" in shown and "the same for 1 of 6 tokens" in " ".join(shown.split())
    assert "\x1b" not in shown


def test_a_page_shows_samples_as_text() -> None:
    (page,) = section.sections(RECORD)
    assert "of &lt;b&gt;all&lt;/b&gt;" in page and "the same for 1 of 6 tokens" in page
    assert section.sections({}) == []


@EXAMPLES
def test_no_record_however_damaged_breaks_the_sentence(examples: int) -> None:
    def read(record: Any) -> None:
        if isinstance(record, dict):
            assert isinstance(verdict.verdict(record), str)
            assert all(command for command, _ in verdict.next_steps(record, "x"))
            assert len(section.sections(record)) <= 1

    fuzz(read, damaged(RECORD), examples)
