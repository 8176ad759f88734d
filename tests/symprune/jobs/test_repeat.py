"""A run is done again from its card, to the same bytes, or it is said what is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from symprune import Recipe
from symprune.checkpoint import packed
from symprune.checkpoint.verify import verify
from symprune.cli import main
from symprune.errors import SympruneError
from symprune.jobs import pruning
from symprune.jobs.sharing.repeat import Source, compare, plan_job
from symprune.machine import checksums
from symprune.models.hub import Access


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dense model that has a card, a text, and what was pruned from both."""
    here = tmp_path_factory.mktemp("made")
    shutil.copytree(tiny_folder, here / "dense")
    (here / "dense" / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    (here / "dense" / "LICENSE").write_text("Permission is granted")
    (here / "mine.txt").write_text(Path(__file__).read_text() * 3)
    recipe = Recipe("wanda", calibration=str(here / "mine.txt"), nsamples=4, seqlen=32)
    job = pruning.Job(
        str(here / "dense"), recipe, here / "out", eval_data="builtin", eval_windows=2
    )
    pruning.prune(job)
    return here


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def repeat(source: Path, output: Path, **options: object) -> None:
    pruning.prune(plan_job(Source.find(str(source), Access()), output=output, **options))  # type: ignore[arg-type]


def test_the_output_has_a_card_and_the_licence(made: Path) -> None:
    card = (made / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n") and "# dense: wanda, 50 % per row" in card
    assert (made / "out" / "LICENSE").read_text() == "Permission is granted"
    assert {"README.md", "LICENSE"} <= (checksums.read_checksums(made / "out") or {}).keys()


def test_a_folder_is_repeated_to_the_byte(made: Path, tmp_path: Path) -> None:
    repeat(made / "out", tmp_path / "again")
    assert files(tmp_path / "again") == files(made / "out")
    found = compare(Source.find(str(made / "out"), Access()), tmp_path / "again")
    assert found.files == len(files(made / "out")) - 1 and not found.others and not found.why_not


def test_a_card_alone_repeats_the_weights_wherever_the_files_are(
    made: Path, tmp_path: Path
) -> None:
    shutil.copyfile(made / "out" / "README.md", tmp_path / "README.md")
    shutil.copyfile(made / "mine.txt", tmp_path / "other-name.txt")
    card, text = tmp_path / "README.md", tmp_path / "other-name.txt"
    with pytest.raises(SympruneError, match=r"base model dense is not here: say with --model"):
        repeat(card, tmp_path / "again", texts=[text])
    with pytest.raises(SympruneError, match=r"calibration text mine\.txt .* is not at .*--text"):
        repeat(card, tmp_path / "again", model=str(made / "dense"))
    repeat(card, tmp_path / "again", model=str(made / "dense"), texts=[text])
    again, out = files(tmp_path / "again"), files(made / "out")
    differing = {name for name in out if again[name] != out[name]}
    assert differing == {"symprune.json", "README.md", "checksums.json"}


def test_a_text_of_the_same_name_is_not_taken_for_the_one_that_was_read(
    made: Path, tmp_path: Path
) -> None:
    other = tmp_path / "mine.txt"
    other.write_text("another text " * 500)
    with pytest.raises(SympruneError, match=r"is not the calibration text mine\.txt"):
        repeat(made / "out", tmp_path / "again", texts=[other])
    assert not (tmp_path / "again").exists()


def test_tokens_that_are_others_are_refused_before_any_work(made: Path, tmp_path: Path) -> None:
    card = (made / "out" / "README.md").read_text()
    place = card.index("tokens: ") + len("tokens: ")
    (tmp_path / "README.md").write_text(f"{card[:place]}'{'0' * 16}'{card[place + 16 :]}")
    with pytest.raises(SympruneError, match="gives other tokens"):
        repeat(
            tmp_path / "README.md", tmp_path / "again",
            model=str(made / "dense"), texts=[made / "mine.txt"],
        )  # fmt: skip
    assert not (tmp_path / "again").exists()


def test_refined_masks_are_repeated_from_the_same_masks(made: Path, tmp_path: Path) -> None:
    recipe = pruning.recipe_of(made / "out").with_changes(refine="swap")
    job = pruning.Job(
        str(made / "dense"), recipe, tmp_path / "refined", evaluate=False, masks=made / "out"
    )
    pruning.prune(job)
    repeat(tmp_path / "refined", tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "refined")


def test_a_packed_folder_has_a_card_of_its_form(made: Path, tmp_path: Path) -> None:
    packed.pack(made / "out", tmp_path / "packed")
    assert "import symprune" in (tmp_path / "packed" / "README.md").read_text()
    packed.unpack(tmp_path / "packed", tmp_path / "plain")
    assert files(tmp_path / "plain") == files(made / "out")
    found = compare(Source.find(str(tmp_path / "packed"), Access()), tmp_path / "plain")
    assert found.why_not and "symprune pack" in found.why_not


def test_who_edits_the_card_damages_nothing(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "edited"
    shutil.copytree(made / "out", folder)
    (folder / "README.md").write_text("# Mine")
    verdict = verify(folder)
    assert verdict.is_whole and verdict.named(checksums.EDITED) == ["README.md"]
    packed.pack(folder, tmp_path / "packed")
    assert (tmp_path / "packed" / "README.md").read_text() == "# Mine"


def test_the_command_says_whether_the_bytes_are_the_same(made: Path, tmp_path: Path) -> None:
    def run(output: Path) -> str:
        asked = ["repeat", str(made / "out"), "-o", str(output), "--device", "cpu"]
        return CliRunner().invoke(main.app, asked, catch_exceptions=False).output

    assert f"all {len(files(made / 'out')) - 1} files" in run(tmp_path / "again")
    config = made / "dense" / "generation_config.json"
    before = config.read_text()
    config.write_text(before.replace("{", '{"max_length": 7,', 1))
    try:
        said = run(tmp_path / "changed")
    finally:
        config.write_text(before)
    assert "same weights and masks" in said and "generation_config.json differs" in said
