"""A Hugging Face hub on 127.0.0.1, with just enough HTTP for `datasets` and `huggingface_hub`.

Run as `python tests/utils/fake_hub.py FOLDER` it serves FOLDER/datasets/OWNER/NAME/… and
FOLDER/models/OWNER/NAME/…, and prints its address. /status/503 answers 503.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Serves ``folder`` from a thread; ``url`` is its address, ``requests`` what was asked."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.requests = folder, []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {self.path}")
        if path == "/":
            return self._send(b"hub")
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            kind, repository, rest = parts[1], self.server.folder.joinpath(*parts[1:4]), parts[4:]
            if not repository.is_dir():
                return self._missing("RepoNotFound")
            if not rest or rest[0] == "revision":
                names = [{"rfilename": entry["path"]} for entry in self._tree(repository, repository)]
                info = {"id": "/".join(parts[2:4]), "sha": REVISION, "siblings": names, "tags": []}
                return self._send(json.dumps(info | {"private": False, "disabled": False}).encode())
            if rest[0] == "tree":
                below = repository.joinpath(*rest[2:])
                if not below.is_dir():
                    return self._missing("EntryNotFound")
                return self._send(json.dumps(self._tree(repository, below)).encode())
            if rest[0] == "paths-info":
                return self._send(json.dumps(self._tree(repository, repository)).encode())
            return self._missing("EntryNotFound")
        if parts[0] == "status":
            return self._send(b"", int(parts[1]))
        if len(parts) < 5:
            return self._missing("EntryNotFound")
        if parts[0] != "datasets":
            parts.insert(0, "models")
        kind, owner, name, verb, _, *file = parts
        target = self.server.folder.joinpath(kind, owner, name, *file)
        if verb != "resolve" or not target.is_file():
            return self._missing("EntryNotFound")
        self._send(target.read_bytes())

    def _tree(self, repository: Path, below: Path) -> list[dict]:
        return [
            {
                "type": "directory" if path.is_dir() else "file",
                "path": path.relative_to(repository).as_posix(),
                "size": path.stat().st_size,
                "oid": hashlib.sha1(str(path).encode()).hexdigest(),
            }
            for path in sorted(below.glob("*" if "recursive=false" in self.path.lower() else "**/*"))
        ]

    def _missing(self, code: str) -> None:
        self._send(b"{}", 404, {"X-Error-Code": code})

    def _send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(body)),
            "ETag": f'"{hashlib.sha1(body).hexdigest()}"',
            "X-Repo-Commit": REVISION,
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


if __name__ == "__main__":
    with FakeHub(Path(sys.argv[1])) as hub:
        print(hub.url, flush=True)
        threading.Event().wait()
