"""torchrun's elastic rendezvous: a store that outlives the jobs that meet in it, and agents that come and go."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.commands.processes import Files, console_script, environment, free_port, torchrun
from tests.faults.jobs import started
from tests.machine import patient

pytestmark = pytest.mark.timeout(200)


def agent(files: Files, port: int, job: str, restarts: int = 0) -> tuple[str, ...]:
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", job)
    more = ("--local-addr", "127.0.0.1", "--max-restarts", str(restarts))
    return torchrun(2, console_script(files.folder), "--nnodes", "1", *more, *rendezvous)


def generate(files: Files, emulated: Path, port: int, job: str, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        (*agent(files, port, job), *files.options(emulated, "--quiet", "--max-new-tokens", "4", *options)),
        cwd=files.folder, env=environment(), capture_output=True, text=True, timeout=patient(60),
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_rendezvous_id_that_was_used_before_is_refused_and_a_new_one_runs(emulated, tmp_path):
    """torchrun itself refuses it before it starts a rank of ours; nothing of the earlier job is touched."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    files = Files(tmp_path)
    files.write_prompts([(5, 6), (7,), (8, 9, 10)])
    code, said = generate(files, emulated, store.port, "first")
    assert code == 0, said
    written = files.output.read_bytes()
    code, said = generate(files, emulated, store.port, "first", "--overwrite")
    assert code == 1 and "RendezvousClosedError" in said
    assert files.output.read_bytes() == written
    code, said = generate(files, emulated, store.port, "second", "--overwrite")
    assert code == 0, said
    assert (files.exit_code(), len(files.output.read_text().splitlines())) == (0, 3)


@pytest.mark.parametrize("restarts", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_new_agent_goes_on_with_what_a_lost_one_has_answered(restarts, emulated, tmp_path):
    """The new agent has restarted nothing and has --overwrite.

    It keeps a lost run's answers and replaces those of an ended run.
    """
    files = Files(tmp_path)
    files.write_prompts([tuple(range(3, 4 + row % 40)) for row in range(400)])
    options = ("--max-new-tokens", "24", "--ignore-eos", "--overwrite")
    with started(files, emulated, *options, front=agent(files, free_port(), "named")) as run:
        run.wait_for_lines(20)
        run.kill_all()
    written = files.output.read_bytes()
    whole = written[: written.rindex(b"\n") + 1]
    front = agent(files, free_port(), "named", restarts)
    with started(files, emulated, *options, "--seed", "1", front=front) as run:
        assert "seed was 0 and is 1" in run.end() and run.process.returncode == 1
    assert files.exit_code() == 2
    assert files.output.read_bytes() == written
    with started(files, emulated, *options, front=agent(files, free_port(), "named")) as run:
        said = run.end()
        assert run.process.returncode == 0, said
    assert "an earlier start of the rendezvous named was lost" in said
    assert files.output.read_bytes().startswith(whole) and len(files.rows()) == 400
    assert (files.exit_code(), files.report()["resumed"]["rows"]) == (0, whole.count(b"\n"))
    with started(files, emulated, *options, "--seed", "1", front=agent(files, free_port(), "named")) as run:
        said = run.end()
        assert run.process.returncode == 0, said
    assert (files.report()["resumed"]["rows"], len(files.rows())) == (0, 400)
