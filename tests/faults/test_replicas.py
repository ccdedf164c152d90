"""A replica that dies, by any of its ranks, leaves its requests to the others: nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.commands.processes import Files, console_script, free_port, torchrun
from tests.faults.jobs import Started, answers, num_lines, started
from tests.machine import patient

ROWS = 120
NEW_TOKENS = 12
# A death may take up to 5 s after a peer's end, on a machine that is busy with other things.
MOST_S = 15

PROFILE = {
    "schema": "sarathi-pp/profile/1",
    **{"model": "synthetic", "device": "cpu", "dtype": "float32", "hidden_size": 16, "num_layers": 4, "tile": 1},
    "stages": [
        {"layers": [0, 2], "a0": 0.01, "a1": 1e-4, "a2": 0, "a3": 0, "a4": 0, "head_s": 0, "page_bytes": 0},
        {"layers": [2, 4], "a0": 0.01, "a1": 1e-4, "a2": 0, "a3": 0, "a4": 0, "head_s": 0, "page_bytes": 0},
    ],
    **{"link": {"latency_s": 0, "bytes_per_s": 1e10}, "jitter_cv": 0, "pages": 400, "max_num_seqs": 8},
}

pytestmark = pytest.mark.timeout(180)


class EmulatedFiles(Files):
    """Files of a run whose stages sleep: the death is real, the computation is emulated."""

    def options(self, model, *more):
        profile = self.folder / "profile.json"
        profile.write_text(json.dumps(PROFILE))
        names = ("--emulate", str(profile), "--input", str(self.input), "--output", str(self.output))
        return ("generate", *names, *more)


@pytest.fixture
def files(tmp_path):
    made = EmulatedFiles(tmp_path)
    made.write_prompts([(7,) * (8 + row % 40) for row in range(ROWS)], max_new_tokens=NEW_TOKENS)
    return made


SHAPE = ("--replicas", "2", "--stages", "2", "--peer-timeout", "10")


def expected(tmp_path_factory, files: Files) -> dict:
    """Return the answers of one undisturbed pipeline, which depend on request and position alone."""
    alone = EmulatedFiles(tmp_path_factory.mktemp("alone"))
    alone.input.write_text(files.input.read_text())
    with started(alone, files.folder, "--stages", "2") as run:
        assert run.process.wait(patient(100)) == 0, run.end()
    return answers(alone)


def lose(run: Started, rank: int, number: signal.Signals = signal.SIGKILL) -> str:
    """Signal that rank after a fifth is answered; return the run's output at its end."""
    run.wait_for_lines(ROWS // 5)
    run.stage(rank).send_signal(number)
    return run.end()


@pytest.mark.parametrize("rank", [3, *(pytest.param(rank, marks=pytest.mark.full) for rank in (1, 2))])
def test_a_lost_replicas_requests_go_to_the_other(rank, files, tmp_path_factory):
    """Ranks 3 and 2 are a later stage and the leader of replica 1; rank 1 is the last stage of rank 0's replica."""
    with started(files, files.folder, *SHAPE) as run:
        said = lose(run, rank)
        assert run.process.returncode == 0, said
    replica = 0 if rank == 1 else 1
    assert f"of replica {replica} (rank {rank}) was killed by SIGKILL" in said
    assert f"replica {replica} was lost" in said and "go to the other replicas" in said
    assert answers(files) == expected(tmp_path_factory, files)
    report = files.report()
    assert report["lost_replicas"] == [replica] and {one["stage"] for one in report["per_stage"]} == {0, 1}
    attempt = files.run / "attempt-0000"
    assert sorted(path.name for path in attempt.iterdir()) == [
        f"lost-replica-{replica:04d}",
        f"replica-{1 - replica:04d}",
    ]


def test_errors_that_a_lost_replica_has_told_count_all_the_same(files):
    """Replica 0 reports rows that cannot run, and its trace of them is lost with it. They are among the first rows."""
    lines = files.input.read_text().splitlines()
    wrong = '{"prompt_token_ids": [7], "max_new_tokens": -1}'
    files.input.write_text("\n".join([wrong, *lines[:5], wrong, wrong, *lines[5:]]) + "\n")
    with started(files, files.folder, *SHAPE) as run:
        said = lose(run, 1)
        assert run.process.returncode == 3, said
    rows = files.rows()
    assert len(rows) == ROWS + 3 and sum("error" in row for row in rows) == 3
    report = files.report()
    assert report["lost_replicas"] == [0]
    assert {name: report[name] for name in ("requests", "completed", "failed")} == {
        "requests": ROWS + 3, "completed": ROWS, "failed": 3,
    }  # fmt: skip


def test_under_torchrun_a_lost_hosts_replica_leaves_its_requests_to_the_others(files, tmp_path, tmp_path_factory):
    """Each host has an agent and two ranks. The remaining agent waits for the other at torchrun's exit barrier.

    That takes five minutes, longer than a test can wait. So the test reads the exit code from the file of the run.
    """
    rdzv = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    first, second = (torchrun(2, console_script(tmp_path), *rdzv, "--node-rank", str(node)) for node in range(2))
    options = ("--replicas", "2", "--peer-timeout", "10")
    elsewhere = ("--run-dir", str(tmp_path / "elsewhere"))
    with (
        started(files, files.folder, *options, front=first) as left,
        started(files, files.folder, *options, *elsewhere, front=second) as lost,
    ):
        left.wait_for_lines(ROWS // 5)
        lost.kill_all()
        deadline_s = time.monotonic() + patient(60)
        while not (files.run / "exit_code").exists():
            assert left.process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.02)
    assert files.exit_code() == 0
    assert answers(files) == expected(tmp_path_factory, files)
    assert files.report()["lost_replicas"] == [1]


def test_a_replica_that_hangs_is_given_up_within_the_peer_timeout(files):
    with started(files, files.folder, *SHAPE) as run:
        run.wait_for_lines(ROWS // 5)
        began_s = time.monotonic()
        run.stage(3).suspend()
        said = run.end()
        assert run.process.returncode == 0, said
    assert "replica 1 was lost" in said
    assert len(answers(files)) == ROWS
    assert time.monotonic() - began_s < patient(3 * 10 + 60)  # the timeout three times over, and all the work once more


def test_a_reader_that_comes_late_costs_no_replica(files):
    """Replicas report progress every second; rank 0 does not read it while it waits for its reader."""
    os.mkfifo(files.output)
    with started(
        files, files.folder, "--replicas", "2", "--stages", "2", "--peer-timeout", "3", "--run-dir", str(files.run)
    ) as run:
        run.stage(3)
        deadline_s = time.monotonic() + patient(60)
        while not (files.run / "attempt-0000" / "replica-0001").exists():
            assert time.monotonic() < deadline_s, "the replicas do not begin"
            time.sleep(0.05)
        time.sleep(15)  # enough messages to fill an edge's buffers, and twice the timeout
        with open(files.output) as reader:
            rows = [json.loads(line) for line in reader]
        said = run.end()
        assert run.process.returncode == 0, said
    assert "was lost" not in said and len({row["id"] for row in rows}) == len(rows) == ROWS
    assert files.report()["lost_replicas"] == []


def test_without_rank_0_the_run_ends_and_is_gone_on_with(files, tmp_path_factory):
    with started(files, files.folder, *SHAPE) as run:
        family = run.family
        run.wait_for_lines(ROWS // 5)
        began_s = time.monotonic()
        run.stage(0).kill()
        said = run.end()
        assert run.process.returncode == 75, said
        assert time.monotonic() - began_s < MOST_S
        assert not [process for process in family if process.is_running()]
    done = num_lines(files.output)
    assert 0 < done < ROWS
    with started(files, files.folder, *SHAPE, "--resume") as run:
        said = run.end()
        assert run.process.returncode == 0, said
    assert answers(files) == expected(tmp_path_factory, files)
    assert files.report()["resumed"]["rows"] >= done - 1


def test_a_restart_brings_lost_replicas_back(files, tmp_path_factory):
    with started(files, files.folder, *SHAPE, "--max-restarts", "1") as run:
        run.wait_for_lines(ROWS // 5)
        run.stage(0).kill()
        said = run.end()
        assert run.process.returncode == 0, said
    assert "restart 1 of 1" in said
    assert answers(files) == expected(tmp_path_factory, files)
    assert files.report()["lost_replicas"] == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.full)]
)
def test_told_to_stop_all_replicas_finish_what_runs_and_begin_nothing_more(number, code, files):
    with started(files, files.folder, *SHAPE) as run:
        run.wait_for_lines(ROWS // 5)
        run.process.send_signal(number)
        said = run.end()
        assert run.process.returncode == code, said
    done = num_lines(files.output)
    assert ROWS // 5 <= done < ROWS
    report = files.report()
    assert report["stopped_by"] == number.name and report["lost_replicas"] == [] and report["replicas"] == 2
    with started(files, files.folder, *SHAPE, "--resume") as run:
        said = run.end()
        assert run.process.returncode == 0, said
    assert len(answers(files)) == ROWS
