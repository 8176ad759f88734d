"""Doing a run again from a card or a record, and comparing what comes out."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

from symprune.card.base import HUB_ID
from symprune.card.plan import CALIBRATION, EVALUATION, MASKS, Plan, SourceFile, read_plan
from symprune.checkpoint.packed_shards import is_packed
from symprune.checkpoint.record import RECORD, versions
from symprune.errors import SympruneError
from symprune.jobs.pruning import Job
from symprune.jobs.sharing.plans import file_of_masks
from symprune.machine.checksums import CARD, digest_file, read_checksums
from symprune.machine.checksums import FILE as CHECKSUMS
from symprune.models import hub
from symprune.recipe import Recipe

SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class Source:
    """What is repeated: its plan, and the folder it is from, as far as that is here."""

    name: str
    plan: Plan
    folder: Path | None

    @classmethod
    def find(cls, name: str, access: hub.Access) -> Source:
        """A folder, a card, a record, or a model on the hub, of which no weights are fetched."""
        path = Path(name).expanduser()
        if path.is_dir():
            return cls(name, read_plan(path), path)
        if path.is_file():
            return cls(name, read_plan(path), path.parent)
        if not HUB_ID.fullmatch(name):
            raise SympruneError(f"There is no folder and no file {name}.")
        folder = _fetch(name, access)
        return cls(name, read_plan(folder), folder)


@dataclass
class Comparison:
    """Whether what came out is what was there. others: files that differ; weights: of those, the
    ones with weights or masks. why_not: a sentence where the two cannot be compared."""

    files: int = 0
    others: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    why_not: str | None = None


def plan_job(
    source: Source,
    *,
    model: str | None = None,
    texts: Iterable[Path] = (),
    masks: Path | None = None,
    output: Path | None = None,
    device: str = "auto",
    evaluate: bool = True,
    force: bool = False,
    access: hub.Access | None = None,
) -> Job:
    """The job that makes the same again, once every file it reads was found to be the same.

    texts: where files of text are, if not where they were; which is which their contents say.
    """
    plan, given = source.plan, access or hub.Access()
    named = model or plan.model
    if model is None and not _can_be_found(plan.model):
        raise SympruneError(
            f"The base model {plan.model} is not here: say with --model where it is."
        )
    places = _find_files(plan, list(texts), masks, evaluate)
    recipe, run = dict(plan.recipe), plan.run
    for file, place in places.items():
        if file.use == CALIBRATION:
            recipe[CALIBRATION] = str(recipe[CALIBRATION]).replace(file.name, place)
    held_out = run.get("eval_data")
    for file, place in places.items():
        if file.use == EVALUATION and held_out is not None:
            held_out = held_out.replace(file.name, place)
    base = next((Path(p) for f, p in places.items() if f.use == MASKS), None)
    local = Path(named).expanduser().exists()
    revision = given.revision or (None if local or model is not None else plan.revision)
    return Job(
        named,
        Recipe.from_dict(recipe),
        output or Path(f"{_name_of(source)}-repeated"),
        dtype=run.get("dtype", "auto"),
        compute_dtype=run.get("compute_dtype", "auto"),
        device=device,
        evaluate=evaluate and run.get("evaluate", True),
        eval_data=held_out,
        eval_windows=run.get("eval_windows"),
        report_error=run.get("report_error", False),
        batch_size=run.get("batch_size"),
        masks=base,
        prompts=tuple(run.get("prompts", ())),
        force=force,
        access=hub.Access(revision, given.token, given.trust_remote_code),
        repeats=plan,
    )


def compare(source: Source, output: Path) -> Comparison:
    """The folder that was repeated and what came out, by their checksums."""
    there = None if source.folder is None else read_checksums(source.folder)
    here = read_checksums(output)
    if there is None or here is None or source.folder is None:
        return Comparison(why_not=f"There is no {CHECKSUMS} beside {source.name} to compare with.")
    if is_packed(source.folder) != is_packed(output):
        way = "pack" if is_packed(source.folder) else "unpack"
        return Comparison(
            why_not=f"{source.name} is stored in another form: `symprune {way} {output} FOLDER` "
            "writes it, to compare the two."
        )
    digests = {name: entry.sha256 for name, entry in there.items() if name != CARD}
    card = source.folder / CARD
    if CARD in there:  # who edited it has changed no model
        digests[CARD] = there[CARD].sha256 if not card.is_file() else digest_file(card)
    both = {**digests, **here}
    others = [n for n in sorted(both) if n not in here or digests.get(n) != here[n].sha256]
    return Comparison(len(both), others, [name for name in others if name.endswith(SAFETENSORS)])


def describe_versions(made: Mapping[str, str]) -> str:
    """What is of another version here: `torch 2.9.0 there, 2.13.0 here`; empty if nothing is."""
    here = versions()
    changed = [n for n in made if n in here and made[n] != here[n]]
    return ", ".join(f"{name} {made[name]} there, {here[name]} here" for name in changed)


def _find_files(
    plan: Plan, texts: list[Path], masks: Path | None, evaluate: bool
) -> dict[SourceFile, str]:
    """Where the files a run read are now. Those given are told apart by what is in them."""
    for path in texts:
        if not path.is_file():
            raise SympruneError(f"There is no text {path}.")
    digests = {digest_file(path): str(path) for path in texts}
    used = [each for each in plan.files if evaluate or each.use != EVALUATION]
    known = {each.sha256 for each in used}
    unknown = [place for digest, place in digests.items() if digest not in known]
    found = {}
    for file in used:
        place = digests.get(file.sha256, file.name)
        if file.use == MASKS:
            place = str(masks or file.name)
        if unknown and file.use != MASKS and file.sha256 not in digests:
            file.check(Path(unknown[0]))
        file.check(file_of_masks(Path(place)) if file.use == MASKS else Path(place))
        found[file] = place
    if unknown:
        raise SympruneError(f"{unknown[0]} is no text that the run read.")
    return found


def _can_be_found(model: str) -> bool:
    """Whether a name means a model here or one that the hub may have."""
    is_id = HUB_ID.fullmatch(model) is not None
    return is_id or model.lower() in hub.SHORT_NAMES or Path(model).expanduser().exists()


def _name_of(source: Source) -> str:
    path = Path(source.name)
    if path.is_dir():
        return path.resolve().name
    return path.resolve().parent.name if path.is_file() else path.name


def _fetch(name: str, access: hub.Access) -> Path:
    """The record, the card and the checksums of a model on the hub, in a folder of their own."""
    from huggingface_hub import snapshot_download

    try:
        fetched = snapshot_download(
            name,
            revision=access.revision,
            token=access.token,
            allow_patterns=[RECORD, CARD, CHECKSUMS, "packed.json"],
        )
    except Exception as error:
        raise hub.explain(hub.Origin(name, name, access=access), error) from error
    folder = Path(mkdtemp(prefix="symprune-repeat-"))
    for path in Path(fetched).iterdir():
        if path.is_file() and path.name in (RECORD, CARD, CHECKSUMS, "packed.json"):
            shutil.copyfile(path, folder / path.name)
    return folder
