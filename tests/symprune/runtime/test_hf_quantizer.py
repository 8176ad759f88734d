"""Packed models in transformers: loaded, saved, generating; and sentences for what is no such."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import families
import packed_models
import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, pipeline

import symprune
from symprune.checkpoint.packed import pack
from symprune.errors import SympruneError
from symprune.eval.harness_model import HarnessModel
from symprune.runtime.layers import PackedModule, packed_parameters
from symprune.runtime.layout import VERSION
from symprune.runtime.unpack_model import unpack_model

MAIN = ("llama", "smollm", "gpt2", "mixtral", "qwen2", "gemma3")
FILE = "model.safetensors"


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(families.tokens(2, 12), use_cache=False).logits.float()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A packed model with a tokenizer, as transformers saves it."""
    made = tmp_path / "packed"
    packed_models.packed("smollm", "int4", around=True).save_pretrained(made)
    families.tokenizer().save_pretrained(made)
    return made


def change(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Other tensors in a folder's file, or none."""
    stored = {**load_file(folder / FILE), **changes}
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / FILE, {"format": "pt"})


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
@pytest.mark.parametrize("family", MAIN)
def test_a_saved_model_is_loaded_as_it_was(family: str, kind: str, tmp_path: Path) -> None:
    model = packed_models.packed(family, kind, around=True)
    model.save_pretrained(tmp_path)
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values())
    assert packed_parameters(loaded).keys() == packed_parameters(model).keys()
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("family", ["smollm", "mixtral", "gpt2"])
def test_a_dequantised_model_is_a_plain_one(family: str, tmp_path: Path) -> None:
    packed_models.packed(family, "float32", around=True).save_pretrained(tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").dequantize()
    assert not any(isinstance(module, PackedModule) for module in model.modules())
    assert torch.equal(logits(model), logits(packed_models.pruned(family)))
    model.save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert torch.equal(logits(plain), logits(model))
    for parameter in plain.parameters():
        parameter.requires_grad_()


def test_a_model_in_several_files_is_loaded_from_them(tmp_path: Path) -> None:
    model = packed_models.packed("llama", "int8")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_the_body_of_a_packed_model_is_loaded_without_its_head(folder: Path) -> None:
    whole, body = AutoModelForCausalLM.from_pretrained(folder), AutoModel.from_pretrained(folder)
    tokens = families.tokens(2, 8)
    with torch.no_grad():
        states = body(tokens).last_hidden_state
        assert torch.equal(whole.lm_head(states), whole(tokens).logits)


def test_a_device_map_places_packed_weights(folder: Path) -> None:
    for places in ("cpu", "auto", {"": "cpu"}):
        model = AutoModelForCausalLM.from_pretrained(folder, device_map=places)
        assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(folder)))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_model_computes_in_the_type_asked_for(folder: Path, name: str) -> None:
    dtype = getattr(torch, name)
    expected = logits(AutoModelForCausalLM.from_pretrained(folder))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    turned = AutoModelForCausalLM.from_pretrained(folder).to(dtype)
    for model in (loaded, turned, copy.deepcopy(turned)):
        assert model.dtype == model.model.embed_tokens.weight.dtype == dtype
        assert model.lm_head.packed is model.model.embed_tokens.packed
        assert (logits(model) - expected).norm() < 0.1 * expected.norm()
    assert AutoModelForCausalLM.from_pretrained(folder).half().dtype == torch.float16
    assert turned.float().dtype == torch.float32


def test_a_loaded_model_can_be_copied_and_kept_in_a_file_of_torch(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other.lm_head.packed is other.model.embed_tokens.packed
        assert torch.equal(logits(other), logits(model))


def test_pipelines_and_the_harness_take_a_packed_model(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    write = pipeline("text-generation", model=str(folder), tokenizer=tokenizer)
    assert isinstance(write.model.lm_head, PackedModule)
    told = write("if x", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    asked = tokenizer("if x", return_tensors="pt")
    made = model.generate(**asked, max_new_tokens=4, do_sample=False)
    assert told == tokenizer.decode(made[0], skip_special_tokens=True)
    harness = HarnessModel(model, tokenizer, 2)
    requests = [(("a", "b"), [5, 6, 7], [8, 9]), (("c", "d"), [5, 6], [8])]
    found = [score for score, _ in harness._loglikelihood_tokens(requests, disable_tqdm=True)]
    unpack_model(model)
    plain = HarnessModel(model, tokenizer, 2)
    expected = [score for score, _ in plain._loglikelihood_tokens(requests, disable_tqdm=True)]
    assert found == pytest.approx(expected, rel=0.05)


def test_lm_evals_own_model_class_takes_a_packed_folder(folder: Path) -> None:
    harness = HFLM(pretrained=str(folder), device="cpu", batch_size=2)
    assert isinstance(harness.model.lm_head, PackedModule)
    texts = [("if x", " while y"), ("lambda", " if"), ("while the", " value is x")]
    asked = [Instance("loglikelihood", {}, text, at) for at, text in enumerate(texts)]
    found = [score for score, _ in harness.loglikelihood(asked, disable_tqdm=True)]
    until = [Instance("generate_until", {}, ("if x", {"until": ["</s>"], "max_gen_toks": 4}), 0)]
    (written,) = harness.generate_until(until, disable_tqdm=True)
    unpack_model(harness.model)
    expected = [score for score, _ in harness.loglikelihood(asked, disable_tqdm=True)]
    assert found == pytest.approx(expected, rel=0.05) and found != expected
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = harness.tokenizer("if x", return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert written == harness.tokenizer.decode(made, skip_special_tokens=True)


def test_symprune_loads_packed_or_plain_as_asked(folder: Path) -> None:
    packed, plain = symprune.load(folder), symprune.load(folder, dequantize=True)
    assert packed_parameters(packed) and not packed_parameters(plain)
    apart = (logits(packed) - logits(plain)).norm(dim=-1) / logits(plain).norm(dim=-1)
    assert apart.median() < 0.05
    with pytest.raises(SympruneError, match=r"packed; model\.dequantize"):
        symprune.prune(packed, families.tokens(), symprune.Recipe("wanda"))
    symprune.prune(plain, families.tokens(), symprune.Recipe("wanda"))


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "gpt-oss", "zamba2", "gemma3n"])
def test_the_files_that_packing_writes_are_loaded(family: str, tmp_path: Path) -> None:
    model = packed_models.pruned(family)
    model.save_pretrained(tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    loaded, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "packed", output_loading_info=True
    )
    assert packed_parameters(loaded) and not any(told.values())
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", families.LOOKING)
def test_models_that_see_are_loaded_packed(family: str, tmp_path: Path) -> None:
    model = packed_models.prune_at_random(families.looking(family))
    model.save_pretrained(tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    loaded = symprune.load(tmp_path / "packed")
    assert packed_parameters(loaded)
    tokens = families.tokens(2, 8).clamp(max=90)
    with torch.no_grad():
        found, expected = loaded(input_ids=tokens).logits, model(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_other_formats_are_refused_in_a_sentence(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["format"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SympruneError, match="packed in format 1; this symprune reads format 2"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_damaged_files_are_refused_in_a_sentence_that_names_the_weights(folder: Path) -> None:
    stored = load_file(folder / FILE)
    name = "model.layers.1.mlp.up_proj.packed"
    damaged = stored[name].clone()
    damaged[120:180] = 255
    another = stored["model.layers.1.mlp.down_proj.packed"]
    newer = stored[name].clone()
    newer[8] = 9
    for blob, said in (
        (damaged, r"up_proj\.weight: A packed matrix is damaged"),
        (another, r"up_proj\.weight: It is \(32, 48\) where it is packed, \(48, 32\) in"),
        (newer, r"up_proj\.weight: This matrix is packed in version 9"),
        (None, r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"),
    ):
        change(folder, {name: blob})
        with pytest.raises(SympruneError, match=said):
            AutoModelForCausalLM.from_pretrained(folder)
    change(folder, {name: stored[name], "model.norm.weight": torch.ones(3)})
    with pytest.raises(
        SympruneError, match=r"norm\.weight is \(3,\) in the model's files, \(32,\)"
    ):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_plain_model_that_says_it_is_packed_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "symprune", "format": VERSION}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / FILE).write_bytes((tiny_folder / FILE).read_bytes())
    with pytest.raises(SympruneError, match="hold no packed weights"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def run_alone(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_without_symprune_transformers_stops_instead_of_making_up_weights(folder: Path) -> None:
    program = (
        "import sys; from transformers import AutoModelForCausalLM as Auto\n"
        f"Auto.from_pretrained({str(folder)!r}); print('loaded')"
    )
    found = run_alone(program)
    assert found.returncode != 0 and "loaded" not in found.stdout
    assert "got symprune" in found.stderr and "MISMATCH" in found.stderr


@pytest.mark.parametrize("first", ["symprune", "transformers.modeling_utils"])
def test_symprune_may_be_imported_before_or_after_transformers(folder: Path, first: str) -> None:
    program = (
        f"import sys, {first}\n"
        "import symprune, transformers\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})\n"
        "print(type(model.lm_head).__name__)"
    )
    assert run_alone(program).stdout.strip() == "PackedLinear"


def test_importing_symprune_imports_neither_torch_nor_transformers() -> None:
    program = "import sys, symprune; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert run_alone(program).stdout.strip() == "set()"
