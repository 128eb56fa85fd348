"""A hub on the loopback interface that speaks the protocol of `huggingface_hub`: repositories are directories.

with serve_hub({"tiny/llama": Repository({"main": directory})}) as hub:
    hub.endpoint  # for HF_ENDPOINT
"""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclasses.dataclass
class Repository:
    """Revisions of a repository by name, each a directory; its commit is a hash of its files."""

    revisions: dict[str, Path]
    token: str | None = None
    """What a gated repository asks for before it hands out files."""
    break_after: int | None = None
    """Bytes after which the next answer with weights breaks off."""

    def find(self, revision: str) -> tuple[str, Path] | None:
        """Return commit and directory of a branch, a tag or a commit."""
        for name, directory in self.revisions.items():
            commit = hash_directory(directory)
            if revision in (name, commit):
                return commit, directory
        return None


def list_files(directory: Path) -> dict[str, Path]:
    return {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}


def hash_directory(directory: Path) -> str:
    content = b"".join(name.encode() + path.read_bytes() for name, path in list_files(directory).items())
    return hashlib.sha1(content).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    repositories: dict[str, Repository]
    requests: list[tuple[str, str]]

    def do_GET(self):
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        self.requests.append((self.command, "/".join(parts)))
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        repository = self.repositories.get("/".join(parts[:2]))
        kind, revision, *path = [*parts[2:], *["revision", "main"][len(parts[2:]) :]]
        if repository is None:
            return self.refuse(401, "RepoNotFound")
        found = repository.find(revision)
        if found is None:
            return self.refuse(404, "RevisionNotFound")
        commit, directory = found
        files = list_files(directory)
        if is_api and kind == "tree":
            tree = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}
                for name, path in files.items()
            ]
            return self.answer(json.dumps(tree).encode(), kind="application/json")
        if is_api:
            siblings = [{"rfilename": name, "size": path.stat().st_size} for name, path in files.items()]
            about = {"id": "/".join(parts[:2]), "sha": commit, "private": False, "tags": [], "downloads": 0, "likes": 0}
            return self.answer(json.dumps(about | {"siblings": siblings}).encode(), kind="application/json")
        if repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}":
            return self.refuse(401, "GatedRepo")
        name = "/".join(path)
        if name not in files:
            return self.refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{_etag(files[name])}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        content = files[name].read_bytes()
        if self.command == "GET" and name.endswith(".safetensors") and repository.break_after is not None:
            limit, repository.break_after = repository.break_after, None
            return self.answer(content, limit=limit, **headers)
        self.answer(content, **headers)

    do_HEAD = do_GET

    def answer(self, body: bytes, *, kind: str = "application/octet-stream", limit: int | None = None, **headers):
        span = self.headers.get("Range")
        start = int(span.removeprefix("bytes=").split("-")[0]) if span else 0
        self.send_response(206 if span else 200)
        if span:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        for name, value in {"Content-Type": kind, "Content-Length": len(body) - start, **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[start:limit])
        if limit is not None:
            self.close_connection = True

    def refuse(self, status: int, code: str):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@dataclasses.dataclass
class LoopbackHub:
    endpoint: str
    requests: list[tuple[str, str]]
    """Method and path of each request."""

    def list_downloads(self) -> list[str]:
        """Return the names of the files that were asked for, and forget them."""
        paths = [path for verb, path in self.requests if verb == "GET" and "/resolve/" in path]
        files = [path.split("/resolve/")[1].split("/", 1)[1] for path in paths]
        self.requests.clear()
        return sorted(files)


@contextlib.contextmanager
def serve_hub(repositories: dict[str, Repository]):
    """Serve repositories until the context is left."""
    requests = []
    handler = type("Handler", (_Handler,), {"repositories": repositories, "requests": requests})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield LoopbackHub(f"http://127.0.0.1:{server.server_port}", requests)
        finally:
            server.shutdown()
            thread.join()
