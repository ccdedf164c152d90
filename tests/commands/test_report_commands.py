"""`report`, `compare` and the live figures, on runs of real processes with emulated stages."""

from __future__ import annotations

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from sarathi_pp.errors import InputError, MissingError
from sarathi_pp.report.run_reader import read_run
from tests.commands.processes import COMMAND, Files, environment, free_port, run
from tests.commands.test_emulated import write_profile
from tests.machine import patient

pytestmark = pytest.mark.timeout(180)

CAUSES = {
    *("ramp_s", "prefill_variance_s", "prefill_decode_s", "decode_context_s", "stage_imbalance_s"),
    *("communication_s", "host_s", "starvation_s", "unexplained_s"),
}


def command(folder: Path, stages: int, *options: str, num_requests: int = 12) -> tuple[str, ...]:
    files = Files(folder)
    profile = write_profile(folder / "profile.json", 2, a0=0.01, a1=5e-5, a4=1e-4)
    files.write_prompts([tuple(range(3, 100 + 20 * index)) for index in range(num_requests)], max_new_tokens=5)
    # Each prompt begins with the one before it. With a prefix cache they would wait for each other.
    where = ("--input", str(files.input), "--output", str(files.output), "--prefix-cache", "off")
    return (*COMMAND, "generate", "--emulate", str(profile), "--stages", str(stages), *where, *options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the run directories of a run with two stages and a run with one."""
    directories = []
    for stages in (2, 1):
        folder = tmp_path_factory.mktemp(f"stages-{stages}")
        run(command(folder, stages, "--quiet"), folder)
        directories.append(Files(folder).run)
    return directories


def test_the_report_in_every_form(runs, tmp_path):
    files = {form: tmp_path / f"run.{form}" for form in ("html", "perfetto", "csv")}
    options = [word for form, path in files.items() for word in (f"--{form}", str(path))]
    done = run((*COMMAND, "report", str(runs[0]), "--json", *options), tmp_path)
    report = json.loads(done.stdout)
    assert report["causes"].keys() == CAUSES
    stored = json.loads((runs[0] / "report.json").read_text())
    assert stored["causes"] == pytest.approx(report["causes"])
    measured = sum(stage["wall_s"] - stage["compute_s"] for stage in report["per_stage"])
    assert sum(report["causes"].values()) == pytest.approx(measured)
    assert len(report["advice"]) <= 3
    page = files["html"].read_text()
    assert page.startswith("<!doctype html>") and f"{report['bubble_ratio']:.1%}" in page
    assert json.loads(files["perfetto"].read_text())["traceEvents"]
    with files["csv"].open(newline="") as lines:
        spans = [line for line in csv.DictReader(lines) if line["text"] != "head"]
        assert len(spans) == 2 * report["microbatches"]


def test_a_fault_in_what_is_only_advised_costs_no_figure(runs, monkeypatch):
    monkeypatch.setattr("sarathi_pp.report.run_reader.advise", lambda *_, **__: 1 / 0)
    report = read_run(runs[0]).report
    assert report["advice"] == [] and "no advice: ZeroDivisionError: division by zero" in report["notes"]
    assert report["causes"].keys() == CAUSES


def test_who_interrupts_what_is_only_advised_has_the_figures(runs, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("sarathi_pp.report.run_reader.advise", interrupted)
    report = read_run(runs[0]).report
    assert report["advice"] == [] and "no advice: interrupted" in report["notes"]
    assert report["causes"].keys() == CAUSES


def test_a_run_that_is_ended_while_advice_is_looked_for_has_its_report(tmp_path):
    words = command(tmp_path, 1, "--quiet")[len(COMMAND) :]
    code = (
        "import os, sys; import sarathi_pp.report.run_reader as runs; from sarathi_pp.cli.main import cli\n"
        "runs.advise = lambda *_: os._exit(9)\ncli.main(sys.argv[1:], standalone_mode=False)"
    )
    done = subprocess.run((sys.executable, "-c", code, *words), cwd=tmp_path, env=environment(), timeout=patient(60))
    report = json.loads((Files(tmp_path).run / "report.json").read_text())
    assert done.returncode == 9 and report["causes"].keys() == CAUSES and report["advice"] == []


def test_what_a_run_was_given_is_what_a_trial_of_it_is_given(runs, tmp_path, monkeypatch):
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    facts = json.loads((copy / "run.json").read_text())
    known = {"max_num_seqs": 7, "request_rate": 2.5, "max_model_len": 99, "max_pages": 1234}
    given = []
    monkeypatch.setattr("sarathi_pp.report.run_reader.Rerun.of", lambda *_, **options: given.append(options))
    for attention in ("emulated", "sdpa"):
        (copy / "run.json").write_text(json.dumps({**facts, **known, "attention": attention}))
        read_run(copy)
    assert given == [
        {**known, "pages_follow_layers": follow, "keeps_states": False, "state_pages": 0.0} for follow in (False, True)
    ]


@pytest.mark.parametrize("value", [-1, 0, "many", None])
def test_limits_that_nobody_could_have_run_with_are_not_taken_from_run_json(value, runs, tmp_path):
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    facts = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**facts, "max_num_seqs": value, "request_rate": value}))
    assert read_run(copy).report.keys() >= {"max_model_len", "advice"}
    assert not read_run(copy).report.keys() & {"max_num_seqs", "request_rate"}


def test_what_start_up_made_is_spared_the_collector(tmp_path):
    """Otherwise the collector would stop a stage at random moments to visit all objects of all libraries."""
    words = command(tmp_path, 1, "--quiet")[len(COMMAND) :]
    code = (
        "import gc, sys; from sarathi_pp.cli.main import cli; before = gc.get_freeze_count()\n"
        "cli.main(sys.argv[1:], standalone_mode=False); print(before, gc.get_freeze_count(), len(gc.get_objects()))"
    )
    before, frozen, walked = map(int, run((sys.executable, "-c", code, *words), tmp_path).stdout.split()[-3:])
    assert before < 1000 < 50_000 < frozen and walked < frozen / 2


def test_the_table_has_causes_and_strips(runs, tmp_path):
    text = run((*COMMAND, "report", str(runs[0])), tmp_path).stdout
    assert "bubble by cause" in text and text.count("\nstage ") >= 2


def test_runs_side_by_side(runs, tmp_path):
    page = tmp_path / "both.html"
    compared = json.loads(run((*COMMAND, "compare", *map(str, runs), "--json", "--html", str(page)), tmp_path).stdout)
    assert [len(figure["values"]) for figure in compared["figures"].values()] == [2] * len(compared["figures"])
    assert page.read_text().startswith("<!doctype html>")
    assert "2 stages" in run((*COMMAND, "compare", *map(str, runs)), tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("report", "nowhere"), 66, "nowhere holds no trace. Give the directory of a run"),
        (("report", "RUN", "--html", "no/such/folder.html"), 74, "cannot write no/such/folder.html"),
        (("compare", "RUN"), 2, "give two or more run directories"),
    ],
)
def test_what_cannot_be_shown_is_refused(arguments, code, message, runs, tmp_path):
    words = [str(runs[0]) if word == "RUN" else word for word in arguments]
    done = subprocess.run(
        (*COMMAND, *words), cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=patient(60)
    )
    assert done.returncode == code
    assert message in " ".join(done.stderr.split())


def test_traces_that_lie_on_another_host_are_named_with_it(runs, tmp_path):
    elsewhere = tmp_path / "part.run"
    shutil.copytree(runs[0], elsewhere)
    (elsewhere / "attempt-0000" / "trace-00001-of-00002.jsonl").unlink()
    [mine] = {*json.loads((elsewhere / "run.json").read_text())["hosts"]}
    with pytest.raises(MissingError) as refused:
        read_run(elsewhere)
    assert f"holds 1 of 2 traces; missing: stage 1 ({mine})\n  try  again after the run has" in str(refused.value)
    (elsewhere / "run.json").unlink()
    with pytest.raises(MissingError, match="missing: stage 1\n"):
        read_run(elsewhere)


def test_what_is_no_part_of_a_run_is_passed_over_and_what_hides_one_is_named(runs, tmp_path):
    copy = tmp_path / "copy.run"
    shutil.copytree(runs[0], copy)
    attempt = copy / "attempt-0000"
    (copy / "attempt-0002.txt").touch()
    (attempt / "trace-foo-of-bar.jsonl").touch()
    (copy / "run.json").write_text('{"max_num_seqs": "many"}')
    assert read_run(copy).report["microbatches"] == read_run(runs[0]).report["microbatches"]
    (copy / "attempt-0001").mkdir()
    with pytest.raises(MissingError, match="attempt-0001 holds no trace.*--attempt reads an earlier attempt"):
        read_run(copy)
    read_run(copy, attempt=0)
    (copy / "attempt-0001").rmdir()
    (attempt / "trace-00002-of-00003.jsonl").touch()
    with pytest.raises(InputError, match="of runs with 2 and with 3 stages. Keep those of one run"):
        read_run(copy)


def test_a_metrics_port_that_is_taken_is_refused_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        options = command(tmp_path, 2, "--metrics-port", port)
        done = subprocess.run(
            options, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=patient(60)
        )
    assert done.returncode == 2 and f"--metrics-port {port}: cannot listen" in done.stderr
    assert not Files(tmp_path).output.exists() and not Files(tmp_path).run.joinpath("run.json").exists()


def test_a_run_in_progress_is_scraped_and_reported(tmp_path):
    port = free_port()
    options = ("--metrics-port", str(port), "--quiet", "--request-rate", "1000")
    process = subprocess.Popen(command(tmp_path, 2, *options, num_requests=400), cwd=tmp_path, env=environment())
    try:
        scraped = scrape(port)
        while "pipeline_bubble_ratio{" not in scraped:
            assert process.poll() is None, "the run ended before it could be looked at"
            scraped = scrape(port)
        for name in ("chunk_throughput", "kv_cache_fragmentation"):
            assert name in scraped
        report = {"microbatches": 0}
        while report["microbatches"] == 0:
            assert process.poll() is None, "the run ended before it could be reported on"
            done = reported(tmp_path)
            if "has just started; then try again" not in done.stderr:
                assert done.returncode == 0, done.stderr
                report = json.loads(done.stdout)
        assert any("the run goes on or was killed" in note for note in report["notes"])
    finally:
        process.terminate()
        process.wait(patient(30))


def reported(folder: Path) -> subprocess.CompletedProcess[str]:
    options = (*COMMAND, "report", str(Files(folder).run), "--json")
    return subprocess.run(options, cwd=folder, env=environment(), capture_output=True, text=True, timeout=patient(60))


def scrape(port: int) -> str:
    """Return the metrics, or nothing before the server is up."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=patient(5)) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:
        time.sleep(0.05)
        return ""


@pytest.mark.parametrize("form", ["--csv", "--perfetto", "--html"])
def test_a_dash_is_standard_output_alone(form, runs, tmp_path):
    done = run((*COMMAND, "report", str(runs[0]), form, "-"), tmp_path)
    run((*COMMAND, "report", str(runs[0]), form, "file", "--json"), tmp_path)
    assert done.stdout == (tmp_path / "file").read_text()
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("forms", [("--csv", "-", "--json"), ("--csv", "-", "--html", "-")])
def test_standard_output_takes_one_document(forms, runs, tmp_path):
    done = subprocess.run(
        (*COMMAND, "report", str(runs[0]), *forms), cwd=tmp_path, env=environment(), capture_output=True
    )
    assert done.returncode == 2 and done.stdout == b"" and b"all go to standard output" in done.stderr


@pytest.mark.parametrize("encoding", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
@pytest.mark.parametrize("command", ["report", "compare", "simulate"])
def test_a_terminal_without_unicode_gets_the_whole_table(command, encoding, runs, tmp_path):
    named = shutil.copytree(runs[0], tmp_path / "l\u00e4uft \u2588.run")
    words = {"report": [str(named)], "compare": [str(named), str(runs[0])]}
    words["simulate"] = ["--preset", "gpt3-a100-tp8pp8", "--workload", "uniform:n=4,min=9,max=9,pd=3"]
    done = subprocess.run(
        (*COMMAND, command, *words[command]),
        env={**environment(), "PYTHONCOERCECLOCALE": "0", **encoding},
        capture_output=True,
        timeout=patient(60),
    )
    assert done.returncode == 0 and b"Error" not in done.stderr, done.stderr
    assert done.stdout.isascii() and done.stdout.count(b"\n") > 2
    strips = [line for line in done.stdout.splitlines() if line.startswith(b"stage 0 ")]
    assert command != "report" or (b"@" in strips[0] and b"?" not in strips[0])


@pytest.mark.parametrize(
    "command", [("report", "RUN"), ("report", "RUN", "--json"), ("report", "RUN", "--csv", "-"), ("--version",)]
)
def test_a_full_disk_under_standard_output_is_one_line_and_74(command, runs, tmp_path):
    words = [str(runs[0]) if word == "RUN" else word for word in command]
    with open("/dev/full", "w") as full:
        done = subprocess.run((*COMMAND, *words), cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 74 and b"No space left" in done.stderr.splitlines()[-1], done.stderr
    assert b"Traceback" not in done.stderr
