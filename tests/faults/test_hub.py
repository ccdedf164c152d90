"""Models by their names on a hub, which is a server of the test's: as it should be, and as it should not."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.faults.jobs import answers, started
from tests.runtime.processes import Files, free_port

pytestmark = pytest.mark.timeout(200)

NAME, COMMIT = "someone/small-llama", "0123456789abcdef0123456789abcdef01234567"
PROMPTS = [tuple(range(3, 10 + row)) for row in range(4)]
OPTIONS = ("--max-new-tokens", "4", "--ignore-eos")
# The hub's client waits 10 s for an answer; three times that.
NO_ANSWER_END_S = 3 * 15.0


class Hub(BaseHTTPRequestHandler):
    """One repository, of the files in `directory`; status: what else it answers; quiet: it takes requests and waits."""

    directory: Path
    status: int = 200
    headers_of_error: dict[str, str] = {}
    quiet: Event | None = None

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
            self.reply(200, json.dumps({"id": NAME, "sha": COMMIT}).encode(), {}, body)
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": oid(file)}
                for file in self.directory.iterdir()
            ]
            self.reply(200, json.dumps(files).encode(), {}, body)
        else:
            file = self.directory / path.rpartition("/")[2]
            headers = {"ETag": f'"{oid(file)}"', "X-Repo-Commit": COMMIT}
            self.reply(200, file.read_bytes(), headers, body)

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
    """The address of a hub of that kind."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("ThisHub", (Hub,), kind)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path)
    files.write_prompts(PROMPTS)
    return files


def from_hub(
    files: Files, endpoint: str, name: str = NAME, *, offline: str = "0", stages: str = "1"
) -> tuple[int, str]:
    """The exit code of a run whose hub is there, and what it has said."""
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(files.folder / "home"), "HF_HUB_OFFLINE": offline}
    with started(files, Path(name), *OPTIONS, "--stages", stages, "--overwrite", **hub) as run:
        said = run.end()
        return run.process.returncode, said


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_a_model_is_fetched_once_and_then_needs_no_hub(stages, files, model):
    with started(files, model, *OPTIONS) as run:
        assert run.end() == "" and run.process.returncode == 0
    expected = answers(files)
    with serving(directory=model) as endpoint:
        code, said = from_hub(files, endpoint, stages=stages)
        assert code == 0, said
    assert answers(files) == expected
    for offline in "01":
        code, said = from_hub(files, endpoint, offline=offline, stages=stages)
        assert code == 0, said
        assert answers(files) == expected


def expect_one_line(code: int, said: str) -> None:
    assert code == 66, said
    line = said.strip().splitlines()[-1]
    assert line.startswith(f"MissingError: --model {NAME} is no directory here and could not be fetched from the Hub (")
    assert "give a directory, or check the name, the network and `hf auth login`" in line
    assert "Traceback" not in said and said.count("MissingError") == 1


@pytest.mark.parametrize("stages", ["1", "2"])
@pytest.mark.parametrize("offline", "01")
def test_no_network(offline, stages, files):
    expect_one_line(*from_hub(files, f"http://127.0.0.1:{free_port()}", offline=offline, stages=stages))
    assert not files.output.exists()


@pytest.mark.parametrize(
    ("status", "headers"),
    [(404, {"X-Error-Code": "RepoNotFound"}), (403, {"X-Error-Code": "GatedRepo"}), (401, {}), (503, {})],
)
def test_a_repository_that_is_missing_or_gated_or_a_hub_that_is_ill(status, headers, files):
    with serving(status=status, headers_of_error=headers) as endpoint:
        expect_one_line(*from_hub(files, endpoint))
    assert not files.output.exists()


def test_a_hub_that_does_not_answer(files):
    quiet = Event()
    with serving(quiet=quiet) as endpoint:
        began_s = time.monotonic()
        try:
            expect_one_line(*from_hub(files, endpoint))
            assert time.monotonic() - began_s < NO_ANSWER_END_S
        finally:
            quiet.set()
