"""Data sets as plain tensors: scikit-learn's small ones (offline), LIBSVM files, idx images,
BlogFeedback, LEAF folders and HuggingFace `datasets`.

`load("digits")`, `load("libsvm:FILE")`, `load("mnist:FOLDER")`, ... A name without a path is looked
up in the folder of the environment variable SYMPRUNE_ASSETS.
"""

from __future__ import annotations

import gzip
import io
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.problems.models.causal_lm import Text, cut_windows
from symprune.fed.problems.models.fingerprint import tokenizer_digest
from symprune.fed.problems.models.user_code import is_code, load_code
from symprune.validation import parse_json

ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'\"()-\n"
WINDOW = 32  # characters that the next one is guessed from
MOST_CHARACTERS = 400_000  # of a file
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist


@dataclass(frozen=True)
class Dataset:
    """Rows and targets; `classes` is 0 for regression, 2 with labels -1/+1 for binary tasks.
    `users` numbers the owner of every row when the data has owners of its own."""

    name: str
    x: Tensor
    y: Tensor
    classes: int
    test_x: Tensor | None = None
    test_y: Tensor | None = None
    users: Tensor | None = None
    text: bool = False  # rows are windows of tokens, targets how many of each are no padding
    words: bytes = b""  # the digest of the tokenizer that made them, if it is known

    def __len__(self) -> int:
        return len(self.y)

    def with_intercept(self) -> Dataset:
        """A constant-1 column at the end of flat rows."""
        add = lambda x: torch.cat([x, torch.ones_like(x[:, :1])], 1)  # noqa: E731
        test = None if self.test_x is None else add(self.test_x)
        return replace(self, x=add(self.x), test_x=test)

    def take(self, rows: Tensor) -> Dataset:
        users = None if self.users is None else self.users[rows]
        return replace(self, x=self.x[rows], y=self.y[rows], users=users)


def text_data(
    texts: Sequence[Text],
    *,
    tokenizer: Any = None,
    length: int = 128,
    test: Text | None = None,
    name: str = "text",
) -> Dataset:
    """Text as a data set, a user for each of the `texts`: strings, lists of strings or tokens, cut
    into windows of `length` tokens as `cut_windows` does."""
    cut = [cut_windows(text, length, tokenizer) for text in texts]
    x, y = (torch.cat(parts) for parts in zip(*cut, strict=True))
    users = torch.cat([torch.full((len(part),), i) for i, (part, _) in enumerate(cut)])
    test_x, test_y = (None, None) if test is None else cut_windows(test, length, tokenizer)
    words = tokenizer_digest(tokenizer) if hasattr(tokenizer, "get_vocab") else b""
    return Dataset(name, x, y, 0, test_x, test_y, users, text=True, words=words)


def load(spec: str) -> Dataset:
    """The data set a spec names: `name` or `name:path`, or the one a user's function returns."""
    check_data(spec)
    if is_code(spec, tuple(LOADERS)):
        made = load_code(spec, "data")()
        if not isinstance(made, Dataset):
            kind = type(made).__name__
            raise SympruneError(f"The data {spec} is a {kind}, not a symprune.fed.Dataset.")
        return made
    name, _, place = spec.partition(":")
    return LOADERS[name](place)


def check_data(spec: str) -> None:
    """Fail where a spec names no data set, whether or not this machine has its files."""
    name, _, place = spec.partition(":")
    if is_code(spec, tuple(LOADERS)):
        return
    if name not in LOADERS:
        raise SympruneError(f"Unknown data set {name!r}; choose from {', '.join(LOADERS)}.")
    if place and name in WITHOUT_PLACE:
        raise SympruneError(f"The data set {name} comes with scikit-learn and takes no {place!r}.")


def digits(place: str = "") -> Dataset:
    """scikit-learn's digits, pixels / 16, 75/25 stratified split."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    x, test_x, y, test_y = train_test_split(
        bunch.data / 16, bunch.target, test_size=0.25, random_state=0, stratify=bunch.target
    )
    return Dataset("digits", _float(x), _float(y), 10, _float(test_x), _float(test_y))


def breast_cancer(place: str = "") -> Dataset:
    """scikit-learn's breast cancer: standardised, rows of unit length, labels -1/+1."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    x = (bunch.data - bunch.data.mean(0)) / bunch.data.std(0)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return Dataset("breast-cancer", _float(x), _float(2.0 * bunch.target - 1), 2)


def libsvm(place: str) -> Dataset:
    """A LIBSVM file (plain, .gz or .bz2); two classes become -1/+1, several 0, 1, 2, ..."""
    from sklearn.datasets import load_svmlight_file

    path = _existing(place, "LIBSVM file")
    try:
        x, y = load_svmlight_file(str(path))
    except (ValueError, OSError) as error:
        raise SympruneError(f"{path} is not a LIBSVM file: {error}.") from None
    labels = np.unique(y)
    if len(labels) == 2:
        return Dataset(_stem(path), _float(x.toarray()), _float(np.where(y == labels[1], 1, -1)), 2)
    if len(labels) > 100 or not (labels == labels.round()).all():
        return Dataset(_stem(path), _float(x.toarray()), _float(y), 0)
    codes = np.searchsorted(labels, y)
    return Dataset(_stem(path), _float(x.toarray()), _float(codes), len(labels))


def idx_images(place: str, name: str) -> Dataset:
    """MNIST or Fashion-MNIST idx files (plain or .gz) of one folder, pixels in [0, 1]."""
    folder = _existing(place or str(assets(name)), f"{name} folder")
    part = {
        key: _read_idx(folder, f"{stem}-{kind}")
        for key, stem, kind in (
            ("x", "train", "images-idx3-ubyte"),
            ("y", "train", "labels-idx1-ubyte"),
            ("test_x", "t10k", "images-idx3-ubyte"),
            ("test_y", "t10k", "labels-idx1-ubyte"),
        )
    }
    image = lambda a: torch.from_numpy(a.reshape(len(a), -1)).float() / 255  # noqa: E731
    label = lambda a: torch.from_numpy(a.astype(np.float32))  # noqa: E731
    return Dataset(
        name, image(part["x"]), label(part["y"]), 10, image(part["test_x"]), label(part["test_y"])
    )


def fashion_mnist(place: str = "") -> Dataset:
    """Fashion-MNIST of a folder, of SYMPRUNE_ASSETS or of Debian's package."""
    root = os.environ.get("SYMPRUNE_ASSETS")
    folders = [Path(root) / "fashion-mnist"] if root else []
    found = [folder for folder in (*folders, DEBIAN_FASHION) if folder.is_dir()]
    if not place and not found:
        raise SympruneError(
            "Fashion-MNIST is not here: give its folder (fashion-mnist:FOLDER), put it into "
            f"SYMPRUNE_ASSETS, or install Debian's dataset-fashion-mnist ({DEBIAN_FASHION})."
        )
    return idx_images(place or str(found[0]), "fashion-mnist")


def blogfeedback(place: str = "") -> Dataset:
    """UCI BlogFeedback (zip or folder). Attributes are scaled to [0, 1] over the training rows, an
    intercept is appended, and a row's owner is its source page: the first 50 columns."""
    path = _existing(place or str(assets("blogfeedback")), "BlogFeedback zip or folder")
    zips = [path] if path.is_file() else sorted(path.glob("*.zip"))
    files: dict[str, Callable[[], io.BufferedIOBase]] = {}
    if zips:
        archive = zipfile.ZipFile(zips[0])
        files = {n: (lambda n=n: archive.open(n)) for n in archive.namelist()}  # type: ignore[misc]
    else:
        files = {p.name: (lambda p=p: p.open("rb")) for p in path.glob("*.csv")}  # type: ignore[misc]
    train = [n for n in files if Path(n).name.startswith("blogData_train")]
    test = sorted(n for n in files if Path(n).name.startswith("blogData_test"))
    if not train or not test:
        raise SympruneError(f"{path} holds no blogData_train or blogData_test csv files.")
    table = np.loadtxt(files[train[0]](), delimiter=",", dtype=np.float64)
    later = np.concatenate([np.loadtxt(files[n](), delimiter=",", ndmin=2) for n in test])
    _, users = np.unique(table[:, :50], axis=0, return_inverse=True)
    low, high = table[:, :-1].min(0), table[:, :-1].max(0)
    span = np.where(high > low, high - low, 1)
    scale = lambda a: _float((a[:, :-1] - low) / span)  # noqa: E731
    whole = Dataset(
        "blogfeedback",
        scale(table),
        _float(table[:, -1]),
        0,
        scale(later),
        _float(later[:, -1]),
        torch.from_numpy(users.reshape(-1)),
    )
    return whole.with_intercept()


def characters(place: str) -> Dataset:
    """The next character after `WINDOW` others, in a text file or the .txt and .raw files of a
    folder; a file is a user. Lower-case; what is none of `ALPHABET` counts as a space."""
    path = _existing(place or str(assets("text")), "text file or folder")
    pattern = ("*.txt", "*.raw")
    files = [path] if path.is_file() else sorted(f for p in pattern for f in path.rglob(p))
    x, y, users = [], [], []
    for user, file in enumerate(files):
        text = file.read_text(encoding="utf-8", errors="replace")[:MOST_CHARACTERS].lower()
        codes = np.array([max(ALPHABET.find(c), 0) for c in text], np.float32)
        if len(codes) <= WINDOW:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(codes, WINDOW + 1)[:: WINDOW // 4]
        x.append(windows[:, :-1])
        y.append(windows[:, -1])
        users.append(np.full(len(windows), user))
    if not x:
        raise SympruneError(f"{path} holds no text of more than {WINDOW} characters.")
    rows, targets, owners = (_tensor(np.concatenate(part)) for part in (x, y, users))
    return Dataset("characters", rows, targets, len(ALPHABET), users=owners)


def leaf(place: str) -> Dataset:
    """A LEAF folder such as FEMNIST's: `train/*.json`, `test/*.json` with users and user_data."""
    folder = _existing(place or str(assets("femnist")), "LEAF folder")
    x, y, users = _read_leaf(folder / "train")
    test_x, test_y, _ = _read_leaf(folder / "test")
    classes = int(y.max()) + 1
    return Dataset("leaf", x, y, classes, test_x, test_y, users)


def huggingface(place: str) -> Dataset:
    """A HuggingFace data set by name or path: an image column or numeric ones, and `label`."""
    from datasets import load_dataset

    if not place:
        raise SympruneError("Name the HuggingFace data set, as in hf:ylecun/mnist.")
    try:
        loaded = load_dataset(place)
    except Exception as error:
        first = str(error).splitlines()[0]
        raise SympruneError(f"HuggingFace data set {place!r} cannot be loaded: {first}") from None
    if "train" not in loaded:
        raise SympruneError(f"HuggingFace data set {place!r} has no train split.")
    x, y = _table(loaded["train"], place)
    test = _table(loaded["test"], place) if "test" in loaded else (None, None)
    return Dataset(place, x, y, int(y.max()) + 1, *test)


def assets(name: str) -> Path:
    """The folder of this name under SYMPRUNE_ASSETS."""
    root = os.environ.get("SYMPRUNE_ASSETS")
    if not root:
        raise SympruneError(
            f"Data set {name!r} needs a path ({name}:PATH) or the variable SYMPRUNE_ASSETS."
        )
    return Path(root) / name


def _named_libsvm(*names: str) -> Callable[[str], Dataset]:
    def read(place: str = "") -> Dataset:
        folder = assets("libsvm") if not place else Path(place)
        for name in names:
            for suffix in ("", ".gz", ".bz2", ".txt", ".txt.gz"):
                if (folder / (name + suffix)).exists():
                    return replace(libsvm(str(folder / (name + suffix))), name=names[0])
        raise SympruneError(f"{folder} holds no file {' or '.join(names)}.")

    return read


def _read_idx(folder: Path, stem: str) -> np.ndarray:
    for path in (folder / stem, folder / f"{stem}.gz", folder / stem.replace("-idx", ".idx")):
        if path.exists():
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            dimensions = raw[3]
            shape = np.frombuffer(raw, ">u4", dimensions, 4).astype(int)
            return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()
    raise SympruneError(f"{folder} has no file {stem} or {stem}.gz.")


def _read_leaf(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    x, y, users, names = [], [], [], 0
    for path in sorted(folder.glob("*.json")):
        content = parse_json(path.read_text())
        for user in content["users"]:
            own = content["user_data"][user]
            x.append(np.asarray(own["x"], np.float32))
            y.append(np.asarray(own["y"], np.float32))
            users.append(np.full(len(own["y"]), names))
            names += 1
    if not x:
        raise SympruneError(f"{folder} holds no LEAF json files.")
    return _tensor(np.concatenate(x)), _tensor(np.concatenate(y)), _tensor(np.concatenate(users))


def _table(split: object, name: str) -> tuple[Tensor, Tensor]:
    columns = split.column_names  # type: ignore[attr-defined]
    target = next((c for c in ("label", "labels", "y", "target") if c in columns), None)
    if target is None:
        raise SympruneError(f"HuggingFace data set {name!r} has no column label.")
    y = np.asarray(split[target], np.float32)  # type: ignore[index]
    image = next((c for c in ("image", "img") if c in columns), None)
    if image is not None:
        pixels = np.stack([np.asarray(p, np.float32) / 255 for p in split[image]])  # type: ignore[index]
        return _tensor(pixels.reshape(len(pixels), -1)), _tensor(y)
    rest = [np.asarray(split[c], np.float32) for c in columns if c != target]  # type: ignore[index]
    return _tensor(np.stack(rest, 1)), _tensor(y)


def _existing(place: str, what: str) -> Path:
    path = Path(place)
    if not place or not path.exists():
        raise SympruneError(f"The {what} {place!r} does not exist.")
    if not path.is_file() and not path.is_dir():
        raise SympruneError(f"The {what} {place!r} is neither a file nor a folder.")
    return path


def _stem(path: Path) -> str:
    return path.name.split(".")[0]


def _float(a: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(a, dtype=np.float64))


def _tensor(a: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(a))


WITHOUT_PLACE = ("digits", "breast-cancer")
LOADERS: dict[str, Callable[[str], Dataset]] = {
    "digits": digits,
    "breast-cancer": breast_cancer,
    "libsvm": libsvm,
    "mushrooms": _named_libsvm("mushrooms", "agaricus.txt.train"),
    "a6a": _named_libsvm("a6a"),
    "a9a": _named_libsvm("a9a"),
    "w6a": _named_libsvm("w6a"),
    "w8a": _named_libsvm("w8a"),
    "phishing": _named_libsvm("phishing"),
    "mnist": lambda place: idx_images(place, "mnist"),
    "fashion-mnist": fashion_mnist,
    "blogfeedback": blogfeedback,
    "characters": characters,
    "leaf": leaf,
    "hf": huggingface,
}
