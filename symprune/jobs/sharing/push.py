"""Pushing a folder to the hub: what symprune wrote, whole, and nothing else that lies there.

Files go up one by one and become visible together, by one commit. What is there already is not sent
again, so the same command goes on where one was cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symprune.card.plan import plan_of
from symprune.checkpoint.record import read_record
from symprune.checkpoint.verify import verify
from symprune.errors import SympruneError
from symprune.machine.checksums import CARD, is_read_by_loaders, read_checksums
from symprune.machine.checksums import FILE as CHECKSUMS

Tell = Callable[[str], None]
Tick = Callable[[int, int], None]
READ_ONLY = "read"
MESSAGE = "Upload by symprune"


@dataclass(frozen=True)
class Target:
    """Where a folder goes: `owner/name`, or `name` of whoever the token is of. The token is written
    nowhere."""

    name: str
    private: bool = True
    revision: str | None = None
    message: str | None = None
    token: str | None = field(default=None, repr=False)

    def find(self) -> str:
        """`owner/name`, if it is a name and the hub would take something from this user there, as
        far as it says so beforehand."""
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise SympruneError(f"{self.name!r} is not a name the hub takes: {error}") from error
        if self.name.startswith((".", "/", "~")) or self.name.count("/") > 1:
            raise SympruneError(f"{self.name!r} is not a name on the hub, which is OWNER/NAME.")
        try:
            user = self._api().whoami()
        except Exception as error:
            raise explain(error, self.name) from error
        access = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
        if access == READ_ONLY:
            raise SympruneError(
                "The hub's token can only read: make one that can write at its settings page and "
                "log in with `hf auth login`."
            )
        return self.name if "/" in self.name else f"{user['name']}/{self.name}"

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(token=self.token, library_name="symprune")


def push(
    folder: Path, target: Target, tell: Tell = lambda _: None, tick: Tick = lambda *_: None
) -> dict[str, Any]:
    """Send a folder that is as symprune wrote it; where it is then, and what was sent."""
    from huggingface_hub import CommitOperationAdd

    names = check_whole(folder)
    name = target.find()
    api = target._api()
    try:
        _prepare_place(api, target, name, set(names))
        tell(f"Pushing {folder} to {name}")
        operations = []
        for number, each in enumerate(names):
            tick(number, len(names))
            operation = CommitOperationAdd(each, str(folder / each))
            api.preupload_lfs_files(name, [operation], revision=target.revision, free_memory=False)
            operations.append(operation)
        done = api.create_commit(
            name, operations, commit_message=target.message or MESSAGE, revision=target.revision
        )
        tick(len(names), len(names))
    except SympruneError:
        raise
    except Exception as error:
        raise explain(error, name, folder) from error
    sizes = sum((folder / each).stat().st_size for each in names)
    return {"name": name, "url": f"{api.endpoint}/{name}", "commit": done.oid,
            "files": len(names), "bytes": sizes}  # fmt: skip


def check_whole(folder: Path) -> list[str]:
    """The files of a folder to push; fail where `verify` finds damage."""
    verdict = verify(folder)
    if not verdict.is_whole:
        raise SympruneError(
            f"{folder} is not as symprune wrote it: {verdict.describe()}. `symprune verify "
            f"{folder}` lists what; nothing was pushed."
        )
    listed = read_checksums(folder) or {}
    there = [name for name in (*listed, CARD, CHECKSUMS) if (folder / name).is_file()]
    return sorted(dict.fromkeys(there))


def find_local_names(folder: Path) -> list[str]:
    """Folders of this machine that the record names, which whoever can read the model will see."""
    record = read_record(folder) or {}
    plan = plan_of(record)
    named = [record.get("model"), *([each.name for each in plan.files] if plan else [])]
    paths = [name for name in named if isinstance(name, str) and name.startswith(("/", "~", "."))]
    return list(dict.fromkeys(paths))


def _prepare_place(api: Any, target: Target, name: str, files: set[str]) -> None:
    """The repository and its branch, made if need be; refused if others would read what is to be
    private, or would read another model out of what is there."""
    api.create_repo(name, private=target.private, exist_ok=True)
    info = api.repo_info(name)
    if target.private and info.private is False:
        raise SympruneError(
            f"{name} exists and everybody can read it: pass --public, or another name."
        )
    if target.revision is not None:
        api.create_branch(name, branch=target.revision, exist_ok=True)
    present = api.list_repo_files(name, revision=target.revision)
    other = sorted(each for each in present if each not in files and is_read_by_loaders(each))
    if other:
        raise SympruneError(
            f"{name} has {other[0]}, which loaders read and which is not in the folder: delete it "
            "there, or choose another name."
        )


def explain(error: Exception, name: str, folder: Path | None = None) -> SympruneError:
    """One sentence for what the hub or the way there said, and how to go on."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    kept = f" {folder} is whole: the same command goes on." if folder is not None else ""
    chain = list(_causes(error))
    if any(isinstance(each, LocalTokenNotFoundError) for each in chain):
        return SympruneError(
            "You are not logged in to the hub: log in with `hf auth login`, or pass --token."
        )
    refused = next((each for each in chain if isinstance(each, HfHubHTTPError)), None)
    status = getattr(getattr(refused, "response", None), "status_code", None)
    if status == 401:
        return SympruneError(
            f"The hub does not accept the token: log in again with `hf auth login`.{kept}"
        )
    if status in (402, 403, 404):
        said = _first_line(getattr(refused, "server_message", None) or "")
        return SympruneError(
            f"The hub does not let you write to {name} ({said or status}): choose a name of your "
            f"own, or a token with that right.{kept}"
        )
    if status is not None:
        said = _first_line(getattr(refused, "server_message", None) or "")
        return SympruneError(f"The hub answered {status}{f' ({said})' if said else ''}.{kept}")
    if isinstance(error, ValueError) and "metadata" in str(error).lower():
        return SympruneError(f"The hub refuses the metadata of {CARD}: {_first_line(str(error))}")
    return SympruneError(
        f"The hub ({constants.ENDPOINT}) cannot be reached ({type(chain[-1]).__name__}).{kept}"
    )


def _causes(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(".")[:200]
