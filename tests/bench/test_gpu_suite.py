"""The suite for GPUs: which parts run, in which processes, and what stays if one of them hangs or dies.

A stand-in for the worker does what `sizes` says of each part: ends well, fails, hangs or dies.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner

from sarathi_pp.bench.gpu import parts, suite
from sarathi_pp.bench.gpu.document import SCHEMA, GpuDocument
from sarathi_pp.bench.gpu.parts import NAMES, choose
from sarathi_pp.bench.gpu.suite import Step, bench_gpu
from sarathi_pp.cli.main import cli
from sarathi_pp.errors import ConfigError
from sarathi_pp.trace.clock import SystemClock
from tests.machine import patient

WORKER = """
import json, os, subprocess, sys, tempfile, time
from pathlib import Path

path = Path(sys.argv[1])
request = json.loads(path.read_text())

def write(name, ended, met=True, **figures):
    checks = [{"part": name, "what": f"{name} is right", "seen": 1, "wanted": 1, "met": met}]
    partial = path.with_name("partial")
    partial.write_text(json.dumps({"figures": figures, "checks": checks, "ended": ended}))
    partial.replace(path.with_name(f"{name}.json"))

for name in request["limits"]:
    how = (request["sizes"] or {}).get(name, "well")
    own = {"device": how} if name == "machine" else {"pid": os.getpid(), "seen": sorted(request["parts"])}
    write(name, False, started=True, **own)
    if how == "hangs":
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        write(name, False, started=True, child=child.pid, model=tempfile.mkdtemp())
        time.sleep(60)
    if how == "dies":
        print("an illegal memory access", file=sys.stderr, flush=True)
        os._exit(3)
    if how == "fails":
        write(name, True, met=False, error="RuntimeError: no kernel image", **own)
        sys.exit()
    write(name, True, took_s=0.5, **own)
"""


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the stand-in. microbatches may take a second."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(suite, "_WORKER", ("-P", str(script)))
    limited = (replace(part, limit_s=1.0) if part.name == "microbatches" else part for part in parts.PARTS)
    monkeypatch.setattr(parts, "PARTS", tuple(limited))


def run(document: GpuDocument, *named: str, budget_s: float = 60.0, **how: str) -> list[str]:
    """Run the suite on the document, and return the parts that were started."""
    steps = list(bench_gpu(document, SystemClock(), budget_s, named, "cpu", how))
    return [step.part for step in steps if not step.ended]


def has_ended(pid: int) -> bool:
    """Wait for the end of a process. A container may have no process that reaps it."""
    clock = SystemClock()
    until_s = clock.now() + patient(10)
    while clock.now() < until_s:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        clock.sleep(0.02)
    return False


def whole(**figures: Any) -> GpuDocument:
    """Return a document in which every part is complete, except those with other figures."""
    known = {name: {"device": "well"} if name == "machine" else {"kept": True} for name in NAMES} | figures
    checks = [{"part": name, "what": "an old check", "seen": 0, "wanted": 1, "met": False} for name in NAMES]
    return GpuDocument(known, checks)


def test_all_parts_run_in_the_order_of_value_and_neighbours_share_a_process() -> None:
    document = GpuDocument()
    assert run(document) == list(NAMES)
    assert document.complete == {*NAMES} and document.met
    found = document.to_json()
    assert found["schema"] == SCHEMA and found["took_s"] == 0.5 * len(NAMES)
    assert [check["part"] for check in found["checks"]] == list(NAMES)
    processes = [document.parts[name]["pid"] for name in ("microbatches", "piggyback", "kernels", "attention")]
    assert len({*processes[:3]}) == 1 and processes[3] != processes[0]
    assert {"machine", "rates", "microbatches"} <= {*document.parts["profile"]["seen"]}, "it computes with these"


@pytest.mark.parametrize("how", ["hangs", "dies", "fails"])
def test_a_part_without_an_end_costs_only_its_own_time(how: str) -> None:
    document = GpuDocument()
    assert run(document, microbatches=how) == list(NAMES)
    assert document.complete == {*NAMES} - {"microbatches"} and not document.met
    found = document.parts["microbatches"]
    said = {"hangs": "killed after 1 s", "dies": "an illegal memory access", "fails": "no kernel image"}[how]
    assert said in found["error"]
    if how != "fails":  # the worker itself records the check of a part that fails
        (failed,) = (check for check in document.checks if not check["met"])
        assert (failed["part"], failed["what"]) == ("microbatches", "microbatches runs")
        assert found["started"], "figures that it had are kept"
    if how == "dies":
        assert "code 3" in found["error"]
    if how == "hangs":
        assert has_ended(found["child"]), "a hanging pipeline would keep the device"
        assert not Path(found["model"]).exists(), "models of the contest are gigabytes"
    assert document.parts["piggyback"]["pid"] == document.parts["kernels"]["pid"] != found.get("pid")


def test_the_budget_is_a_hard_bound() -> None:
    document, clock = GpuDocument(), SystemClock()
    begin_s = clock.now()
    assert run(document, "exact", "contest", budget_s=2.0, exact="hangs") == ["machine", "exact"]
    assert clock.now() - begin_s < 7
    assert {document.parts[name]["left_out"] for name in ("exact", "contest")} == {"the 2 s were over"}
    assert document.parts["exact"]["started"] and document.complete == {"machine"}


def test_a_command_that_is_stopped_leaves_no_worker() -> None:
    steps = bench_gpu(GpuDocument(), SystemClock(), 60.0, ("exact",), "cpu", {"exact": "hangs"})
    assert Step("exact", False) in steps, "iterates until then"
    (started,) = [child for child in psutil.Process().children() if "worker.py" in " ".join(child.cmdline())]
    steps.close()  # as an exception in the middle of it does
    assert has_ended(started.pid)


def test_an_existing_document_is_completed() -> None:
    document = whole(rates={"error": "E"}, contest={"left_out": "the 9 s were over"})
    del document.parts["nccl"]
    assert run(document) == ["machine", "rates", "nccl", "contest"]
    assert document.complete == {*NAMES} and document.parts["exact"] == {"kept": True}
    again = {check["part"] for check in document.checks if check["met"]}
    assert again == {"machine", "rates", "nccl", "contest"}, "the other checks stay"
    assert run(document) == ["machine"]


def test_named_parts_run_again_and_the_others_stay() -> None:
    document = whole(exact={"error": "E"})
    assert run(document, "contest", "piggyback") == ["machine", "piggyback", "contest"]
    assert document.parts["exact"] == {"error": "E"} and document.parts["rates"] == {"kept": True}
    assert "kept" not in document.parts["contest"]


def test_what_a_part_needs_runs_before_it() -> None:
    assert [part.name for part in choose(("attention",), ())] == ["machine", "rates", "attention"]
    assert [part.name for part in choose(("attention",), ("rates",))] == ["machine", "attention"]


def test_figures_are_not_lost_to_a_lack_of_time() -> None:
    document = whole()
    run(document, "exact", "contest", budget_s=2.0, exact="hangs")
    assert document.parts["exact"] == document.parts["contest"] == {"kept": True}


def test_figures_of_two_machines_are_not_mixed() -> None:
    document = whole()
    with pytest.raises(ConfigError, match="device was 'well' and is 'H200'"):
        run(document, machine="H200")
    assert run(whole(), "rates", machine="well") == ["machine", "rates"]


@pytest.mark.parametrize("earlier", [{"error": "E"}, {"left_out": "the 9 s were over"}, None])
def test_a_document_without_its_machine_is_completed(earlier: dict[str, Any] | None) -> None:
    document = whole(machine=earlier)
    if earlier is None:
        del document.parts["machine"]
    assert run(document) == ["machine"] and document.complete == {*NAMES}


def test_a_machine_that_fails_is_not_taken_for_another_one() -> None:
    with pytest.raises(ConfigError, match="the part machine failed, .*: RuntimeError: no kernel image"):
        run(whole(), machine="fails")
    document = whole()
    run(document, budget_s=0.0)
    document.put("machine", {"left_out": "the 9 s were over"}, ())
    assert document.parts["machine"] == {"device": "well"}


def test_a_check_that_was_missed_outlasts_a_lack_of_time() -> None:
    document = whole()
    missed = {"part": "exact", "what": "tokens", "seen": False, "wanted": True, "met": False}
    document.put("exact", {"left_out": "the 9 s were over"}, [missed])
    assert "exact" not in document.complete and missed in document.checks


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not a document of bench gpu"),
        ("[]", "not a document of bench gpu"),
        ('{"schema": "sarathi-pp/gpu/2", "checks": []}', "sarathi-pp/gpu/2"),
    ],
)
def test_another_file_is_refused(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        GpuDocument.read(path)
    assert path.read_text() == text


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_the_command_writes_after_every_part_and_completes_its_file(gpu: None, tmp_path: Path) -> None:
    path = tmp_path / "new" / "gpu.json"
    command = ["bench", "gpu", "--output", str(path)]
    done = CliRunner().invoke(cli, [*command, "--parts", "nccl, rates"], standalone_mode=False)
    assert done.return_value == 0, done.output
    found = json.loads(path.read_text())
    assert [name for name in NAMES if name in found] == ["machine", "rates", "nccl"]
    assert "met  nccl is right" in done.stderr and json.loads(done.stdout) == found
    found["checks"][0]["met"] = False
    path.write_text(json.dumps(found))
    done = CliRunner().invoke(cli, [*command, "--parts", "contest"], standalone_mode=False)
    assert done.return_value == 0, "the check of machine has run again"
    assert {"rates", "nccl", "contest"} <= json.loads(path.read_text()).keys()
    assert [other.name for other in path.parent.iterdir()] == ["gpu.json"]


def test_an_unknown_part_is_refused_with_the_names_of_all() -> None:
    done = CliRunner().invoke(cli, ["bench", "gpu", "--parts", "rates,speed"])
    assert done.exit_code == 2 and "'speed' is not a part" in done.stderr
    assert ", ".join(NAMES) in " ".join(done.stderr.split())


def test_without_a_gpu_the_command_says_so() -> None:
    result = CliRunner().invoke(cli, ["bench", "gpu"])
    assert result.exception is not None and "torch finds no CUDA device here" in str(result.exception)
