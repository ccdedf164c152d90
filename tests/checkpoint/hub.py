"""A model hub on loopback: one repository of a directory's files, at one commit, with a log of the requests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

NAME, COMMIT = "someone/small-llama", "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """A hub with one repository of the files in `directory`.

    Args:
        status: the response instead of 200.
        quiet: accept requests and never answer.
        gone: the commit listed first, if the main branch moves after that.
        served: the files of which bytes were sent, in order.
    """

    directory: Path
    status: int = 200
    headers_of_error: dict[str, str] = {}
    quiet: Event | None = None
    gone: str | None = None
    served: list[str] = []

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        if self.quiet is not None:
            self.quiet.wait()
            return
        path = self.path.partition("?")[0]
        if self.status != 200:
            self.reply(self.status, b"{}", self.headers_of_error, body)
        elif path.startswith(f"/api/models/{NAME}/revision/") or path == f"/api/models/{NAME}":
            listed = self.gone if self.gone is not None and "/revision/" not in path else COMMIT
            siblings = [{"rfilename": name} for name in self.names()]
            self.reply(200, json.dumps({"id": NAME, "sha": listed, "siblings": siblings}).encode(), {}, body)
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            files = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": oid(file)}
                for name, file in self.names().items()
            ]
            self.reply(200, json.dumps(files).encode(), {}, body)
        else:
            name = path.removeprefix(f"/{NAME}/resolve/").partition("/")[2]
            file = self.names().get(name)
            if file is None:
                self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body)
                return
            if body:
                self.served.append(name)
            headers = {"ETag": f'"{oid(file)}"', "X-Repo-Commit": COMMIT}
            self.reply(200, file.read_bytes(), headers, body)

    def names(self) -> dict[str, Path]:
        files = sorted(path for path in self.directory.rglob("*") if path.is_file())
        return {str(path.relative_to(self.directory)): path for path in files}

    def reply(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serving(**kind: object) -> Iterator[str]:
    """Yield the address of such a hub."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("ThisHub", (Hub,), kind)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
