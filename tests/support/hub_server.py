"""A stand-in for the hub on loopback: as much of its API as pushing and fetching a model takes.

It speaks what huggingface_hub speaks: who somebody is, making a repository and a branch, which
files go as large ones, the git-lfs batch and its uploads, commits, and files by name.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_aVerySecretTokenOfTheTests"


@dataclass
class Repository:
    """Files by branch, and who may read them."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    messages: list[str] = field(default_factory=list)

    def at(self, revision: str) -> dict[str, bytes]:
        """The files of a branch; of a commit, which is none's name, those of `main`."""
        return self.branches.get(revision, self.branches["main"])


@dataclass
class Hub:
    """What the server knows, and what it was asked. fail: how many uploads of large files it still
    takes before it answers 503; refuse: a status it answers to whoever makes a repository."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    uploads: int = 0
    takes: int | None = None
    refuse: int | None = None
    role: str = "write"

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        return self.repositories[name].branches[branch]

    def environment(self, home: Path, **others: str) -> dict[str, str]:
        """For a process that is to take this for the hub."""
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
            "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*", **others,
        }  # fmt: skip


@contextmanager
def serve() -> Iterator[Hub]:
    """A hub for the length of a block."""
    hub = Hub()

    class Handler(_Handler):
        known = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    known: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the terminal."""

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def _answer(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.known.asked.append(f"{method} {path}")
        self.known.bodies.append(body)
        place = path.strip("/").split("/")
        try:
            if place[0] == "large":
                self._take_large(place[1], body)
            elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._say(401, {"error": "Invalid username or password."})
            else:
                self._route(method, place, body)
        except KeyError:
            self._say(404, {"error": "Not found"}, {"X-Error-Code": "RepoNotFound"})

    def _route(self, method: str, place: list[str], body: bytes) -> None:
        if place[:2] == ["api", "whoami-v2"]:
            about = {"type": "user", "name": "ada", "orgs": []}
            self._say(200, {**about, "auth": {"accessToken": {"role": self.known.role}}})
        elif place[:2] == ["api", "validate-yaml"]:
            self._say(200, {"errors": [], "warnings": []})
        elif place[:3] == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif place[-4:] == ["info", "lfs", "objects", "batch"]:
            self._batch(json.loads(body))
        elif place[:2] == ["api", "models"]:
            self._model("/".join(place[2:4]), place[4:], method, body)
        elif place[2] == "resolve":
            self._send_file("/".join(place[:2]), place[3], "/".join(place[4:]), method)
        else:
            self._say(404, {"error": "Not found"})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'ada'}/{asked['name']}"
        if self.known.refuse is not None or not name.startswith("ada/"):
            self._say(self.known.refuse or 403, {"error": "You have no right to write here"})
        elif name in self.known.repositories:
            self._say(
                409,
                {"error": "You already created this model repo", "url": f"{self.known.url}/{name}"},
            )
        else:
            private = asked.get("private", asked.get("visibility") == "private")
            self.known.repositories[name] = Repository(bool(private))
            self._say(200, {"url": f"{self.known.url}/{name}"})

    def _model(self, name: str, rest: list[str], method: str, body: bytes) -> None:
        found = self.known.repositories[name]
        what, branch = (rest[0] if rest else ""), "/".join(rest[1:])
        if what == "branch":
            found.branches.setdefault(branch, dict(found.branches["main"]))
            self._say(200, {})
        elif what == "preupload":
            files = [self._mode(each, found.branches[branch]) for each in json.loads(body)["files"]]
            self._say(200, {"files": files})
        elif what == "commit":
            self._commit(name, branch, body)
        elif what == "tree":
            entries = found.at(rest[1]).items()
            self._say(200, [
                {"type": "file", "path": p, "size": len(c), "oid": _git_id(c)} for p, c in entries
            ])  # fmt: skip
        else:
            files = found.at(branch)
            about = {"_id": "1", "id": name, "modelId": name, "sha": _commit_of(files)}
            siblings = [{"rfilename": path} for path in files]
            rest_of = {"private": found.private, "tags": [], "downloads": 0, "likes": 0}
            self._say(200, {**about, **rest_of, "siblings": siblings})

    def _mode(self, asked: dict[str, Any], there: dict[str, bytes]) -> dict[str, Any]:
        kind = "lfs" if asked["path"].endswith(".safetensors") else "regular"
        answer = {"path": asked["path"], "uploadMode": kind, "shouldIgnore": False}
        content = there.get(asked["path"])
        if content is not None:
            answer["oid"] = (
                hashlib.sha256(content).hexdigest() if kind == "lfs" else _git_id(content)
            )
        return answer

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for each in asked["objects"]:
            entry = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.known.large:
                href = f"{self.known.url}/large/{each['oid']}"
                entry["actions"] = {"upload": {"href": href, "header": {}}}
            objects.append(entry)
        self._say(200, {"transfer": "basic", "objects": objects})

    def _take_large(self, oid: str, body: bytes) -> None:
        if self.known.takes == 0:
            self._say(500, {"error": "out of order"})
            return
        if self.known.takes is not None:
            self.known.takes -= 1
        assert hashlib.sha256(body).hexdigest() == oid
        self.known.large[oid] = body
        self.known.uploads += 1
        self._say(200, {})

    def _commit(self, name: str, branch: str, body: bytes) -> None:
        found = self.known.repositories[name]
        files = found.branches[branch]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                found.messages.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.known.large[value["oid"]]
        self._say(200, {
            "success": True, "commitOid": _commit_of(files),
            "commitUrl": f"{self.known.url}/{name}/commit/{_commit_of(files)}",
        })  # fmt: skip

    def _send_file(self, name: str, revision: str, path: str, method: str) -> None:
        files = self.known.repositories[name].at(revision)
        if path not in files:
            self._say(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        content = files[path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", _commit_of(files))
        self.end_headers()
        if method == "GET":
            self.wfile.write(content)

    def _say(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status >= 400:
            self.send_header("X-Error-Message", answer["error"])
        self.end_headers()
        self.wfile.write(content)


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _commit_of(files: dict[str, bytes]) -> str:
    found = hashlib.sha1()
    for path in sorted(files):
        found.update(path.encode() + hashlib.sha256(files[path]).digest())
    return found.hexdigest()
