"""Models by their names on a hub, which is a server of the test: working, and failing in several ways."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event

import pytest

from tests import thinning
from tests.checkpoint.hub import NAME, serving
from tests.commands.processes import Files, free_port
from tests.faults.jobs import answers, started

pytestmark = pytest.mark.timeout(200)

PROMPTS = [tuple(range(3, 10 + row)) for row in range(4)]
OPTIONS = ("--max-new-tokens", "4", "--ignore-eos")
# The hub's client waits 10 s for an answer; this is three times that.
NO_ANSWER_END_S = 3 * 15.0


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path)
    files.write_prompts(PROMPTS)
    return files


def from_hub(
    files: Files, endpoint: str, name: str = NAME, *, offline: str = "0", stages: str = "1"
) -> tuple[int, str]:
    """Return the exit code and the output of a run whose hub is up."""
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
    for offline in "01" if thinning.full else "1":  # tests/checkpoint/test_fetch.py has both
        code, said = from_hub(files, endpoint, offline=offline, stages=stages)
        assert code == 0, said
        assert answers(files) == expected


def expect_one_line(code: int, said: str) -> None:
    assert code == 66, said
    line = said.strip().splitlines()[-1]
    why = "is not a local directory and could not be fetched from the Hub ("
    assert line.startswith(f"MissingError: --model {NAME} {why}")
    assert "give a directory, or check the name, the network and `hf auth login`" in line
    assert "Traceback" not in said and said.count("MissingError") == 1


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
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
