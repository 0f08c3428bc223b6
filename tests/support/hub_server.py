"""HubServer: an HTTP server on loopback that speaks the part of the Hugging Face Hub's API that downloads use."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_PATHS = re.compile(r"/api/models/(?P<api_id>[^/]+/[^/]+)/(?P<api>revision|tree)/(?P<api_rev>[^/?]+)|"
                    r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)")  # fmt: skip


@dataclass
class HubServer:
    """Models that the server has, and the faults that it is to show.

    Attributes:
        models: ORG/NAME |-> the directory of its files.
        commit: the one commit of every model.
        branches: names of the commit.
        gated: models that need `token`.
        interrupt: file |-> number of GET requests whose response breaks off in the middle.
        corrupt: file |-> number of GET requests whose response has wrong bytes.
        num_gets: file |-> number of GET requests.
    """

    models: dict[str, Path]
    commit: str = COMMIT
    branches: set[str] = field(default_factory=lambda: {"main"})
    gated: set[str] = field(default_factory=set)
    token: str = "hf_right"
    interrupt: Counter[str] = field(default_factory=Counter)
    corrupt: Counter[str] = field(default_factory=Counter)
    num_gets: Counter[str] = field(default_factory=Counter)
    url: str = ""

    def take(self, faults: Counter[str], file: str) -> bool:
        """Return whether a fault is due, and count it."""
        is_due = faults[file] > 0
        faults[file] -= is_due
        return is_due


@contextmanager
def serve_hub(hub: HubServer) -> Iterator[HubServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def hub_of_this_process(models: dict[str, Path], cache: Path) -> Iterator[HubServer]:
    """Serve models, and point huggingface_hub of this process at the server, with an empty cache and no token."""
    with serve_hub(HubServer(models)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", server.url)
        url = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.delenv("HF_TOKEN", raising=False)
        yield server


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        found = _PATHS.match(self.path)
        if found is None:
            return self._refuse(404, "EntryNotFound")
        model_id, revision = found["api_id"] or found["id"], found["api_rev"] or found["rev"]
        folder = self.hub.models.get(model_id)
        if folder is None:
            return self._refuse(404 if self._has_token else 401, "RepoNotFound")
        if model_id in self.hub.gated and not self._has_token:
            return self._refuse(403, "GatedRepo")
        if revision not in self.hub.branches | {self.hub.commit}:
            return self._refuse(404, "RevisionNotFound")
        if found["api"] == "revision":
            return self._send_json({"id": model_id, "sha": self.hub.commit, "siblings": [], "tags": []})
        if found["api"] == "tree":
            return self._send_json([_entry(folder, path) for path in _files(folder)])
        return self._send_file(folder, found["file"])

    @property
    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _refuse(self, status: int, code: str) -> None:
        self._send_headers(status, {"X-Error-Code": code, "X-Error-Message": code, "Content-Length": "0"})

    def _send_json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self._send_headers(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _send_file(self, folder: Path, name: str) -> None:
        if not (folder / name).is_file():
            self._refuse(404, "EntryNotFound")
            return
        content = (folder / name).read_bytes()
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {
            "X-Repo-Commit": self.hub.commit,
            "ETag": f'"{_etag(name, content)}"',
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(content) - start),
        }
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send_headers(206 if start else 200, headers)
        if self.command == "HEAD":
            return
        self.hub.num_gets[name] += 1
        if self.hub.take(self.hub.interrupt, name):
            self.wfile.write(content[start : start + (len(content) - start) // 2])
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
        elif self.hub.take(self.hub.corrupt, name):
            self.wfile.write(bytes(byte ^ 1 for byte in content[start:]))
        else:
            self.wfile.write(content[start:])

    def _send_headers(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Connection": "close"} | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    name, content = path.relative_to(folder).as_posix(), path.read_bytes()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": _git_id(content)}
    if _is_large(name):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry


def _etag(name: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if _is_large(name) else _git_id(content)


def _is_large(name: str) -> bool:
    """Return whether the hub keeps the file under Git LFS."""
    return name.endswith((".safetensors", ".bin", ".model", ".gguf"))


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
