"""Models are computed in a type the processor is fast in, and written in the one they came in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file
from stopping import stop_at
from torch import Tensor, nn
from typer.testing import CliRunner

from symprune import MaskSet, Recipe, calibration
from symprune.checkpoint import resume
from symprune.checkpoint.load import load, load_model
from symprune.cli import main
from symprune.engine import forward, walk
from symprune.engine.blocks import Blocks
from symprune.errors import SympruneError
from symprune.eval.perplexity import perplexity
from symprune.fed.owner.policy import Policy
from symprune.fed.pruning import job as fed_job
from symprune.fed.pruning import remote
from symprune.fed.remote.transport import LocalTransport, Node
from symprune.jobs import pruning
from symprune.jobs.sweep import Grid, Sweep
from symprune.machine import compute
from symprune.models import hub
from symprune.models.layout import find_layout

CPU = torch.device("cpu")
RECIPE = Recipe(method="wanda", calibration=__file__, nsamples=3, seqlen=16)
FITTED = RECIPE.with_changes(update="lsq")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without instructions for 16-bit numbers."""
    monkeypatch.setattr(compute, "cpu_features", lambda: frozenset({"avx512f"}))


def save(folder: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
    families.model(family).to(dtype).save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    return folder


def loaded(folder: Path, dtype: str = "auto") -> Any:
    return load_model(hub.resolve(str(folder)), dtype).eval()


def widened(folder: Path) -> Any:
    """The model in fp32, with the constants it has in the type it is stored in."""
    model = loaded(folder)
    compute.cast(model, model.dtype, torch.float32)
    return model


def tokens() -> Tensor:
    return calibration.calibration_tokens(__file__, families.tokenizer(), 3, 16, 0)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_auto_is_fp32_where_a_cpu_has_no_instructions_for_the_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def picked(features: set[str], stored: torch.dtype, device: str = "cpu") -> torch.dtype:
        monkeypatch.setattr(compute, "cpu_features", lambda: frozenset(features))
        return compute.pick("auto", stored, torch.device(device))

    for has in ("avx512_bf16", "amx_bf16", "bf16"):
        assert picked({"fma", has}, torch.bfloat16) == torch.bfloat16
        assert picked({"fma", has}, torch.float16) == torch.float32
    assert picked({"avx512f"}, torch.bfloat16) == torch.float32
    assert picked({"avx512_fp16"}, torch.float16) == torch.float16
    assert picked(set(), torch.float32) == torch.float32
    assert picked(set(), torch.bfloat16, "cuda") == torch.bfloat16
    assert compute.pick("float16", torch.bfloat16, CPU) == torch.float16
    with pytest.raises(SympruneError, match="compute-dtype must be one of auto, float32"):
        compute.pick("int8", torch.bfloat16, CPU)


def test_what_the_system_says_of_a_cpu_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("model name\t: Some CPU\nflags\t\t: fpu avx512f avx512_bf16\nbugs\t: bf16\n")
    assert compute.cpu_features(file) == {"fpu", "avx512f", "avx512_bf16"}
    arm = tmp_path / "arm"
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert "bf16" in compute.cpu_features(arm)
    assert compute.cpu_features(tmp_path / "none") == frozenset()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt", "mixtral"])
def test_blocks_are_computed_in_fp32_and_written_as_they_were_stored(
    family: str, tmp_path: Path, slow: None
) -> None:
    """Masks and perplexities are those of the model in fp32, to the bit; weights stay in bf16."""
    dense = save(tmp_path / "dense", family)
    told: list[str] = []
    job = pruning.Job(str(dense), RECIPE, tmp_path / "out", eval_data=__file__, eval_windows=2)
    record = pruning.prune(job, told.append)
    assert record["dtype"] == "bfloat16" and record["compute_dtype"] == "float32"
    assert any(
        line.startswith("Computing in float32, since this CPU has no instructions for bfloat16: ")
        and "MB for a block" in line
        for line in told
    )
    model = widened(dense)
    ids = calibration.encode(families.tokenizer(), Path(__file__).read_text())
    with forward.ready(model):
        before = perplexity(model, ids, 16, 2).perplexity
    report = walk.prune(model, tokens(), RECIPE)
    with forward.ready(model):
        after = perplexity(model, ids, 16, 2).perplexity
    measured = record["perplexity"][0]
    assert (measured["dense"], measured["pruned"]) == (before, after)
    masks, written = MaskSet.load(tmp_path / "out"), loaded(tmp_path / "out")
    assert all(torch.equal(masks[name], keep) for name, keep in report.masks.items())
    stored = dict(loaded(dense).named_parameters())
    for name, parameter in written.named_parameters():
        kept = masks[name] if name in masks else torch.ones_like(parameter, dtype=torch.bool)
        assert parameter.dtype == torch.bfloat16, name
        assert torch.equal(parameter, stored[name] * kept), name


def test_the_memory_said_is_that_of_a_block_in_the_type_it_is_computed_in(tmp_path: Path) -> None:
    config = families.config("llama")
    config.hidden_size, config.intermediate_size = 128, 512
    torch.manual_seed(0)
    dense = tmp_path / "dense"
    model = hub.auto_class(config).from_config(config).to(torch.bfloat16)
    model.save_pretrained(dense)
    families.tokenizer().save_pretrained(dense)
    numbers = sum(p.numel() for p in find_layout(model).blocks[0].parameters())
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        told: list[str] = []
        job = pruning.Job(str(dense), RECIPE, tmp_path / dtype, evaluate=False, compute_dtype=dtype)
        pruning.prune(job, told.append)
        assert any(f"{numbers * size / 1e6:.1f} MB for a block" in line for line in told)


def test_later_blocks_see_updated_weights_as_they_are_written(tmp_path: Path, slow: None) -> None:
    """Rounded to the stored type before the hidden states go on, or they would be of weights that
    nobody will have."""
    dense = save(tmp_path / "dense")
    pruning.prune(pruning.Job(str(dense), FITTED, tmp_path / "out", evaluate=False))
    rounded, exact = widened(dense), widened(dense)
    settings = {"held_out": calibration.held_out_tokens(__file__, families.tokenizer(), 3, 16, 0)}
    blocks = Blocks(find_layout(rounded), stored=torch.bfloat16)
    walk.prune(rounded, tokens(), FITTED, blocks=blocks, **settings)  # type: ignore[arg-type]
    walk.prune(exact, tokens(), FITTED, **settings)  # type: ignore[arg-type]
    written = weights(tmp_path / "out")
    by_hand = rounded.state_dict()
    assert all(torch.equal(value.float(), by_hand[name]) for name, value in written.items())
    others = exact.to(torch.bfloat16).state_dict()
    assert any(not torch.equal(value, others[name]) for name, value in written.items())


@pytest.mark.parametrize("recipe", [RECIPE, FITTED])
@pytest.mark.parametrize("compute_dtype", ["float32", "float16"])
def test_a_run_that_goes_on_ends_with_the_same_bytes(
    recipe: Recipe, compute_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without hidden states kept: they pass again through blocks as they were written."""
    monkeypatch.setattr(resume.HiddenStates, "due", lambda _: False)
    dense = save(tmp_path / "dense")
    job = pruning.Job(str(dense), recipe, tmp_path / "whole", evaluate=False)
    job = replace(job, compute_dtype=compute_dtype)
    pruning.prune(job)
    job = replace(job, output=tmp_path / "out")

    with pytest.raises(KeyboardInterrupt):
        pruning.prune(job, show=stop_at(2))
    said = rf"differs in compute_dtype \({compute_dtype}, now bfloat16\)"
    with pytest.raises(SympruneError, match=said):
        pruning.prune(replace(job, compute_dtype="bfloat16"))
    pruning.prune(job)
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_weights_computed_with_fewer_digits_keep_those_they_have(
    family: str, tmp_path: Path
) -> None:
    dense = save(tmp_path / "dense", family, torch.float32)
    job = pruning.Job(
        str(dense), RECIPE, tmp_path / "out", evaluate=False, compute_dtype="bfloat16"
    )
    pruning.prune(job)
    masks = walk.prune(loaded(dense, "bfloat16"), tokens(), RECIPE).masks
    before, after = loaded(dense).state_dict(), loaded(tmp_path / "out").state_dict()
    for name, value in after.items():
        kept = masks[name] if name in masks else torch.ones_like(value, dtype=torch.bool)
        assert torch.equal(value, before[name] * kept), name


def test_what_a_model_has_in_fp32_by_design_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    model[1].float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    turned = compute.cast(model, torch.bfloat16, torch.float32)
    assert set(turned) == {"0.weight", "0.bias"}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    compute.restore(model, turned)
    after = model.state_dict()
    assert all(torch.equal(v, after[n]) and v.dtype == after[n].dtype for n, v in before.items())


def test_the_library_computes_in_the_type_a_model_has(slow: None) -> None:
    model, kinds = families.model().to(torch.bfloat16), set()
    block = find_layout(model).blocks[0]
    block.register_forward_pre_hook(lambda _, args: kinds.add(args[0].dtype))
    walk.prune(model, families.tokens(), RECIPE)
    assert kinds == {torch.bfloat16}


def test_a_model_that_is_loaded_as_a_whole_is_the_one_on_disk(tmp_path: Path, slow: None) -> None:
    assert load(save(tmp_path / "dense")).dtype == torch.bfloat16


def test_eval_and_sweep_compute_in_it_too(tmp_path: Path, slow: None) -> None:
    dense, found = save(tmp_path / "dense"), tmp_path / "found.json"
    arguments = ["eval", "--model", dense, "--data", __file__, "--seqlen", 16, "--windows", 2]
    for asked, dtype in (("auto", "float32"), ("bfloat16", "bfloat16")):
        given = [*arguments, "--compute-dtype", asked, "--json", found]
        CliRunner().invoke(main.app, [str(a) for a in given], catch_exceptions=False)
        record = json.loads(found.read_text())
        ids = calibration.encode(families.tokenizer(), Path(__file__).read_text())
        assert record["compute_dtype"] == dtype
        with torch.no_grad():
            expected = perplexity(loaded(dense, dtype), ids, 16, 2).perplexity
        assert record["perplexity"] == expected
    grid = Grid.from_dict(
        {"methods": ["wanda"], "updates": ["lsq"], "calibration": __file__, "eval_data": __file__}
        | {"nsamples": 3, "seqlen": 16, "eval_windows": 2}
    )
    (tmp_path / "grid.yaml").write_text(json.dumps(vars(grid)))
    job = pruning.Job(str(dense), FITTED, tmp_path / "out", eval_data=__file__, eval_windows=2)
    record = pruning.prune(job)
    given = ["sweep", "--model", dense, "--grid", tmp_path / "grid.yaml"]
    given += ["--output", tmp_path / "r.jsonl"]
    CliRunner().invoke(main.app, [str(a) for a in given], catch_exceptions=False)
    cell = json.loads((tmp_path / "r.jsonl").read_text())
    assert cell["compute_dtype"] == "float32"
    assert cell["perplexity"] == record["perplexity"][0]["pruned"]


def test_cells_computed_in_another_type_are_other_cells(tmp_path: Path) -> None:
    grid = Grid.from_dict({"methods": ["wanda"]})
    [recipe] = grid.recipes()
    keys = {
        Sweep(families.model().to(dtype), None, "m", grid, tmp_path, torch.bfloat16).key(recipe)
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert len(keys) == 2


def test_federated_pruning_computes_in_it_and_writes_what_one_machine_writes(
    tmp_path: Path, slow: None
) -> None:
    dense = save(tmp_path / "dense")
    pruning.prune(pruning.Job(str(dense), RECIPE, tmp_path / "central", evaluate=False))
    job = fed_job.PruningJob(str(dense), RECIPE, clients=2, output=tmp_path / "fed", evaluate=False)
    record = fed_job.prune(job)
    assert record["dtype"] == "bfloat16" and record["compute_dtype"] == "float32"
    central, federated = weights(tmp_path / "central"), weights(tmp_path / "fed")
    assert all(torch.equal(value, federated[name]) for name, value in central.items())
    sizes = sum(layer["rows"] * layer["columns"] for layer in record["layers"])
    assert record["federated"]["traffic"]["weights_bytes"] == 2 * 2 * sizes  # 2 bytes, 2 clients
    with pytest.raises(SympruneError, match=r"compute in bfloat16 or float32, not in float16"):
        fed_job.prune(replace(job, compute_dtype="float16", output=tmp_path / "other"))


def test_machines_that_compute_in_different_types_have_the_same_model(tmp_path: Path) -> None:
    dense, policy = save(tmp_path / "dense"), tmp_path / "policy.yaml"
    Policy(protection="plain").save(policy)
    task = remote.Task(str(dense), RECIPE.with_changes(calibration="federated"), 2)

    class Mixed(LocalTransport):
        def node(self, number: int) -> Node:
            own = {"model": str(dense), "text": __file__, "nsamples": 2, "seqlen": 16}
            own |= {"policy": str(policy), "allow_few_tokens": True}
            own["compute_dtype"] = ("float32", "bfloat16")[number]
            return replace(super().node(number), config=own)

    result = remote.serve(task, Mixed(remote.answer, 2, tmp_path), tmp_path / "server")
    assert result.clients_left == [0, 1]
    written = weights(tmp_path / "server" / "model")
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
