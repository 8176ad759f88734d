"""Windows begin with BOS where a model needs it, and nowhere else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import torch.nn.functional as F
from stopping import stop_at
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig
from typer.testing import CliRunner

from symprune import MaskSet, Recipe, calibration
from symprune.checkpoint.streamed_model import StreamedModel
from symprune.checkpoint.tensor_files import Shards
from symprune.cli import main
from symprune.engine import walk
from symprune.engine.text import bos
from symprune.engine.text.bos import Bos
from symprune.errors import SympruneError
from symprune.eval.perplexity import cut, perplexity
from symprune.fed.pruning import job as fed_job
from symprune.fed.pruning import remote
from symprune.jobs import pruning, streamed_perplexity
from symprune.jobs.sweep import Grid, Sweep
from symprune.models import hub

BOS = 1
RECIPE = Recipe(calibration=__file__, nsamples=3, seqlen=16)
SMALL = ["--calibration", __file__, "--nsamples", "3", "--seqlen", "16"]
MEASURED = ["--eval-data", __file__, "--eval-windows", "4"]


def encoded(text: str = "train") -> Tensor:
    """The built-in text without BOS."""
    return calibration.encode(families.tokenizer(), calibration.text("builtin", text)[:20_000])


@pytest.fixture(scope="module")
def needing() -> Any:
    """A model that knows the text behind BOS and is at a loss without: trained for a moment to
    predict text in the first case and every token alike in the second."""
    config = MistralConfig(**{**families.SMALL, "num_hidden_layers": 2}, sliding_window=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids, chance = encoded(), torch.Generator().manual_seed(0)
    for _ in range(150):
        starts = torch.randint(0, len(ids) - 32, (16,), generator=chance).tolist()
        plain = torch.stack([ids[start : start + 32] for start in starts])
        begun = calibration.begin_with(plain, BOS)
        with_it = model(input_ids=begun).logits[:, :-1].flatten(0, 1)
        without = model(input_ids=plain).logits[:, :-1].flatten(0, 1)
        at_a_loss = F.log_softmax(without, dim=-1).mean(dim=-1)
        loss = F.cross_entropy(with_it, begun[:, 1:].flatten()) - at_a_loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folder(needing: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("needing") / "dense"
    needing.save_pretrained(path)
    families.tokenizer(begins=True).save_pretrained(path)
    return path


def copy_of(model: Any) -> Any:
    made = AutoModelForCausalLM.from_config(model.config).eval()
    made.load_state_dict(model.state_dict())
    return made


def symprune(*arguments: str | Path) -> str:
    result = CliRunner().invoke(main.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_window_keeps_its_length_and_never_begins_twice() -> None:
    windows = torch.tensor([[5, 6, 7, 8], [BOS, 5, 6, 7]])
    begun = calibration.begin_with(windows, BOS)
    assert begun.tolist() == [[BOS, 5, 6, 7], [BOS, 5, 6, 7]]
    assert calibration.begin_with(windows, None) is windows
    with pytest.raises(SympruneError, match="no room for BOS"):
        calibration.begin_with(windows[:, :1], BOS)


def test_evaluation_leaves_out_no_token_of_the_text() -> None:
    text = torch.arange(10, 20)
    assert cut(text, 4, bos=BOS).tolist() == [[BOS, n, n + 1, n + 2] for n in (10, 13, 16)]
    own = torch.cat([torch.tensor([BOS]), text])
    assert torch.equal(cut(own, 4, bos=BOS), cut(text, 4, bos=BOS))
    assert cut(text, 4, 2, bos=BOS).shape == (2, 4)
    with pytest.raises(SympruneError, match="2 tokens, too few for one window of 4"):
        cut(text[:2], 4, bos=BOS)


def test_bos_is_context_and_is_not_predicted() -> None:
    model, ids = families.model(), families.tokens(1, 40).flatten()
    losses = []
    for start in range(0, 35, 7):
        window = torch.cat([torch.tensor([BOS]), ids[start : start + 7]])
        logits = model(input_ids=window[None]).logits[0, :-1]
        losses += F.cross_entropy(logits, window[1:], reduction="none").tolist()
    found = perplexity(model, ids, seqlen=8, bos=BOS)
    assert found.windows == 5 and len(losses) == 5 * (found.seqlen - 1)
    assert found.nll == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_it_is_used_where_the_tokenizer_adds_it_and_the_model_needs_it(needing: Any) -> None:
    def decided(setting: str, model: Any, begins: bool) -> Bos:
        losses = bos.in_memory(model)
        return bos.decide(setting, families.tokenizer(begins), model.config, losses)

    found = decided("auto", needing, begins=True)
    assert found.token == BOS and found.loss_without is not None and found.loss_with is not None
    assert found.loss_without - found.loss_with > bos.MARGIN
    assert "without" in found.notes[0] and f"{found.loss_with:.3f}" in found.notes[0]
    assert decided("auto", needing, begins=False).token is None
    careless = decided("auto", families.model("mistral"), begins=True)
    assert careless.token is None and careless.loss_with is not None and not careless.notes
    assert decided("never", needing, begins=True).token is None
    assert decided("always", families.model("mistral"), begins=False).token == BOS


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_families_with_published_tables_are_left_as_they_were_published(
    family: str, tmp_path: Path
) -> None:
    """By name: the loss is not even looked at. The bits are those of windows without BOS."""
    model, tokenizer = families.model(family), families.tokenizer(begins=True)

    def unasked(*_: Any) -> list[float]:
        raise AssertionError("measured")

    assert bos.decide("auto", tokenizer, model.config, unasked).token is None
    model.save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    job = pruning.Job(str(tmp_path / "dense"), RECIPE, tmp_path / "out", eval_data=__file__)
    record = pruning.prune(replace(job, eval_windows=4))
    tokens = calibration.calibration_tokens(__file__, tokenizer, 3, 16, 0)
    walk.prune(model, tokens, RECIPE)
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(value, pruned[name]) for name, value in model.state_dict().items())
    ids = calibration.encode(tokenizer, Path(__file__).read_text())
    losses = []
    with torch.no_grad():
        for row in ids[:64].view(4, 16):
            logits = model(input_ids=row[None]).logits[0, :-1]
            losses.append(float(F.cross_entropy(logits, row[1:])))
    assert record["perplexity"][0]["pruned"] == math.exp(sum(losses) / 4)


def test_a_model_on_disk_is_measured_as_one_in_memory(needing: Any, folder: Path) -> None:
    streamed = StreamedModel(Shards(folder), hub.load_config(hub.resolve(str(folder))))
    tokenizer = families.tokenizer(begins=True)
    on_disk, loaded = (
        bos.decide("auto", tokenizer, needing.config, losses)
        for losses in (streamed_perplexity.losses_of(streamed), bos.in_memory(needing))
    )
    assert on_disk == loaded


def test_the_command_calibrates_and_evaluates_with_it_and_says_so(
    needing: Any, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shown = symprune("prune", "--model", folder, *SMALL, *MEASURED, "--output", out)
    assert "begins with BOS" in " ".join(shown.split())
    record = json.loads((out / "symprune.json").read_text())
    assert record["recipe"]["bos"] == "auto" and record["bos"]["token"] == BOS
    tokenizer = families.tokenizer(begins=True)
    tokens = calibration.calibration_tokens(__file__, tokenizer, 3, 16, 0)
    by_hand = copy_of(needing)
    masks = walk.prune(by_hand, calibration.begin_with(tokens, BOS), RECIPE).masks
    assert all(torch.equal(MaskSet.load(out)[name], keep) for name, keep in masks.items())
    ids = calibration.encode(tokenizer, Path(__file__).read_text())
    expected = [perplexity(m, ids, 16, 4, bos=BOS).perplexity for m in (needing, by_hand)]
    measured = record["perplexity"][0]
    assert [measured["dense"], measured["pruned"]] == expected
    assert perplexity(needing, ids, 16, 4).perplexity > 1.5 * expected[0]


def test_the_library_does_the_same_with_a_tokenizer_and_adds_nothing_to_tokens(
    needing: Any,
) -> None:
    tokenizer = families.tokenizer(begins=True)
    report = walk.prune(copy_of(needing), tokenizer, RECIPE)
    assert report.bos is not None and report.bos.token == BOS and report.notes
    tokens = calibration.calibration_tokens(__file__, tokenizer, 3, 16, 0)
    begun = walk.prune(copy_of(needing), calibration.begin_with(tokens, BOS), RECIPE)
    plain = walk.prune(copy_of(needing), tokens, RECIPE)
    assert begun.bos is None and plain.bos is None
    assert all(torch.equal(report.masks[name], keep) for name, keep in begun.masks.items())
    assert any(not torch.equal(report.masks[name], keep) for name, keep in plain.masks.items())


def test_a_run_that_goes_on_does_not_ask_again_and_ends_with_the_same_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = pruning.Job(str(folder), RECIPE, tmp_path / "whole", eval_data=__file__, eval_windows=2)
    pruning.prune(job)
    job = replace(job, output=tmp_path / "out")

    with pytest.raises(KeyboardInterrupt):
        pruning.prune(job, show=stop_at(2))
    with pytest.raises(SympruneError, match=r"differs in recipe\.bos \(auto, now never\)"):
        pruning.prune(replace(job, recipe=RECIPE.with_changes(bos="never")))
    monkeypatch.setattr(bos, "decide", lambda *_: pytest.fail("asked again"))
    pruning.prune(job)
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_eval_does_what_was_done_when_the_model_was_pruned(folder: Path, tmp_path: Path) -> None:
    """Even if the pruned model would not ask for it."""
    out, found = tmp_path / "out", tmp_path / "found.json"
    never = ["--bos", "never"]
    symprune("prune", "--model", folder, *SMALL, *MEASURED, "--output", out, *never)
    record = json.loads((out / "symprune.json").read_text())["perplexity"][0]
    evaluate = ["eval", "--data", __file__, "--seqlen", "16", "--windows", "4", "--json", found]
    symprune(*evaluate, "--model", out)
    assert json.loads(found.read_text())["perplexity"] == record["pruned"]
    symprune(*evaluate, "--model", out, "--bos", "always")
    assert json.loads(found.read_text())["perplexity"] != record["pruned"]
    symprune(*evaluate, "--model", folder)
    measured = json.loads(found.read_text())
    assert measured["bos"]["token"] == BOS and measured["perplexity"] < record["dense"]


def test_a_sweep_decides_once_for_all_its_cells(needing: Any, tmp_path: Path) -> None:
    tokenizer, shared = families.tokenizer(begins=True), {"nsamples": 3, "seqlen": 16}
    shared |= {"calibration": __file__, "eval_data": __file__, "eval_windows": 4}
    found = {}
    for setting in ("auto", "always", "never"):
        grid = Grid.from_dict({**shared, "methods": ["wanda"], "bos": setting})
        [found[setting]] = Sweep(copy_of(needing), tokenizer, "m", grid, tmp_path / "r.jsonl").run()
    assert found["auto"]["perplexity"] == found["always"]["perplexity"]
    assert found["auto"]["dense"] < found["never"]["dense"]
    assert found["auto"]["bos"]["token"] == BOS


def test_federated_masks_are_those_of_one_machine(folder: Path, tmp_path: Path) -> None:
    one = pruning.Job(str(folder), RECIPE, tmp_path / "central", eval_data=__file__, eval_windows=4)
    central = pruning.prune(one)
    job = fed_job.PruningJob(
        str(folder), RECIPE, clients=2, output=tmp_path / "fed", eval_data=(__file__,)
    )
    record = fed_job.prune(replace(job, eval_windows=4))
    assert record["bos"] == central["bos"] and record["bos"]["token"] == BOS
    for mine, theirs in zip(record["perplexity"], central["perplexity"], strict=True):
        assert mine["pruned"] == theirs["pruned"]
    masks = [MaskSet.load(tmp_path / name) for name in ("central", "fed")]
    assert all(torch.equal(masks[1][name], keep) for name, keep in masks[0].items())


def test_a_client_on_its_own_machine_decides_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = remote.NodeSettings(str(folder), __file__, nsamples=3, seqlen=16)
    tokens = settings.load(tmp_path / "node")[1]
    assert tokens[:, 0].tolist() == [BOS] * 3
    with monkeypatch.context() as patch:
        patch.setattr(bos, "decide", lambda *_: pytest.fail("asked again"))
        assert torch.equal(settings.load(tmp_path / "node")[1], tokens)
    plain = replace(settings, bos="never").load(tmp_path / "node")[1]
    assert plain[:, 0].tolist() != [BOS] * 3


def test_what_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SympruneError, match="bos must be one of auto, always, never, not 'yes'"):
        Recipe(bos="yes")
    tokenizer = families.tokenizer()
    tokenizer.bos_token = None
    with pytest.raises(SympruneError, match="no BOS token"):
        walk.prune(families.model(), tokenizer, RECIPE.with_changes(bos="always"))
