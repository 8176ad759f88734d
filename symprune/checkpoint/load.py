"""Loading a model into memory, from wherever `models.hub` says it is: a folder, packed or not, the
hub, a GGUF file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from symprune.card.base import CARD, LICENCE_FILES
from symprune.checkpoint.output_folder import files_around
from symprune.checkpoint.packed import weight_files
from symprune.checkpoint.packed_shards import CONFIG, PackedShards, is_packed, open_shards
from symprune.checkpoint.streamed_model import StreamedModel
from symprune.checkpoint.tensor_files import INDEX
from symprune.errors import SympruneError
from symprune.machine import compute, durable
from symprune.machine.checksums import digest_file, is_whole, write_checksums
from symprune.machine.foreign_files import check_links
from symprune.maskset import PACKED
from symprune.models.hub import (
    Access,
    Origin,
    check_dtype,
    check_no_adapter,
    explain,
    load_config,
    load_tokenizer,
    pick_device,
    resolve,
)
from symprune.models.support import auto_class
from symprune.runtime.layers import cast_packed, packed_parameters

IN_MEMORY = (".safetensors", ".bin", ".pt")
"""Files of weights that are not read block by block but loaded as a whole."""


def load(
    folder: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    dequantize: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """The causal LM in a folder, packed or not, in memory; nothing is written to disk.

    Args:
        folder: A checkpoint in safetensors, as `save_pretrained`, `symprune pack` or `symprune
            prune --values` leaves it.
        dtype: `auto`, as it is stored, or float32, bfloat16, float16.
        device: Where it is put: auto, cpu, cuda, cuda:1, mps, ...
        dequantize: Whether a packed model gets plain weights, to train or to prune; else they
            stay packed in memory and are multiplied from there.
        trust_remote_code: Whether Python code that comes with the model may run.
    """
    check_dtype(dtype)
    access = Access(trust_remote_code=trust_remote_code)
    where, origin = Path(folder), resolve(str(folder), access)
    source, config = open_shards(where), load_config(origin)
    if is_packed_config(config):
        if isinstance(source, PackedShards):
            source.check()
        model = load_model(origin, dtype, dequantize).to(pick_device(device))
        model.tie_weights()  # some devices take what is one as two
        return model
    streamed = StreamedModel(source, config, dtype, pick_device(device), trust_remote_code)
    return streamed.load_all()


def is_packed_config(config: Any) -> bool:
    """Whether a configuration says that its model is packed by symprune."""
    found = getattr(config, "quantization_config", None)
    return isinstance(found, dict) and found.get("quant_method") == "symprune"


def local_folder(origin: Origin) -> Path | None:
    """The folder on this machine with the model's safetensors files (packed or not), fetched if
    need be; None for a model that is not made of such files."""
    if origin.gguf_file:
        return None
    folder = Path(origin.path)
    if not origin.is_local:
        from huggingface_hub import snapshot_download

        wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", CARD, *LICENCE_FILES]
        asked = origin.access
        wanted += ["*.py"] if asked.trust_remote_code else []
        try:
            fetched = snapshot_download(
                origin.path, revision=asked.revision, token=asked.token, allow_patterns=wanted
            )
            folder = Path(fetched)
        except Exception as error:
            raise explain(origin, error) from error
        check_links(folder)
        check_no_adapter(folder)
    if not is_packed(folder) and is_packed_config(load_config(origin)):
        return None  # a packed model that was saved from memory does not say how it was plain
    return folder if weight_files(folder) else None


def fingerprint(origin: Origin, tokenizer: Any) -> dict[str, Any]:
    """What tells a model from others: the contents of its files, but of weights that are read block
    by block, which are compared then (`resume.watch_input`), no more than size and time."""
    folder = local_folder(origin)
    place = Path(folder or origin.path)
    weights = [place / name for name in (weight_files(folder) if folder else ())]
    names = {CONFIG, INDEX, PACKED, *files_around(place, tokenizer)}
    if origin.gguf_file:
        names = {origin.gguf_file}
    elif folder is None:
        names |= {path.name for kind in IN_MEMORY for path in place.glob(f"*{kind}")}
    if not origin.access.trust_remote_code:
        names = {name for name in names if not name.endswith(".py")}
    there = filter(Path.is_file, (place / name for name in sorted(names)))
    times = {
        path.name: f"{path.stat().st_size} bytes, changed {path.stat().st_mtime_ns}"
        for path in weights
    }
    return {
        "model": times if origin.is_local else str(origin),
        "files": {path.name: digest_file(path)[:16] for path in there},
    }


def make_dense_copy(origin: Origin, dtype: str, folder: Path) -> None:
    """A model that is not in safetensors files, or not in plain ones, as a folder that is. One that
    an earlier attempt made and that is as it was is kept."""
    if is_whole(folder):
        return
    new = folder.with_name(f"{folder.name}.new")
    for left in filter(Path.is_dir, (folder, new)):
        shutil.rmtree(left)
    load_model(origin, dtype).save_pretrained(new)
    write_checksums(new)
    durable.sync_tree(new)
    new.rename(folder)
    durable.sync(folder.parent)


def load_with_tokenizer(
    name: str, dtype: str = "auto", device: str = "auto", access: Access | None = None
) -> tuple[Any, Any]:
    """The causal LM, with plain weights, and the tokenizer of MODEL, on `device` in `dtype`."""
    origin = resolve(name, access)
    return load_model(origin, dtype).to(pick_device(device)), load_tokenizer(origin)


def load_computing(
    origin: Origin, dtype: str, device: torch.device, asked: str, dequantize: bool = True
) -> tuple[Any, torch.dtype]:
    """A model in memory, as a whole in the type it is computed in, and the type it is stored in."""
    model = load_model(origin, dtype, dequantize)
    stored = model.dtype
    found = compute.pick(asked, stored, device)
    if found == torch.float32:
        compute.cast(model, stored, found)
        cast_packed(model, stored, found)
    elif found != stored:
        model = load_model(origin, compute.name_of(found), dequantize)
    return model.to(device), stored


def load_model(origin: Origin, dtype: str = "auto", dequantize: bool = True) -> Any:
    """The model in memory; of a packed one the weights stay packed unless they are to be plain."""
    from transformers import AutoModelForCausalLM

    check_dtype(dtype)
    # Reading a GGUF file's configuration takes seconds, and no other class is made from one.
    trusted = origin.access.trust_remote_code
    made_by = AutoModelForCausalLM
    if not origin.gguf_file:
        if is_packed(Path(origin.path)):
            open_shards(Path(origin.path))  # a sentence if it is not as it was written
        made_by = auto_class(load_config(origin), trusted)
    options: dict[str, Any] = {"dtype": dtype, **origin.options}
    if origin.gguf_file:
        options |= {"dtype": "float32" if dtype == "auto" else dtype, **_dequantizing_option()}
    model: Any
    try:
        model = made_by.from_pretrained(origin.path, **options)
    except SympruneError:
        raise
    except Exception as error:
        raise explain(origin, error) from error
    if origin.gguf_file:
        # The weights are plain numbers now: without this they could not be saved as such.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    return model.dequantize() if dequantize and packed_parameters(model) else model


def _dequantizing_option() -> dict[str, Any]:
    """The option that makes transformers turn a GGUF file's blocks into plain weights; releases
    without it always do."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
