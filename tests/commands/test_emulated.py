"""Emulated stages in real processes: the measured bubble follows the pipeline's recurrence."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.commands.processes import COMMAND, Files, environment, least_disturbed, run
from tests.machine import patient

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("awake")]

# Long compared with the time a busy machine takes to pass on a message, which is a bubble too.
MICROBATCH_S = 0.5
SIZES = [pytest.param(2, marks=pytest.mark.full), 4, pytest.param(8, marks=pytest.mark.full)]


def write_profile(path: Path, stages: int, links: list[dict[str, float]] | None = None, **coefficients: float) -> Path:
    costs = {"a0": 0.0, "a1": 0.0, "a2": 0.0, "a3": 0.0, "a4": 0.0} | coefficients
    profile = {
        "schema": "sarathi-pp/profile/1",
        "model": "synthetic",
        "device": "cpu",
        "dtype": "bfloat16",
        "hidden_size": 64,
        "num_layers": stages,
        "tile": 1,
        "stages": [{"layers": [stage, stage + 1], **costs} for stage in range(stages)],
        "link": {"latency_s": 0.0, "bytes_per_s": 1e10},
        **({"links": links} if links else {}),
        "jitter_cv": 0.0,
        "pages": 2000,
        "max_num_seqs": 64,
    }
    path.write_text(json.dumps(profile))
    return path


def emulate(folder: Path, stages: int, lengths: list[int], *options: str, **coefficients: float) -> dict[str, Any]:
    """Return the report of a run whose prompts each get one token."""
    files = Files(folder)
    profile = write_profile(folder / "profile.json", stages, **coefficients)
    files.write_prompts([tuple(range(3, 3 + length)) for length in lengths], max_new_tokens=1)
    where = ("--input", str(files.input), "--output", str(files.output), "--prefix-cache", "off")
    command = ("generate", "--emulate", str(profile), "--stages", str(stages), *where, "--quiet", *options)
    run((*COMMAND, *command), folder, timeout_s=120)
    assert len(files.rows()) == len(lengths)
    return files.report()


def exact_bubble(times: list[float], stages: int) -> float:
    """Compute the bubble of a first-in-first-out pipeline with P microbatches in flight and no cost but compute."""
    free = [0.0] * stages
    results: list[float] = []
    for index, seconds in enumerate(times):
        ready = results[index - stages] if index >= stages else 0.0
        for stage in range(stages):
            free[stage] = ready = max(ready, free[stage]) + seconds
        results.append(ready)
    return 1 - sum(times) / results[-1]


@pytest.mark.parametrize("stages", SIZES)
def test_equal_microbatches_have_the_bubble_of_fill_and_drain(stages, tmp_path):
    count = 20
    exact = (stages - 1) / (count + stages - 1)
    assert exact == pytest.approx(exact_bubble([MICROBATCH_S] * count, stages))

    def measure(folder: Path) -> dict[str, Any]:
        report = emulate(folder, stages, [64] * count, "--policy", "sarathi", "--chunk-size", "64", a0=MICROBATCH_S)
        assert report["microbatches"] == count
        return report

    def off(report: dict[str, Any]) -> float:
        return max(abs(stage["bubble_ratio"] - exact) for stage in report["per_stage"])

    report = least_disturbed(measure, tmp_path, off)
    assert report["bubble_ratio"] == pytest.approx(exact, abs=0.02)
    assert all(stage["bubble_ratio"] == pytest.approx(exact, abs=0.02) for stage in report["per_stage"])


@pytest.mark.parametrize("stages", SIZES)
def test_whole_prompts_have_the_bubble_of_their_schedule_and_it_is_explained(stages, tmp_path):
    lengths = [40, 400, 90, 700, 60, 300, 500, 30] * 3
    exact = exact_bubble([0.03 + 1.2e-3 * length for length in lengths], stages)

    def measure(folder: Path) -> dict[str, Any]:
        return emulate(folder, stages, lengths, "--policy", "orca", a0=0.03, a1=1.2e-3)

    def unexplained(report: dict[str, Any]) -> float:
        return abs(report["causes"]["unexplained_s"]) / sum(report["causes"].values())

    def off(report: dict[str, Any]) -> float:
        """Return the error as a share of its limit, scaled so that 0.02 means at the limit."""
        return max(abs(report["bubble_ratio"] - exact), 0.2 * unexplained(report))

    report = least_disturbed(measure, tmp_path, off)
    assert report["bubble_ratio"] == pytest.approx(exact, abs=0.02)
    assert unexplained(report) <= 0.1
    causes = report["causes"]
    outside_ramp = sum(causes.values()) - causes["ramp_s"]
    assert causes["prefill_variance_s"] >= 0.7 * outside_ramp  # the machine causes the remaining bubble


def test_an_edges_added_latency_is_waited_for_and_is_communication(tmp_path):
    """One request alone: a token goes once around, with 50 ms of delay to stage 1 and 100 ms back."""
    links = [{"latency_s": 0.0, "bytes_per_s": 1e10, "added_latency_s": added_s} for added_s in (0.05, 0.1)]
    profile = write_profile(tmp_path / "profile.json", 2, links, a0=0.02)
    files = Files(tmp_path)
    files.write_prompts([(3, 4, 5)], max_new_tokens=12)
    where = ("--input", str(files.input), "--output", str(files.output), "--quiet")
    command = (*COMMAND, "generate", "--emulate", str(profile), *where)
    run((*command, "--stages", "2"), tmp_path)
    report = files.report()
    around_s = report["wall_s"] / 12
    assert around_s >= 0.19 and report["causes"]["communication_s"] >= 0.9 * 2 * 0.15 * 12
    done = subprocess.run(
        (*command, "--stages", "1", "--overwrite"), cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "adds latency to the edges of 2 stages, but there are 1" in " ".join(done.stderr.split())


def test_a_run_without_a_model_does_not_take_the_seconds_of_importing_transformers():
    code = "import sys, sarathi_pp.run.rank; assert 'torch' in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([COMMAND[0], "-P", "-c", code], env=environment(), check=True, timeout=patient(60))


def test_the_answer_depends_on_request_and_position_alone(tmp_path):
    answers = []
    for stages in (1, 3):
        folder = tmp_path / str(stages)
        folder.mkdir()
        files = Files(folder)
        profile = write_profile(folder / "profile.json", 3, a0=1e-3)
        files.write_prompts([tuple(range(3, 40)), tuple(range(9, 20))], max_new_tokens=5)
        where = ("--input", str(files.input), "--output", str(files.output), "--quiet")
        run((*COMMAND, "generate", "--emulate", str(profile), "--stages", str(stages), *where), folder)
        answers.append(files.tokens())
        assert all(row["text"] is None for row in files.rows())
    assert answers[0] == answers[1] and len({*answers[0][0], *answers[0][1]}) > 5


def test_a_stage_that_lives_and_does_not_get_on_ends_the_run(tmp_path):
    """The stage's heartbeats show that it stays in the same microbatch. tests/faults/ tests a silent stage."""
    profile = json.loads(write_profile(tmp_path / "profile.json", 2, a0=0.01).read_text())
    profile["stages"][1]["a0"] = 1000.0
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    files = Files(tmp_path)
    files.write_prompts([(3, 4, 5)] * 8, max_new_tokens=1)
    where = ("--input", str(files.input), "--output", str(files.output), "--stages", "2", "--quiet")
    command = (*COMMAND, "generate", "--emulate", "profile.json", *where, "--peer-timeout", "2")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=patient(100)
    )
    said = " ".join(done.stderr.split())
    assert (done.returncode, files.exit_code()) == (75, 75), said
    assert (
        "stage 1 (rank 1" in said
        and "has been in one layer of its microbatch 0 for more than 2 s: it hangs, or" in said
    )


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--emulate", "nowhere.json"), 66, "cannot read the profile nowhere.json: No such file or directory"),
        (("--emulate", "broken.json"), 65, "broken.json: the profile's schema is None"),
        ((), 2, "give either --model or, to run without one, --emulate PROFILE"),
        (("--emulate", "broken.json", "--model", "m"), 2, "give either --model or"),
        (("--emulate", "good.json", "--attention", "sdpa"), 2, "so --attention cannot be honoured"),
        (("--emulate", "good.json", "--kv-cache-memory", "1GiB"), 2, "so --kv-cache-memory cannot be honoured"),
    ],
)
def test_what_cannot_be_emulated_is_refused(options, code, message, tmp_path):
    write_profile(tmp_path / "good.json", 2, a0=1e-3)
    (tmp_path / "broken.json").write_text("{}")
    Files(tmp_path).write_prompts([(3, 4)])
    command = (*COMMAND, "generate", "--input", "in.jsonl", "--output", "out.jsonl", *options)
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == code
    assert message in " ".join(done.stderr.split())


def test_prompts_with_a_common_beginning_compute_it_once(tmp_path):
    """Two prompts of 64 tokens, one after the other, begin with the same 40: two whole pages of 16.

    The first one leaves 4 full pages behind. The second one holds 2 of them, so 2 are idle while it runs.
    """
    profile, files = write_profile(tmp_path / "profile.json", 2, a0=0.01), Files(tmp_path)
    files.write_prompts([(*range(3, 43), *range(base, base + 24)) for base in (50, 80)], max_new_tokens=3)
    where = ("--input", str(files.input), "--output", str(files.output), "--max-num-seqs", "1", "--chunk-size", "16")
    command = (*COMMAND, "generate", "--emulate", str(profile), "--stages", "2", "--policy", "sarathi", *where)
    caching = ("--page-size", "16", "--prefix-cache", "prompts", "--quiet")
    run((*command, *caching), tmp_path, timeout_s=120)
    report = files.report()
    cache, saved_s = report["prefix_cache"], report["prefix_cache"]["saved_compute_s"]
    assert cache == {
        "mode": "prompts",
        "prompt_tokens": 128,
        "cached_tokens": 32,
        "hit_rate": 0.25,
        "resumed_tokens": 0,
        "computed_prompt_tokens": 96,
        "evictions": 0,
        "idle_pages_most": 2,
        "saved_compute_s": saved_s,
    }
    assert report["microbatches"] == 4 + 2 + 2 + 2 and saved_s is not None and saved_s >= 0
    assert report["computed_tokens_per_s"] == pytest.approx((96 + 2 * 2) / report["wall_s"])
    assert report["total_tokens_per_s"] == pytest.approx((128 + 2 * 3) / report["wall_s"])
    assert sorted(row["metrics"]["cached_tokens"] for row in files.rows()) == [0, 32]
    shown = run((*COMMAND, "report", str(files.output) + ".run"), tmp_path, timeout_s=120)
    assert "prefix cache: 25.0% of prompt tokens found (32 of 128)" in shown.stdout
    assert run((*COMMAND, "report", str(files.output) + ".run", "--json"), tmp_path, timeout_s=120)
    files.output.unlink()
    run((*command, "--overwrite", "--prefix-cache", "off", "--quiet"), tmp_path, timeout_s=120)
    assert files.report()["prefix_cache"] is None
    assert {row["metrics"]["cached_tokens"] for row in files.rows()} == {0}


def test_a_hybrid_has_no_prefix_cache_and_says_that_its_states_are_emulated(tmp_path):
    profile, files = write_profile(tmp_path / "profile.json", 2, a0=0.01), Files(tmp_path)
    each = {"a0": 1e-3, "a1": 1e-3, "a2": 0.0, "a3": 0.0, "a4": 0.0, "page_bytes": 0}
    layers = [{"kind": kind, **each} for kind in ("linear", "attention")]
    profile.write_text(json.dumps(json.loads(profile.read_text()) | {"layer_costs": layers}))
    files.write_prompts([tuple(range(3, 43))] * 3, max_new_tokens=3)
    where = ("--input", str(files.input), "--output", str(files.output), "--max-num-seqs", "1")
    said = run((*COMMAND, "generate", "--emulate", str(profile), "--stages", "2", *where), tmp_path, timeout_s=120)
    assert "the prefix cache is off: some layers keep one state per sequence" in " ".join(said.stderr.split())
    known, report = json.loads((files.run / "run.json").read_text()), files.report()
    assert (known["prefix_cache"], known["state_backend"], known["state_bytes_per_sequence"]) == ("off", "emulated", 0)
    assert report["prefix_cache"] is None and report["state_bytes_per_sequence"] == 0
    shown = run((*COMMAND, "report", str(files.run), "--json"), tmp_path, timeout_s=120)
    assert json.loads(shown.stdout)["state_bytes_per_sequence"] == 0
