"""Fingerprints of models, by which parties know that they have the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

DIGEST_BYTES = 32
WHERE = {"transformers_version", "dtype", "torch_dtype"}  # of a configuration: not of the model


def digest(model: nn.Module, stored: Mapping[str, torch.dtype], words: bytes = b"") -> Tensor:
    """A fingerprint of the dense model as it is stored, of its configuration and, in `words`, of
    its tokenizer: both sides must have the same one, whatever their machines compute in. stored:
    the parameters that are stored in another type than they are computed in, by name."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    config: Any = getattr(model, "config", None)
    known = config.to_dict() if hasattr(config, "to_dict") else {}
    settled = {k: v for k, v in known.items() if k not in WHERE and not k.startswith("_")}
    found.update(json.dumps(settled, sort_keys=True, default=str).encode() + b"\0" + words)
    for name, parameter in model.named_parameters():
        dtype = stored.get(name, parameter.dtype)
        found.update(f"{name} {tuple(parameter.shape)} {dtype}\n".encode())
        flat = parameter.detach().to("cpu", dtype).contiguous().view(-1)
        found.update(flat.view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8)


def tokenizer_digest(tokenizer: Any) -> bytes:
    """A fingerprint of how a tokenizer makes numbers of text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    told = {"words": tokenizer.get_vocab()} if backend is None else json.loads(backend.to_str())
    lasting = {name: told[name] for name in told if name not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).digest()


def digest_of_loss(loss: Any, words: bytes = b"") -> Tensor:
    """A fingerprint of what is trained: of a module that of the model it begins from; of a formula
    its name and size. Of both the text's tokenizer, if there is one."""
    inner = getattr(loss, "loss", loss)  # behind masks
    module = getattr(inner, "module", None)
    if module is not None:
        return digest(module, {}, words)
    whole = inner.layout.whole
    told = f"{type(inner).__name__} {whole.names} {whole.shapes}".encode() + words
    said = hashlib.blake2b(told, digest_size=DIGEST_BYTES).digest()
    return torch.frombuffer(bytearray(said), dtype=torch.uint8)
