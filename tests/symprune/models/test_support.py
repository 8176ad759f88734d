"""What can be pruned is told from a configuration, and what cannot in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import families
import huggingface_hub
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from symprune import MaskSet, Recipe
from symprune.cli import main
from symprune.engine import forward, walk
from symprune.engine.collect import collect
from symprune.errors import SympruneError
from symprune.jobs import pruning
from symprune.models import hub
from symprune.models.layout import find_layout
from symprune.models.support import auto_class, check_supported
from symprune.stats import SQUARE, Needs

REFUSED: dict[str, tuple[Any, str]] = {
    "t5": (hf.T5Config(), "encoder-decoder"),
    "bart": (hf.BartConfig(), "encoder-decoder"),
    "whisper": (hf.WhisperConfig(), "encoder-decoder"),
    "blip-2 around a T5": (hf.Blip2Config(text_config=hf.T5Config()), "encoder-decoder"),
    "bert": (hf.BertConfig(), "encoder: .* no perplexity"),
    "roberta": (hf.RobertaConfig(), "encoder: .* no perplexity"),
    "modernbert": (hf.ModernBertConfig(), "encoder: .* no perplexity"),
    "rwkv": (hf.RwkvConfig(), "halves the hidden states"),
    "xlnet": (hf.XLNetConfig(), "from both sides"),
    "zaya": (hf.ZayaConfig(), "the state of the router before it"),
    "vit": (hf.ViTConfig(), "not a language model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_pruned_is_refused_by_its_configuration_alone(
    name: str, tmp_path: Path
) -> None:
    """The folder has no weights and no tokenizer: nothing but the configuration can be read."""
    config, said = REFUSED[name]
    config.save_pretrained(tmp_path)
    with pytest.raises(SympruneError, match=said) as caught:
        hub.load_config(hub.resolve(str(tmp_path)))
    assert str(caught.value).count(".") == 1 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "command",
    ["prune", "refine --masks m", "eval", "sweep --grid grid.yaml", "fed prune --clients 2"],
)
def test_every_command_that_takes_a_model_refuses_it(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grid.yaml").write_text("methods: [wanda]\n")
    walk.prune(families.model(), families.tokens()).masks.save("m")
    hf.BertConfig().save_pretrained("bert")
    result = CliRunner().invoke(main.app, [*command.split(), "--model", "./bert"])
    assert isinstance(result.exception, SympruneError)
    assert "is an encoder" in str(result.exception)


def test_a_library_user_is_told_as_well() -> None:
    small = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
    with pytest.raises(SympruneError, match="encoder-decoder"):
        walk.prune(hf.T5ForConditionalGeneration(hf.T5Config(**small)), families.tokens())


def test_a_model_that_was_made_to_decode_is_not_refused() -> None:
    check_supported(hf.BertConfig(is_decoder=True))
    check_supported(hf.LlavaConfig())


@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_is_to_be_merged_into_the_model_it_names(
    with_config: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    if with_config:
        shutil.copy(tiny_folder / "config.json", tmp_path)
    adapter = {"base_model_name_or_path": "someone/base", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(SympruneError, match=r"adapter of someone/base; merge.*merge_and_unload"):
        hub.resolve(str(tmp_path))


def test_an_adapter_on_the_hub_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')

    def missing(*_: object, **__: object) -> None:
        raise OSError("someone/adapter does not appear to have a file named config.json.")

    monkeypatch.setattr(hf.AutoConfig, "from_pretrained", missing)
    download = {"adapter_config.json": str(tmp_path / "adapter_config.json")}
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, file, **__: download[file])
    with pytest.raises(SympruneError, match="adapter of someone/base"):
        hub.load_config(hub.resolve("someone/adapter"))
    download.clear()
    with pytest.raises(SympruneError, match="someone/adapter cannot be"):
        hub.load_config(hub.resolve("someone/adapter"))


def test_the_class_is_that_of_the_whole_checkpoint() -> None:
    """transformers' causal class of some vision-language models leaves the vision part out."""
    for config in (hf.LlamaConfig(), hf.Gemma3TextConfig(), hf.Gemma3Config()):
        assert auto_class(config) is hf.AutoModelForCausalLM
    for config in (hf.LlavaConfig(), hf.Qwen2VLConfig(), hf.Qwen3_5Config(), hf.Llama4Config()):
        assert auto_class(config) is hf.AutoModelForImageTextToText


def test_the_length_is_that_of_the_language_model_inside() -> None:
    inside = hf.LlamaConfig(**families.SMALL)
    assert hub.max_length(hf.LlavaConfig(text_config=inside)) == 64


UNPACKED: dict[str, Any] = {
    "bamba": lambda: hf.BambaConfig(
        **families.SMALL, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16,
        mamba_d_state=16, mamba_n_groups=1, mamba_chunk_size=8,
    ),
    "xlstm": lambda: hf.xLSTMConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, num_heads=4, chunk_size=8
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", UNPACKED)
def test_models_that_unpack_what_a_block_returns_are_measured_as_their_own_layers_are(
    family: str,
) -> None:
    """The inputs of all linear layers, against hooks on the model running as a whole."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(UNPACKED[family]()).eval()
    tokens, seen = families.tokens(), dict[str, Tensor]()
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}

    def see(name: str, x: Tensor) -> None:
        seen[name] = seen.get(name, 0) + x.detach().double().square().flatten(0, -2).sum(0)

    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0]))
        for name, layer in layers.items()
    ]
    for row in tokens:
        model(input_ids=row[None], use_cache=False)
    for handle in handles:
        handle.remove()
    measured = collected(model, tokens)
    assert len(measured) > 8
    for name, stats in measured.items():
        expected = seen[name.removesuffix(".weight")] / len(tokens)
        assert torch.allclose(stats.double() ** 2, expected, rtol=1e-5, atol=0), name


def collected(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """The input norms the walk measures in every linear layer of a model that stays dense."""
    layout, found = find_layout(model), dict[str, Tensor]()
    with forward.ready(model):
        activations = forward.embed(layout, tokens)
        for index, block in enumerate(layout.blocks):
            matrices = [m for m in layout.matrices(index) if m.piece is None]
            needs = Needs(frozenset({SQUARE}))
            take = activations.replace
            measured = collect(activations, index, block, matrices, needs, take=take)
            found |= {name: stats.norm for name, stats in measured.inputs.items()}
    return found


@pytest.mark.parametrize("family", UNPACKED)
def test_models_that_unpack_what_a_block_returns_are_pruned_on_disk_as_in_memory(
    family: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(UNPACKED[family]()).eval()
    model.save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")
    recipe = Recipe(calibration=__file__, nsamples=3, seqlen=16)
    job = pruning.Job(str(tmp_path / "dense"), recipe, tmp_path / "out", eval_data=__file__)
    record = pruning.prune(job)
    assert record["perplexity"][0]["dense"] > 1
    masks, written = walk.prune(model, families.tokenizer(), recipe).masks, tmp_path / "out"
    assert all(torch.equal(MaskSet.load(written)[name], keep) for name, keep in masks.items())


VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
MERGED = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
MARKS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92}
TURNS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
SEEING: dict[str, Any] = {
    "llava": lambda: hf.LlavaConfig(
        text_config=hf.LlamaConfig(**families.SMALL),
        vision_config=hf.CLIPVisionConfig(**VISION, intermediate_size=16, image_size=8),
        image_token_index=90,
    ),
    "qwen2-vl": lambda: hf.Qwen2VLConfig(
        text_config={**families.SMALL, "rope_parameters": TURNS},
        vision_config={**MERGED, "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
        **MARKS,
    ),
    "qwen2.5-vl": lambda: hf.Qwen2_5_VLConfig(
        text_config={**families.SMALL, "rope_parameters": TURNS},
        vision_config={
            **MERGED, "depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2,
            "intermediate_size": 16, "window_size": 16, "fullatt_block_indexes": [0],
        },
        **MARKS,
    ),
    "gemma3": lambda: hf.Gemma3Config(
        text_config={**families.WITH_HEAD_DIM, "sliding_window": 8},
        vision_config=hf.SiglipVisionConfig(**VISION, intermediate_size=16, image_size=8),
        mm_tokens_per_image=4, image_token_index=90, boi_token_index=91, eoi_token_index=92,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", SEEING)
def test_the_language_model_of_a_vision_language_model_is_pruned_and_the_rest_kept(
    family: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = SEEING[family]()
    model = auto_class(config).from_config(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "preprocessor_config.json").write_text("{}")
    recipe = Recipe(calibration=__file__, nsamples=3, seqlen=16)
    job = pruning.Job(str(tmp_path / "dense"), recipe, tmp_path / "out", eval_data=__file__)
    record = pruning.prune(job)
    assert record["sparsity"] == 0.5 and record["perplexity"][0]["dense"] > 1
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("dense", "out"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        inside = "layers." in name and "vision" not in name and value.dim() == 2
        assert torch.equal(value, after[name]) is not inside, name
        assert not inside or int((after[name] == 0).sum()) == value.numel() // 2, name
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == "{}"
    loaded = auto_class(config).from_pretrained(tmp_path / "out")
    assert MaskSet.load(tmp_path / "out").keys() <= loaded.state_dict().keys()
