"""What `symprune repeat` needs: the model, the recipe, how the command was run and which texts it
read. It is in the record of a folder, and in the card as a block of YAML, without the folders of
the machine it was made on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml

from symprune.corpus import mixture
from symprune.errors import SympruneError
from symprune.machine.checksums import CARD, digest_file
from symprune.validation import check_small_file, has_kinds, parse_json, parse_yaml

FENCE = "```"
HEADING = "# what `symprune repeat` reads"
FIRST_LINES = f"{FENCE}yaml\n{HEADING}\n"
ON_HUB = "hf:"
CALIBRATION, EVALUATION, MASKS = "calibration", "evaluation", "masks"
USES = {
    CALIBRATION: ("calibration text", "--text"),
    EVALUATION: ("text for perplexity", "--text, or leave it out with --no-eval"),
    MASKS: ("file of masks", "--masks"),
}
RUN = {
    "dtype": str, "compute_dtype": str, "evaluate": bool, "eval_data": str, "eval_windows": int,
    "report_error": bool, "batch_size": int, "masks": str, "prompts": list,
}  # fmt: skip
"""The settings of a command, beside its recipe, that its output depends on. Whether code that comes
with a model may run is none of them: that is for whoever repeats it to say."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the user's that a run read: as it was named then, and what was in it."""

    use: str
    name: str
    sha256: str
    size: int

    @classmethod
    def of(cls, use: str, path: Path) -> SourceFile:
        try:
            return cls(use, str(path), digest_file(path), path.stat().st_size)
        except OSError as error:
            raise SympruneError(f"{path} cannot be read: {error.strerror}.") from error

    def describe(self) -> str:
        """For a sentence: `calibration text mine.txt (2,340 bytes, SHA-256 0123456789ab...)`."""
        digest = f"{self.size:,} bytes, SHA-256 {self.sha256[:12]}..."
        return f"{USES[self.use][0]} {PurePath(self.name).name} ({digest})"

    def check(self, path: Path) -> None:
        """Fail where `path` is not the file that was read."""
        option = USES[self.use][1]
        if not path.is_file():
            raise SympruneError(
                f"The {self.describe()} is not at {path}: say where it is with {option}."
            )
        found = SourceFile.of(self.use, path)
        if found.sha256 != self.sha256:
            raise SympruneError(
                f"{path} is not the {self.describe()} that was read: its SHA-256 is "
                f"{found.sha256[:12]}.... Name the right file with {option}."
            )


@dataclass(frozen=True)
class Plan:
    """A run that can be done again. tokens: the digest of the windows it was calibrated on."""

    model: str
    revision: str | None
    recipe: dict[str, Any]
    run: dict[str, Any] = field(default_factory=dict)
    files: tuple[SourceFile, ...] = ()
    tokens: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        plain = {**vars(self), "files": [vars(each) for each in self.files]}
        return {name: value for name, value in plain.items() if value not in (None, [], {})}

    def without_folders(self, model: str) -> Plan:
        """The same for a reader elsewhere: `model` by a name of its own, files by their names."""
        told = {each.name: PurePath(each.name).name for each in self.files}
        for source in (self.recipe.get("calibration"), self.run.get("eval_data")):
            parts = mixture.parse(source) if isinstance(source, str) else ()
            elsewhere = [each.source for each in parts if not each.source.startswith(ON_HUB)]
            told |= {each: PurePath(each).name for each in elsewhere if each not in told}

        def shorten(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: _replace_all(value, told) for name, value in values.items()}

        files = tuple(SourceFile(**{**vars(f), "name": told[f.name]}) for f in self.files)
        recipe, run = shorten(self.recipe), shorten(self.run)
        return Plan(model, self.revision, recipe, run, files, self.tokens, self.versions)


def plan_of(record: Mapping[str, Any]) -> Plan | None:
    """The plan in a folder's record; None in one that says too little: of an older version, of a
    federated run."""
    return _read(record) if "run" in record else None


def write_block(plan: Plan) -> str:
    """The plan as a block of a card."""
    text = yaml.safe_dump(plan.to_dict(), sort_keys=False, allow_unicode=True, width=10**6)
    return f"{FIRST_LINES}{text}{FENCE}"


def read_plan(path: Path) -> Plan:
    """The plan in a card, a record, or a folder that has either."""
    if path.is_dir():
        inside = (path / "symprune.json", path / CARD)
        there = next((each for each in inside if each.is_file()), None)
        if there is None:
            raise SympruneError(f"{path} has neither a symprune.json nor a README.md.")
        path = there
    check_small_file(path, "card")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SympruneError(f"Cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SympruneError(f"{path} is not a text file (UTF-8).") from error
    found = _read(_parse_record(text, path) if path.suffix == ".json" else _find_block(text, path))
    if found is None:
        raise SympruneError(f"{path} does not say how to repeat the run.")
    return found


def _parse_record(text: str, path: Path) -> Any:
    try:
        record = parse_json(text)
    except ValueError as error:
        raise SympruneError(f"{path} is not JSON.") from error
    if not isinstance(record, dict) or "run" not in record:
        raise SympruneError(
            f"{path} does not say how the command was run: an older version wrote it, or it was no "
            "command that can be repeated."
        )
    return record


def _find_block(text: str, path: Path) -> Any:
    _, begun, rest = text.replace("\r\n", "\n").partition(FIRST_LINES)
    block, ended, _ = rest.partition(f"\n{FENCE}")
    if not begun or not ended:
        raise SympruneError(
            f"{path} has no block that begins with {HEADING!r}: it is no card of symprune's, or it "
            "was rewritten."
        )
    try:
        return parse_yaml(block)
    except yaml.YAMLError as error:
        raise SympruneError(f"The block for `symprune repeat` in {path} is not YAML.") from error


def _read(values: Any) -> Plan | None:
    """A plan out of a file; None where it is none. A record says the digests in `texts`."""
    if not has_kinds(values, {"model": str, "recipe": dict, "run": dict}):
        return None
    texts = values["texts"] if isinstance(values.get("texts"), dict) else values
    files, tokens = texts.get("files", []), texts.get("tokens")
    kinds = {"use": str, "name": str, "sha256": str, "size": int}
    if not isinstance(files, list) or not all(
        has_kinds(each, kinds) and each.keys() == kinds.keys() and each["use"] in USES
        for each in files
    ):
        return None
    run, revision, made = values["run"], values.get("revision"), values.get("versions", {})
    if any(name not in RUN or type(value) is not RUN[name] for name, value in run.items()):
        return None
    if not all(isinstance(each, str) for each in run.get("prompts", [])):
        return None
    if not all(value is None or isinstance(value, str) for value in (revision, tokens)):
        return None
    if not isinstance(made, dict) or not all(isinstance(v, str) for v in made.values()):
        return None
    named = tuple(SourceFile(**each) for each in files)
    return Plan(values["model"], revision, values["recipe"], run, named, tokens, made)


def _replace_all(value: Any, told: Mapping[str, str]) -> Any:
    """A text in which files are named without their folders; anything else as it is."""
    if not isinstance(value, str):
        return value
    for name in sorted(told, key=len, reverse=True):
        value = value.replace(name, told[name])
    return value
