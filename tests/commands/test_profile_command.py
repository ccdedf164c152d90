"""`profile`, `plan` and `generate --profile` as a user runs them, on the tiny adder."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from sarathi_pp import LLM, SamplingParams
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.cost.sizing import saturation
from sarathi_pp.core.policy.calibration import make_timetable
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.trace.events import Compute
from sarathi_pp.trace.recorder import read_trace
from tests.commands.processes import COMMAND, ROOT, Files, console_script, environment, run, torchrun
from tests.machine import patient
from tests.model.families import write_checkpoint

pytestmark = pytest.mark.timeout(180)

ADDER = ROOT / "examples" / "tiny-adder"
# Enough for some sequences; a small pool keeps the calibration short.
SMALL = ("--kv-cache-memory", "4MiB", "--max-num-seqs", "16", "--max-model-len", "512")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a folder with a profile of two stages and the run that made it, and the command's output."""
    folder = tmp_path_factory.mktemp("profile")
    options = ("--model", str(ADDER), "--stages", "2", "-o", "profile.json", "--run-dir", "run", "--json", *SMALL)
    done = run((*COMMAND, "profile", *options), folder, timeout_s=170)
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "written to profile.json" in done.stderr and "us/token" in done.stderr
    # The last progress line counts nearly all microbatches. Requests would be at 0% until the end.
    (share,) = (int(found) for found in re.findall(r"microbatches \((\d+)%\)", done.stderr)[-1:])
    assert 90 < share <= 100
    return folder, document


def test_a_profile_holds_what_the_pipeline_is_and_what_its_stages_take(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, document = measured
    data = json.loads((folder / "profile.json").read_text())
    profile = Profile.from_json(data)
    assert {**document, **data} == document  # the document holds the profile and more
    assert (profile.num_layers, profile.hidden_size, profile.dtype, profile.device) == (5, 64, "float32", "cpu")
    assert [stage.layers for stage in profile.cost.stages] == [(0, 3), (3, 5)]
    assert [stage.page_bytes for stage in profile.cost.stages] == [3 * 4096, 2 * 4096]
    assert (profile.pages, profile.max_num_seqs) == ((4 << 20) // (3 * 4096), 16)
    for stage in profile.cost.stages:
        assert stage.a0 + stage.a1 > 0
        assert 1e-5 < profile.cost.seconds(profile.cost.stages.index(stage), _chunk(256)) < 1.0
    assert document["stage_errors"] and document["error"] == pytest.approx(sum(document["stage_errors"]) / 2)
    assert document["saturation_tokens"] == saturation(profile.cost)
    assert document["held_out"] == pytest.approx(document["microbatches"] / 5, abs=1)


def _chunk(num_tokens: int) -> Any:
    from sarathi_pp.core.cost.model import Load

    return Load(num_tokens, num_tokens**2 / 2, 0, 0)


def test_the_run_behind_it_is_the_timetable(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, document = measured
    limits = Limits(2, 2048, 16, 512, 16, 341, 2)
    timetable = make_timetable(limits)
    assert document["microbatches"] == len(timetable.steps) - timetable.warm_up
    traces = sorted((folder / "run").glob("attempt-0000/trace-*.jsonl"))
    assert len(traces) == 2 and traces[0].read_text().count('"e":"issued"') == len(timetable.steps)
    assert (folder / "run" / "exit_code").read_text() == "0\n"
    shown = run((*COMMAND, "report", "run", "--json"), folder)
    assert json.loads(shown.stdout)["policy"] == "calibration:seed=0"


def test_generate_uses_it_for_what_is_auto(measured: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = measured
    files = Files(tmp_path)
    files.write_prompts([(5, 6, 7), (9, 10, 11, 12)], max_new_tokens=4)
    profile = Profile.from_json(json.loads((folder / "profile.json").read_text()))
    uneven = tmp_path / "uneven.json"
    heavy = [profile.cost.stages[0], profile.cost.stages[1]]
    data = profile.to_json()
    data["stages"][1]["a0"] = 100 * (heavy[0].a0 + heavy[1].a0 + 1e-3)  # leaves room for one layer there
    uneven.write_text(json.dumps(data))
    options = files.options(ADDER, "--stages", "2", "--profile", str(uneven), "--policy", "sarathi", "--quiet")
    run((*COMMAND, *options), tmp_path)
    report = files.report()
    assert report["layer_split"] == [4, 1]
    assert report["chunk_size"] == saturation(Profile.from_json(data).cost)
    with_profile = files.tokens()
    run((*COMMAND, *files.options(ADDER, "--stages", "2", "--quiet", "--overwrite")), tmp_path)
    assert files.tokens() == with_profile


def test_the_python_interface_takes_it_too(measured: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = measured
    data = json.loads((folder / "profile.json").read_text())
    data["stages"][1]["a0"] = 100 * sum(stage["a0"] + 1e-3 for stage in data["stages"])
    heavy = tmp_path / "heavy.json"
    heavy.write_text(json.dumps(data))
    with LLM(str(ADDER), stages=2, profile=heavy, policy="sarathi", kv_cache_memory_bytes=1 << 20) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=3))
        report = llm.close()
    assert report is not None and report["layer_split"] == [4, 1]


def test_plan_reads_it(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, document = measured
    options = ("--model", str(ADDER), "--stages", "2", "--profile", "profile.json", "--json", "--max-num-seqs", "16")
    found = json.loads(run((*COMMAND, "plan", *options), folder).stdout)
    assert found["source"] == "profile" and found["chunk_size"] >= document["saturation_tokens"]
    assert sum(found["layer_split"]) == 5 and found["inflight"] in (2, 3)


def test_torchrun_profiles_too_and_over_an_earlier_one(tmp_path: Path) -> None:
    script = console_script(tmp_path)
    folder = tmp_path / "earlier"
    (folder / "run" / "attempt-0007").mkdir(parents=True)
    (folder / "profile.json").write_text("{}")
    options = ("profile", "--model", str(ADDER), "-o", "profile.json", "--json", "--quiet", *SMALL)
    options += ("--run-dir", "run", "--overwrite")
    done = run((*torchrun(2, script), *options), folder, timeout_s=170)
    document = json.loads(done.stdout.splitlines()[-1])
    assert len(document["stages"]) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "run"]
    assert not (folder / "run" / "attempt-0007").exists() and (folder / "run" / "run.json").exists()


def test_stages_that_two_ranks_hold_together_are_measured_with_their_sums(tmp_path: Path) -> None:
    shape = ("--model", str(ADDER), "--stages", "1", "--tensor-parallel-size", "2")
    options = ("-o", "profile.json", "--run-dir", "run", "--json", *SMALL)
    done = run((*COMMAND, "profile", *shape, *options), tmp_path, timeout_s=170)
    document = json.loads(done.stdout.splitlines()[-1])
    profile = Profile.from_json(json.loads((tmp_path / "profile.json").read_text()))
    assert (profile.tensor_parallel_size, document["tensor_parallel_size"]) == (2, 2)
    (stage,) = profile.cost.stages
    assert stage.page_bytes == 5 * 4096 // 2 and profile.pages == (4 << 20) // stage.page_bytes
    (trace,) = (tmp_path / "run").glob("attempt-0000/trace-*.jsonl")
    spans = [event for event in read_trace(trace) if isinstance(event, Compute)]
    sums_s = median(event.collective_s for event in spans if event.collective_s is not None)
    # Ten sums per microbatch are most of a token's time here. A fit without them would be far below this.
    assert sums_s > 0 and profile.cost.seconds(0, _chunk(1)) > 0.5 * sums_s
    found = json.loads(run((*COMMAND, "plan", *shape, "--profile", "profile.json", "--json"), tmp_path).stdout)
    assert found["notes"] == [] and found["tensor_parallel_size"] == 2
    files = Files(tmp_path)
    files.write_prompts([(5, 6, 7)], max_new_tokens=2)
    said = run((*COMMAND, *files.options(ADDER, "--profile", "profile.json")), tmp_path).stderr
    assert "was measured with --tensor-parallel-size 2, and this run has 1" in " ".join(said.split())


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--model", "none", "-o", "p.json"), 66, "none"),
        (("--model", str(ADDER), "-o", "there.json"), 2, "there.json exists; name another file"),
        (("--model", str(ADDER), "-o", "none/p.json"), 74, "not a directory that can be written to"),
        (("--model", str(ADDER), "-o", "p.json", "--stages", "6"), 2, "more than the model's 5 layers"),
        (("--model", str(ADDER), "-o", "p.json", "--run-dir", "."), 2, "the run directory . exists"),
        (("--model", str(ADDER), "-o", "p.json", "--tp-size", "3"), 2, "2 KV heads, which is not a multiple of it"),
        (
            (
                "--model",
                str(ADDER),
            ),
            2,
            "Missing option '--output'",
        ),
    ],
)
def test_what_cannot_be_profiled_is_refused(options: tuple[str, ...], code: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("{}")
    command = (*COMMAND, "profile", *options)
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=patient(90))
    assert done.returncode == code, done.stderr
    assert message in " ".join(done.stderr.split()) and "Traceback" not in done.stderr
    assert (tmp_path / "there.json").read_text() == "{}" and not (tmp_path / "p.json").exists()


def test_a_profile_of_unequal_layers_has_their_estimated_costs(tmp_path: Path) -> None:
    write_checkpoint("deepseek_v3", tmp_path / "model")
    options = ("--model", "model", "--stages", "2", "-o", "profile.json", "--kv-cache-memory", "1MiB")
    run((*COMMAND, "profile", *options, "--max-num-seqs", "4", "--max-model-len", "64"), tmp_path, timeout_s=170)
    profile = Profile.from_json(json.loads((tmp_path / "profile.json").read_text()))
    kinds = [layer.kind.removeprefix("latent attention with ") for layer in profile.cost.layer_costs]
    assert kinds == ["an MLP", "an MLP", "experts", "experts", "experts"]
