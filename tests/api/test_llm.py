"""The Python API: one process, several, and its refusals."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch

from sarathi_pp import LLM, SamplingParams
from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.errors import CapacityError, ConfigError, MissingError
from sarathi_pp.report.run_reader import read_run
from sarathi_pp.run import rank
from sarathi_pp.text.tokenizer import Tokenizer

ADDER = str(Path(__file__).parents[2] / "examples" / "tiny-adder")
LONG = "1+1=2\n" * 300 + "1+2="


@pytest.mark.timeout(120)
@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.full), 2])
def test_answers_in_order_and_one_bad_prompt_harms_no_other(stages):
    with LLM(ADDER, stages=stages) as llm:
        outputs = llm.generate(["12+30=", LONG, [1, 5, 13, 6, 15]], SamplingParams(max_new_tokens=8))
        assert outputs[0].outputs[0].text == "42" and len(outputs[2].outputs) == 1 and outputs[1].outputs == ()
        assert outputs[1].error is not None and outputs[1].error.code == "context_length_exceeded"
        assert outputs[0].prompt == "12+30=" and outputs[2].prompt_token_ids == (1, 5, 13, 6, 15)
        again = llm.generate("40+2=")  # the model's own generation_config; the stages are still there
        assert (again[0].outputs[0].text, again[0].outputs[0].finish_reason) == ("42", "stop")
        each = llm.generate(["40+2=", "40+2="], [SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=8)])
        assert [output.outputs[0].text for output in each] == ["4", "42"]
        (chat,) = llm.chat([{"role": "user", "content": "1+2="}])
        assert chat.error is not None and "chat template" in chat.error.message
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("1+2=")


@pytest.mark.timeout(120)
def test_the_adder_adds_after_prompts_of_many_chunks():
    rows = [json.loads(line) for line in Path(ADDER, "../prompts.jsonl").read_text().splitlines()]
    with LLM(ADDER, stages=2, chunk_size=64) as llm:
        answers = llm.generate([row["prompt"] for row in rows])
    sums = [str(sum(map(int, row["id"].split("+")))) for row in rows]
    assert [answer.outputs[0].text for answer in answers] == sums and len(sums) == 24
    assert min(len(answer.prompt_token_ids) for answer in answers) > 3 * 64


def test_a_setting_that_is_not_supported_is_an_error_of_a_prompt_unless_it_is_overridden(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(ADDER, model)
    (model / "generation_config.json").write_text('{"num_beams": 4, "eos_token_id": 3, "max_new_tokens": 2}')
    with LLM(str(model)) as llm:
        (answer,) = llm.generate("12+30=")
        assert answer.error is not None and answer.error.code == "unsupported_setting"
        (answer,) = llm.generate("12+30=", SamplingParams(max_new_tokens=2))  # an explicit value is kept
        assert answer.outputs[0].text == "42"
    with LLM(str(model), override_generation_config={"num_beams": 1}) as llm:
        assert llm.generate("12+30=")[0].outputs[0].text == "42"


def test_parameters_of_a_program_change_the_tokens_that_end_an_output():
    """The end-of-sequence tokens come from the model's files, also for a request with parameters of its own."""
    with LLM(ADDER) as llm:

        def answer(**sampling):
            output = llm.generate("12+30=", SamplingParams(max_new_tokens=8, **sampling))[0].outputs[0]
            return output.text, output.token_ids, output.finish_reason

        assert answer() == ("42", (8, 6, 3), "stop")
        longer = answer(min_new_tokens=6)[1]
        assert longer[:2] == (8, 6) and len(longer) >= 6 and 3 not in longer[:6]
        assert answer(stop_token_ids=[6]) == ("4", (8, 6), "stop")
        assert answer(stop_token_ids=[6], include_stop_str_in_output=True) == ("42", (8, 6), "stop")
        assert answer(stop="4", include_stop_str_in_output=True) == ("4", (8,), "stop")
        assert answer(stop="4", min_new_tokens=1) == ("42", (8, 6, 3), "stop")


def test_close_returns_the_report():
    llm = LLM(ADDER)
    llm.generate(["1+2=", "3+4="])
    report = llm.close()
    assert report is not None and (report["requests"], report["stages"]) == (2, 1)
    assert llm.close() is None


def test_the_run_directory_tells_what_the_run_was_given(tmp_path):
    with LLM(ADDER, max_num_seqs=3, run_dir=tmp_path / "run") as llm:
        llm.generate(["1+2=", "3+4="])
    report = read_run(tmp_path / "run").report
    assert (report["max_num_seqs"], report["model"]) == (3, ADDER) and report["kv_cache_bytes"] > 0
    with pytest.raises(ConfigError, match=f"the run directory {tmp_path / 'run'} exists"):
        LLM(ADDER, run_dir=tmp_path / "run")
    assert read_run(tmp_path / "run").report == report


def test_the_kv_cache_may_be_in_float8(tmp_path):
    """A page then takes a quarter of the bytes of one in float32. The adder's answers do not need more."""
    runs = {}
    for kind in ("auto", "fp8"):
        with LLM(ADDER, kv_cache_memory="1MiB", kv_cache_dtype=kind, run_dir=tmp_path / kind) as llm:
            assert [one.outputs[0].text for one in llm.generate(["1+2=", "30+4="])] == ["3", "34"]
        runs[kind] = json.loads((tmp_path / kind / "run.json").read_text())
        assert read_run(tmp_path / kind).report["kv_cache_dtype"] == runs[kind]["kv_cache_dtype"]
    assert [run["kv_cache_dtype"] for run in runs.values()] == ["float32", "fp8"]
    assert runs["fp8"]["max_pages"] // 4 == runs["auto"]["max_pages"] == (1 << 20) // (16 * 5 * 64 * 4)
    assert runs["fp8"]["kv_cache_bytes"] == runs["fp8"]["num_pages"] * 16 * 5 * 64


def test_a_refused_start_leaves_room_for_the_corrected_one(tmp_path):
    for _ in range(2):
        with pytest.raises(CapacityError):
            LLM(ADDER, run_dir=tmp_path / "run", kv_cache_memory_bytes=1)
    with LLM(ADDER, run_dir=tmp_path / "run") as llm:
        assert llm.generate("40+2=")[0].outputs[0].text == "42"
    assert read_run(tmp_path / "run").report["completed"] == 1


@pytest.mark.timeout(120)
def test_an_llm_that_ends_by_an_exception_leaves_room_for_the_next():
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), LLM(ADDER, stages=2) as llm:
            assert llm.generate("40+2=")[0].outputs[0].text == "42"
            raise ZeroDivisionError


@pytest.mark.timeout(120)
def test_an_llm_that_fails_when_its_stages_are_up_leaves_none_behind(monkeypatch):
    seen = []

    def broken(*args, **options):
        children = psutil.Process().children()
        seen.extend(process for process in children if process.environ().get("RANK"))
        raise MissingError("no tokenizer")

    monkeypatch.setattr(Tokenizer, "load", broken)
    with pytest.raises(MissingError, match="no tokenizer"):
        LLM(ADDER, stages=2)
    assert len(seen) == 1 and not seen[0].is_running()
    monkeypatch.undo()
    with LLM(ADDER, stages=2) as llm:
        assert llm.generate("40+2=")[0].outputs[0].text == "42"


def test_a_model_that_keeps_states_answers_without_a_prefix_cache(tmp_path, monkeypatch):
    """The tiny model keeps no states, but gets slots here like one that does."""
    monkeypatch.setattr(ModelFacts, "has_states", property(lambda facts: True))
    monkeypatch.setattr(rank, "state_bytes", lambda caches, item_bytes: 77)
    with pytest.raises(ConfigError, match=r"^prefix_cache is all; some layers keep one .* Give prefix_cache='off'"):
        with monkeypatch.context() as early:
            early.delattr(LLM, "_set_up")  # it is refused before anything is loaded
            LLM(ADDER, prefix_cache="all")
    with LLM(ADDER, max_num_seqs=2, run_dir=tmp_path / "run") as llm:
        answers = llm.generate(["1+2=", "40+2=", "3+4="])
        assert llm._rank._pipeline.runner._keeps_states
        closed = llm.close()
    assert [answer.outputs[0].text for answer in answers] == ["3", "42", "7"]
    report, run = read_run(tmp_path / "run").report, json.loads((tmp_path / "run" / "run.json").read_text())
    assert report["prefix_cache"] is None and run["prefix_cache"] == "off"
    assert closed is not None
    assert [known["state_bytes_per_sequence"] for known in (report, closed, run)] == [77] * 3


def test_a_refused_start_leaves_no_thread_and_no_folder(tmp_path, monkeypatch):
    threads = set(threading.enumerate())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(MissingError):
        LLM("/nowhere/at/all")
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError):
        LLM(ADDER)
    assert not [thread for thread in threading.enumerate() if thread not in threads and thread.name == "LLM"]


def test_refusals():
    with pytest.raises(ConfigError, match="chunk_sise"):
        LLM(ADDER, chunk_sise=3)
    with pytest.raises(MissingError, match="no such directory"):
        LLM("/nowhere/at/all")
    with pytest.raises(ConfigError, match="more than the model's 5 layers"):
        LLM(ADDER, stages=9)
    with LLM(ADDER) as llm, pytest.raises(ConfigError, match="1 sampling_params were given for 2 prompts"):
        llm.generate(["1+2=", "1+2="], [SamplingParams()])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stages": 0}, "stages=0: it must be an integer of at least 1"),
        ({"chunk_size": "7"}, "chunk_size='7': it must be"),
        ({"dtype": torch.int8}, "dtype='int8': it must be one of auto, float32"),
        ({"device": torch.device("meta")}, "device='meta': it must be one of auto"),
        ({"sampling_overrides": {"bogus": 1}}, "sampling_overrides='bogus': it must be fields"),
    ],
)
def test_options_of_the_wrong_kind_are_named(options, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        LLM(ADDER, **options)


@pytest.mark.timeout(120)
def test_natural_values_reach_the_workers_which_write_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    natural = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "layer_split": [3, 2],
        "run_dir": str(tmp_path / "run"),
    }
    with LLM(Path(ADDER), stages=2, kv_cache_memory_bytes="1MiB", peer_timeout_s=60, **natural) as llm:
        assert llm.generate("40+2=")[0].outputs[0].text == "42"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["layers"] == [[0, 3], [3, 5]]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.full), 2])
def test_an_error_of_the_set_up_keeps_its_class(stages):
    with pytest.raises(CapacityError, match="one KV page"):
        LLM(ADDER, stages=stages, kv_cache_memory_bytes=1024)


def test_arguments_of_the_wrong_kind_are_refused_and_harm_nothing():
    with LLM(ADDER) as llm:
        for prompts in (3, None, [None], [[1, 2.5]], [["12"]]):
            with pytest.raises(ConfigError, match=r"^prompts (is|holds) "):
                llm.generate(prompts)
        for params in ({"temperature": 1}, ["x"], 3):
            with pytest.raises(ConfigError, match=r"^sampling_params is "):
                llm.generate(["1+2="], params)
        empty, answered = llm.generate([[], "40+2="], SamplingParams(max_new_tokens=8, stop=None))
        assert empty.error is not None and empty.error.code == "empty_prompt"
        assert answered.outputs[0].text == "42"


SCRIPT = """
import json, os, sys
from sarathi_pp import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    texts = [o.outputs[0].text for o in llm.generate(["12+30=", "1+2="], SamplingParams(max_new_tokens=8))]
    texts += [o.outputs[0].text for o in llm.generate("5+5=")]
open(sys.argv[2] + os.environ["RANK"], "w").write(json.dumps(texts))
"""


@pytest.mark.timeout(180)
def test_a_script_under_torchrun_answers_on_rank_0(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*torchrun, str(script), ADDER, str(tmp_path / "rank")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert said == [["42", "3", "10"], []]
