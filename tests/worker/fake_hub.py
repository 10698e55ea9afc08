"""A Hugging Face Hub of our own on 127.0.0.1: as much of its HTTP interface as fetching a model takes."""

import dataclasses
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from types import TracebackType


@dataclasses.dataclass
class Repository:
    """files: name -> content. gated: only for those with the token. status: answered to everything if not 200.

    half: if given, large files stop in the middle until it is set.
    """

    files: dict[str, bytes]
    gated: bool = False
    status: int = 200
    sha: str = "1" * 40
    revisions: tuple[str, ...] = ("main",)
    half: threading.Event | None = None


class FakeHub:
    """The server, in a thread of its own; use in `with`. requests: (method, path) of all that was asked."""

    def __init__(self, repositories: dict[str, Repository], token: str = "hf_secret") -> None:
        self.repositories = repositories
        self.token = token
        self.requests: list[tuple[str, str]] = []
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="fake-hub")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def fetched(self) -> list[str]:
        """Names of the files whose content was sent."""
        return [path.rpartition("/")[2] for method, path in self.requests if method == "GET" and "/resolve/" in path]

    def __enter__(self) -> "FakeHub":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def _handler(hub: FakeHub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        # HTTP/1.0: no connection outlives its request, so that stop() is the end of everything
        def do_GET(self) -> None:
            self._serve(body=True)

        def do_HEAD(self) -> None:
            self._serve(body=False)

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

        def _serve(self, body: bool) -> None:
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            found = api or file
            repository = hub.repositories.get(found[1]) if found else None
            if found is None:
                self._send(404, {})
            elif repository is None:
                self._send(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."})
            elif repository.status != 200:
                self._send(repository.status, {})
            elif api:
                self._api(repository, api[1], api[2], api[3])
            elif file:
                self._file(repository, file[2], file[3], body)

        def _api(self, repository: Repository, name: str, kind: str | None, revision: str | None) -> None:
            if revision is not None and revision not in (*repository.revisions, repository.sha):
                self._send(404, {"X-Error-Code": "RevisionNotFound"})
                return
            sizes = {path: len(content) for path, content in repository.files.items()}
            answer: object = {
                "id": name,
                "modelId": name,
                "sha": repository.sha,
                "private": False,
                "gated": "auto" if repository.gated else False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": [{"rfilename": path, "size": size, "blobId": "0" * 40} for path, size in sizes.items()],
            }
            if kind == "tree":
                answer = [
                    {"type": "file", "path": path, "size": size, "oid": _etag(repository.files[path])}
                    for path, size in sizes.items()
                ]
            self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

        def _file(self, repository: Repository, revision: str, path: str, body: bool) -> None:
            authorized = self.headers.get("Authorization") == f"Bearer {hub.token}"
            if repository.gated and not authorized:
                self._send(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this model is restricted."})
                return
            content = repository.files.get(path)
            if content is None:
                self._send(404, {"X-Error-Code": "EntryNotFound"})
                return
            headers = {
                "ETag": f'"{_etag(content)}"',
                "X-Repo-Commit": repository.sha,
                "Content-Length": str(len(content)),
                "Accept-Ranges": "bytes",
            }
            first = len(content) // 2 if repository.half and len(content) > 2**20 else len(content)
            self._send(200, headers, content[:first] if body else b"")
            if body and first < len(content) and repository.half:
                repository.half.wait(30)
                self.wfile.write(content[first:])

        def _send(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(content))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    return Handler


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
