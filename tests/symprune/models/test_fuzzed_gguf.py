"""GGUF files that are nearly right: a configuration, or one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fuzzing import EXAMPLES, damaged, fuzz
from gguf import GGUFWriter

from symprune.models import hub


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(96)
    writer.add_tensor("token_embd.weight", np.ones((96, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@EXAMPLES
def test_a_gguf_file_is_read_or_refused(examples: int, file: Path, tmp_path: Path) -> None:
    assert hub.load_config(hub.resolve(str(file))).hidden_size == 32
    tried = tmp_path / "tried.gguf"

    def read(data: bytes) -> None:
        tried.write_bytes(data)
        hub.load_config(hub.resolve(str(tried)))

    fuzz(read, damaged(file.read_bytes()), examples // 2)
