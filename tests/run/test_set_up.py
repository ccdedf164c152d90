"""Leftovers of a failed set-up, and the order in which a successful run leaves the others and shows its report."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sarathi_pp.cli.main import main
from sarathi_pp.cli.show import BatchConsoleDisplay
from sarathi_pp.config import RunConfig
from sarathi_pp.distributed.agreement import Step
from sarathi_pp.distributed.control_plane import ControlPlane
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.errors import CapacityError
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.process.watchdog import Watchdog
from sarathi_pp.run import rank as rank_module
from sarathi_pp.run.preflight import Preflight
from sarathi_pp.run.rank import set_up
from sarathi_pp.run.setup import Member, _share_captures, agree_on_start
from sarathi_pp.stages.emulated_stage import emulated_facts, with_profile
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.wire.mesh import Mesh
from tests.core.cost.test_profile import PROFILE

EXAMPLES = Path(__file__).parents[2] / "examples"


def trace_writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "trace-writer"]


def test_edges_that_do_not_open_leave_no_open_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        assert len(set(trace_writers()) - before) == 1
        raise CapacityError("no memory for edges")

    before = set(trace_writers())
    monkeypatch.setattr(rank_module, "open_pipeline", refuse)
    config = with_profile(RunConfig(model=""), PROFILE)
    facts = emulated_facts(PROFILE, config.page_size)
    checked = Preflight(config, None, PROFILE, facts, GenerationDefaults(), RunDirectory(tmp_path / "run"))
    member = Member(checked, ControlPlane.join(RankEnvironment(), 60, 60), Watchdog(None), SystemClock())
    with pytest.raises(CapacityError, match="no memory for edges"):
        set_up(member, agree_on_start(member))
    assert set(trace_writers()) <= before
    member.plane.leave()


def test_ranks_that_fail_while_they_introduce_themselves_leave_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    monkeypatch.setattr("sarathi_pp.distributed.control_plane._connect", lambda *args: None)
    monkeypatch.setattr(ControlPlane, "leave", lambda plane: left.append(plane))
    with pytest.raises(AssertionError):  # there is no connection
        ControlPlane.join(RankEnvironment(world_size=2), 60, 60)
    assert len(left) == 1


@pytest.mark.parametrize("rank", range(4))
def test_no_rank_of_a_stage_captures_graphs_if_one_cannot(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 3 cannot, which is a rank of the second stage. The other rank of that stage logs the reason."""
    mesh = Mesh(stages=2, shards=2)
    member: Any = SimpleNamespace(mesh=mesh, coordinate=mesh.coordinate(rank))
    maker: Any = SimpleNamespace(captures=rank != 3)
    _share_captures(member, maker, Step(answers=[{"captures": each != 3} for each in range(4)]))
    assert maker.captures == (rank < 2)
    assert ("another rank cannot capture" in caplog.text) == (rank == 2)


def test_a_report_is_shown_once_the_run_has_left_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader may take any time: no other rank waits for it, and the watchdog is closed."""
    order = []
    for owner, name in (
        (ControlPlane, "leave"),
        (BatchConsoleDisplay, "fold"),
        (BatchConsoleDisplay, "show"),
        (Watchdog, "close"),
    ):
        work = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, _work=work, _name=name: (order.append(_name), _work(*args))[1])
    assert answer_one(tmp_path, monkeypatch) == 0
    assert order == ["fold", "leave", "close", "show"]


def test_the_tokenizer_is_loaded_before_the_edges_have_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is silent while it loads. After the set-up, this would count against --peer-timeout."""
    order = []
    for owner, name in ((Preflight, "tokenizer"), (rank_module, "open_pipeline"), (ControlPlane, "end_set_up")):
        work = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, _work=work, _name=name: (order.append(_name), _work(*args))[1])
    assert answer_one(tmp_path, monkeypatch) == 0
    assert order == ["tokenizer", "open_pipeline", "end_set_up"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_report_is_shown_changes_nothing_about_the_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []

    def show(display: BatchConsoleDisplay, report: dict[str, Any]) -> None:
        os.kill(os.getpid(), number)
        time.sleep(5)
        shown.append(report)

    monkeypatch.setattr(BatchConsoleDisplay, "show", show)
    assert answer_one(tmp_path, monkeypatch) == 0
    assert (tmp_path / "out.jsonl.run" / "exit_code").read_text() == "0\n"
    assert shown == [], "it went on"


def answer_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Run `generate` in this process; return its exit code."""
    # Other tests in this process may leave threads, and with them a rank would not return.
    monkeypatch.setattr("sarathi_pp.run.ending._communicates", lambda: False)
    (folder / "in.jsonl").write_text('{"prompt_token_ids": [3, 4]}\n')
    files = ("--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl"))
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--emulate", str(EXAMPLES / "emulated.json"), "--stages", "1", "--quiet", *files])
    return ended.value.code
