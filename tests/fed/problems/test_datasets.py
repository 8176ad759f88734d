"""Data sets are read from the formats people have; partitions deal out rows as they say."""

from __future__ import annotations

import gzip
import json
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from symprune.errors import SympruneError
from symprune.fed.problems import datasets
from symprune.fed.problems.datasets import Dataset, load
from symprune.fed.problems.partitions import PARTITIONS, partition

needs_assets = pytest.mark.skipif(
    "SYMPRUNE_ASSETS" not in os.environ, reason="SYMPRUNE_ASSETS is not set"
)


def labelled(rows: int = 120, classes: int = 4) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    y = torch.arange(rows, dtype=torch.float64) % classes
    return Dataset("toy", x, y, classes, users=torch.arange(rows) // 20)


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"label-ramp", "blocks"}))
def test_partitions_are_disjoint_seeded_and_leave_nobody_empty(name: str) -> None:
    data = labelled()
    parts = partition(data, name, 6, seed=3)
    rows = torch.cat(parts)
    assert len(parts) == 6 and min(len(p) for p in parts) > 0
    assert len(rows.unique()) == len(rows) and len(rows) == 120
    again = partition(data, name, 6, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


def test_iid_is_even_and_blocks_overlap_cyclically() -> None:
    data = labelled(100)
    assert [len(p) for p in partition(data, "iid", 7)] == [15, 15, 14, 14, 14, 14, 14]
    assert [len(p) for p in partition(data, "blocks:1", 7)] == [14] * 6 + [16]
    parts = partition(data, "blocks:2", 5)
    assert [len(p) for p in parts] == [40] * 5
    for i in range(5):
        assert len(set(parts[i].tolist()) & set(parts[(i + 1) % 5].tolist())) == 20


def test_by_class_gives_every_client_few_labels() -> None:
    data = labelled(400, 10)
    parts = partition(data, "class:2", 10, seed=1)
    assert all(len(data.y[p].unique()) <= 2 for p in parts)


def test_a_small_dirichlet_parameter_makes_clients_differ_more() -> None:
    data = labelled(2000, 4)

    def spread(alpha: float) -> float:
        parts = partition(data, f"dirichlet:{alpha}", 8, seed=0)
        shares = [torch.bincount(data.y[p].long(), minlength=4) / len(p) for p in parts]
        return float(torch.stack(shares).std(0).mean())

    assert spread(0.1) > 2 * spread(10)


def test_the_label_ramp_runs_from_few_to_all_positive() -> None:
    data = load("breast-cancer")
    parts = partition(data, "label-ramp", 8)
    shares = [float((data.y[p] > 0).double().mean()) for p in parts]
    assert all(abs(s - (i + 1) / 8) < 0.02 for i, s in enumerate(shares))


def test_by_user_is_the_datas_own_split() -> None:
    data = labelled()
    assert all(len(data.users[p].unique()) == 1 for p in partition(data, "user", 4))  # type: ignore[index]
    with pytest.raises(SympruneError, match="6 users"):
        partition(data, "user", 7)


def test_libsvm_files_are_read_plain_and_packed(tmp_path: Path) -> None:
    text = "1 1:0.5 3:2\n2 2:1\n2 1:-1 2:3\n"
    (tmp_path / "tiny").write_text(text)
    (tmp_path / "tiny.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("tiny", "tiny.gz"):
        data = load(f"libsvm:{tmp_path / name}")
        assert data.classes == 2 and data.y.tolist() == [-1, 1, 1]
        assert data.x.tolist() == [[0.5, 0, 2], [0, 1, 0], [-1, 3, 0]]
    (tmp_path / "bad").write_text("this is prose\n")
    with pytest.raises(SympruneError, match="not a LIBSVM file"):
        load(f"libsvm:{tmp_path / 'bad'}")


def test_idx_folders_are_read(tmp_path: Path) -> None:
    for stem, rows in (("train", 3), ("t10k", 2)):
        pixels = (np.arange(rows * 4) * 10).astype(np.uint8)
        images = struct.pack(">IIII", 0x803, rows, 2, 2) + pixels.tobytes()
        labels = struct.pack(">II", 0x801, rows) + bytes(range(rows))
        (tmp_path / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (tmp_path / f"{stem}-labels-idx1-ubyte").write_bytes(labels)
    data = load(f"mnist:{tmp_path}")
    assert data.x.shape == (3, 4) and data.y.tolist() == [0, 1, 2]
    assert data.x[1].tolist() == pytest.approx([40 / 255, 50 / 255, 60 / 255, 70 / 255])
    assert data.test_x is not None and data.test_x.shape == (2, 4)


def test_leaf_folders_are_read_with_their_users(tmp_path: Path) -> None:
    content = {
        "users": ["a", "b"],
        "user_data": {
            "a": {"x": [[0, 1], [1, 0]], "y": [0, 3]},
            "b": {"x": [[1, 1]], "y": [2]},
        },
    }
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "all.json").write_text(json.dumps(content))
    data = load(f"leaf:{tmp_path}")
    assert data.users is not None and data.users.tolist() == [0, 0, 1]
    assert data.classes == 4 and data.x.shape == (3, 2)


def test_blogfeedback_is_scaled_grouped_and_given_an_intercept(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    train, later = generator.random((6, 281)), generator.random((2, 281))
    train[:3, :50], train[3:, :50] = 1.0, 2.0
    with zipfile.ZipFile(tmp_path / "BlogFeedback.zip", "w") as archive:
        for name, table in (("blogData_train.csv", train), ("blogData_test-2012.csv", later)):
            archive.writestr(name, "\n".join(",".join(map(str, row)) for row in table))
    data = load(f"blogfeedback:{tmp_path}")
    assert data.x.shape == (6, 281) and data.classes == 0
    assert float(data.x.min()) == 0 and float(data.x.max()) == 1
    assert (data.x[:, -1] == 1).all()
    assert data.users is not None and len(data.users.unique()) == 2


def test_local_huggingface_data_is_read(tmp_path: Path) -> None:
    rows = [{"a": float(i), "b": 2.0 * i, "label": i % 3} for i in range(9)]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = load(f"hf:{tmp_path}")
    assert data.x.shape == (9, 2) and data.classes == 3 and data.x[4].tolist() == [4.0, 8.0]


@needs_assets
def test_the_papers_data_sets_have_their_sizes() -> None:
    a9a = load("a9a")
    assert a9a.x.shape == (32561, 123) and a9a.classes == 2
    assert load("mnist").x.shape == (60000, 784)


def test_fashion_mnist_that_is_nowhere_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYMPRUNE_ASSETS", str(tmp_path))
    monkeypatch.setattr(datasets, "DEBIAN_FASHION", tmp_path / "debian")
    with pytest.raises(SympruneError, match="dataset-fashion-mnist"):
        load("fashion-mnist")
    with pytest.raises(SympruneError, match="does not exist"):
        load(f"fashion-mnist:{tmp_path / 'elsewhere'}")


def test_characters_are_windows_with_the_next_one_as_label(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Abc\u00e9" * 20)
    (tmp_path / "b.raw").write_text("0123456789" * 8)
    (tmp_path / "short.txt").write_text("too short")
    data = load(f"characters:{tmp_path}")
    assert data.x.shape[1] == 32 and data.classes == len(datasets.ALPHABET)
    assert data.users is not None and len(data.users.unique()) == 2
    assert data.x[0, :5].tolist() == [1, 2, 3, 0, 1] and data.y[0] == 1
    assert data.x[1, 0] == data.x[0, 8]
    with pytest.raises(SympruneError, match="no text"):
        load(f"characters:{tmp_path / 'short.txt'}")
