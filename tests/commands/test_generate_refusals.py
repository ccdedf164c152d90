"""Inputs that `sarathi-pp generate` refuses, with their exit codes and messages; and bad rows next to good ones."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sarathi_pp.cli.main import main
from tests.machine import patient

ADDER = Path(__file__).parents[2] / "examples" / "tiny-adder"


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1+2="}\n')
    return path


def refuse(capsys, *arguments):
    """Return exit code and standard error of a command that must end before it loads anything."""
    with pytest.raises(SystemExit) as left:
        main(["generate", *map(str, arguments)])
    said = capsys.readouterr()
    assert "Traceback" not in said.err and said.out == ""
    return left.value.code, said.err


def copy_model(tmp_path, **changed):
    """Copy the adder and change some keys of its config.json."""
    model = tmp_path / "model"
    shutil.copytree(ADDER, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changed))
    return model


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--chunk-sise", "8"], 2, "--chunk-sise"),
        (["--chunk-size", "0"], 2, "at least 1"),
        (["--policy", "fifo"], 2, "orca, sarathi, sarathi-serve, sglang"),
        (["--policy", "sarathi:odd=1"], 2, "no parameter 'odd'"),
        (["--policy", "sarathi", "--tbt-slo", "0.5"], 2, "--tbt-slo 0.5: sarathi keeps no bound"),
        (["--policy", "balanced:tbt_slo=1", "--tbt-slo", "0.5"], 2, "tbt_slo is given twice"),
        (["--tbt-slo", "0"], 2, "--tbt-slo"),
        (["--stages", "6"], 2, "more than the model's 5 layers"),
        (["--stages", "2", "--layer-split", "2,2"], 2, "adds up to 4 layers"),
        (["--temperature", "-1"], 2, "temperature is -1.0"),
        (["--request-rate", "0"], 2, "--request-rate is 0"),
        (["--kv-cache-memory", "much"], 2, "4GiB"),
        (["--dtype", "int8"], 2, "int8"),
        (["--max-model-len", "9999"], 2, "--max-model-len is 9999; the model has 1152 positions"),
        (["--override-generation-config", "{"], 2, "is not JSON"),
        (["--override-generation-config", "[]"], 2, "is not a JSON object"),
        (["--override-generation-config", '{"sparkle": 1}'], 2, "sparkle is not a generation setting"),
        (["--override-generation-config", '{"max_length": "x"}'], 2, "max_length is 'x'"),
        (["--seed", "9" * 20], 2, "it must be a 64-bit integer"),
        (["--stop", os.fsdecode(b"\xff")], 2, "stop is ('\\udcff',); it must be text that UTF-8 can write"),
    ],
)
def test_options_that_cannot_work(tmp_path, capsys, prompts, options, code, says):
    answer = refuse(capsys, "--model", ADDER, "-i", prompts, "-o", tmp_path / "out.jsonl", *options)
    assert answer[0] == code and says in answer[1], answer
    assert not (tmp_path / "out.jsonl").exists() and not (tmp_path / "out.jsonl.run").exists()


def test_files_that_are_not_there_or_in_the_way(tmp_path, capsys, prompts):
    out = tmp_path / "out.jsonl"
    assert refuse(capsys, "--model", tmp_path / "none", "-i", prompts, "-o", out)[0] == 66
    assert refuse(capsys, "--model", ADDER, "-i", tmp_path / "none", "-o", out)[0] == 66
    code, says = refuse(capsys, "--model", ADDER, "-i", prompts, "-o", prompts)
    assert code == 2 and "same file" in says
    out.write_text("dear results\n")
    code, says = refuse(capsys, "--model", ADDER, "-i", prompts, "-o", out)
    assert code == 2 and "--overwrite" in says and out.read_text() == "dear results\n"
    out.unlink()
    run = tmp_path / "out.jsonl.run"
    (run / "attempt-0000").mkdir(parents=True)
    code, says = refuse(capsys, "--model", ADDER, "-i", prompts, "-o", out)
    assert code == 2 and "run directory" in says, "another start may be setting up there"
    (run / "report.json").write_text("{}")
    code, says = refuse(capsys, "--model", ADDER, "-i", prompts, "-o", out)
    assert code == 2 and "run directory" in says and (run / "report.json").exists()


@pytest.mark.parametrize(
    ("changed", "code", "says"),
    [
        ({"architectures": ["FalconForCausalLM"], "model_type": "falcon"}, 2, "FalconForCausalLM is not supported"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, 2, "quant"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 2, "dynamic"),
    ],
)
def test_models_that_are_not_proven(tmp_path, capsys, prompts, changed, code, says):
    model = copy_model(tmp_path, **changed)
    answer = refuse(capsys, "--model", model, "-i", prompts, "-o", tmp_path / "out.jsonl")
    assert answer[0] == code and says in answer[1], answer


def test_pickled_weights_and_missing_shards(tmp_path, capsys, prompts):
    model = copy_model(tmp_path)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    code, says = refuse(capsys, "--model", model, "-i", prompts, "-o", tmp_path / "out.jsonl")
    assert code == 77 and "safetensors" in says
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    code, says = refuse(capsys, "--model", model, "-i", prompts, "-o", tmp_path / "out.jsonl")
    assert code == 66 and "model-00001-of-00002.safetensors" in says


@pytest.mark.timeout(120)
def test_a_start_that_was_refused_is_not_in_the_way_of_the_next(tmp_path, prompts):
    """The workers refuse it, because only they know torch. The error appears once, and the corrected command runs."""
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-P", "-m", "sarathi_pp", "generate", "--model", str(ADDER), "--stages", "2", "--quiet"]
    command += ["-i", str(prompts), "-o", str(out)]
    done = subprocess.run([*command, "--kv-cache-memory", "1KiB"], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("CapacityError: stage 0 (rank 0): layers [0, 3) need") == 1
    assert (tmp_path / "out.jsonl.run" / "exit_code").read_text() == "2\n"
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["text"] == "3"
    out.unlink()
    assert subprocess.run(command, capture_output=True).returncode == 2, "there is a run to lose now"


@pytest.mark.timeout(120)
def test_a_size_beyond_all_use_is_the_largest_of_use(tmp_path, prompts):
    for policy, stages in (("balanced", "1"), ("sarathi", "2")):
        command = [sys.executable, "-P", "-m", "sarathi_pp", "generate", "--model", str(ADDER), "--stages", stages]
        command += ["-i", str(prompts), "-o", str(tmp_path / f"{policy}.jsonl"), "--policy", policy]
        command += ["--chunk-size", "99999999999999", "--quiet", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["chunk_size"] == 64 * int(stages) * 1152


@pytest.mark.timeout(120)
def test_bad_rows_get_their_error_and_the_others_their_answer(tmp_path):
    """Bad rows: too long for the model or the pool, no JSON, unknown key, illegal id, empty list, no Unicode."""
    rows = [
        '{"id": "good", "prompt": "12+30="}',
        '{"id": "long", "prompt": "' + "1+1=2\\n" * 60 + '1+2="}',
        "{not json",
        '{"id": "key", "prompt": "1+2=", "temprature": 1}',
        '{"id": "id", "prompt_token_ids": [1, 99]}',
        '{"id": "none", "prompt_token_ids": []}',
        '{"custom_id": "open", "method": "POST", "url": "/v1/completions", "body": {"prompt": "40+2="}}',
        '{"id": "good", "prompt": "1+1="}',
        '{"id": "zero", "prompt": "1+1=", "max_tokens": 0}',
        '{"id": "half", "prompt": "1+1=", "stop": ["\\ud800"]}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(rows) + "\n")
    command = [sys.executable, "-P", "-m", "sarathi_pp", "generate", "--model", str(ADDER), "--stages", "2"]
    for options, code, limit in (
        (["--max-model-len", "64"], "context_length_exceeded", "max_model_len is 64"),
        (["--kv-cache-memory", "48KiB"], "kv_cache_exhausted", "KV"),
    ):
        done = subprocess.run(
            [*command, "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--overwrite",
             "--json", "--quiet", *options],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 3, done.stderr
        report = json.loads(done.stdout.splitlines()[-1])
        assert (report["requests"], report["failed"]) == (10, 7)
        assert (tmp_path / "out.jsonl.run" / "exit_code").read_text() == "3\n"
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        answers = {line["id"]: line for line in lines if line.get("error") is None and "text" in line}
        errors = [line for line in lines if line.get("error")]
        assert answers["good"]["text"] == "42" and answers["zero"]["text"] == ""
        assert answers["zero"]["finish_reason"] == "length"
        (opened,) = (line for line in lines if line.get("custom_id") == "open")
        assert opened["response"]["status_code"] == 200
        assert opened["response"]["body"]["choices"][0]["text"] == "42"
        said = {line["id"]: line["error"] for line in errors}
        assert said["long"]["code"] == code and limit in said["long"]["message"]
        assert said["key"]["code"] == "unknown_parameter" or "temprature" in said["key"]["message"]
        assert said["id"]["code"] == "invalid_token_id"
        assert said["good"]["code"] == "duplicate_id" and said["3"]["code"] == "invalid_json"
        assert said["half"]["code"] == "invalid_parameter" and "UTF-8" in said["half"]["message"]
        assert len(errors) == 7


@pytest.mark.parametrize(
    ("name", "made", "says"),
    [
        ("in.csv", b"id,prompt\n1,hi\n", "is CSV: python"),
        ("in.jsonl", b'[{"prompt": "1+2="}]', "is a JSON array"),
        ("in.txt", "1+2=\n".encode("utf-16"), "is UTF-16: iconv"),
        ("in.jsonl", gzip.compress(b"{}", mtime=0), "is gzip-compressed: zcat"),
        ("in.parquet", b"PAR1\x15\x04", "is a Parquet file"),
        ("in", b"1+2=\n", "--input-format text takes each line as a prompt"),
        (
            "in.jsonl",
            b'{"prompt": "1+2=", "max_token": 5}\n' * 9,
            'none of its 9 lines can run: line 1: unknown key "max_token"',
        ),
        ("in.jsonl", b"secret words\n", "none of its 1 lines can run: line 1: not JSON"),
    ],
)
@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_an_input_without_a_row_that_can_run_is_refused_before_a_model_loads(
    tmp_path, capsys, monkeypatch, name, made, says, stages
):
    for loads in ("sarathi_pp.run.batch.joined", "sarathi_pp.distributed.launcher.launch"):
        monkeypatch.setattr(loads, lambda *_, **__: pytest.fail("it was started"))
    (tmp_path / name).write_bytes(made)
    out = tmp_path / "out.jsonl"
    code, said = refuse(capsys, "--model", ADDER, "-i", tmp_path / name, "-o", out, "--stages", stages)
    assert code == 65 and says in said and said.count("\n") == 1 and "secret" not in said
    assert not out.exists() and not (tmp_path / "out.jsonl.run").exists()


def test_text_for_a_model_without_a_tokenizer_is_refused_before_it_loads(tmp_path, capsys, prompts):
    model = copy_model(tmp_path)
    for path in model.glob("tokenizer*"):
        path.unlink()
    code, said = refuse(capsys, "--model", model, "-i", prompts, "-o", tmp_path / "out.jsonl")
    assert code == 65 and "none of its 1 lines can run: line 1: text needs the model's tokenizer files" in said


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [pytest.param("redirected", marks=pytest.mark.full), "piped"])
def test_a_stream_that_is_no_lines_is_named_as_what_it_is(tmp_path, how):
    (tmp_path / "in.csv").write_bytes(b"id,prompt\n1,hi\n")
    command = [sys.executable, "-P", "-m", "sarathi_pp", "generate", "--model", str(ADDER), "-i", "-", "-o", "-", "-q"]
    with open(tmp_path / "in.csv", "rb") as file:
        given = {"stdin": file} if how == "redirected" else {"input": file.read()}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, **given)
    assert (done.returncode, done.stdout) == (65, b"") and b"--input - is CSV: pipe it through" in done.stderr
    assert done.stderr.count(b"\n") == 1 and os.listdir(tmp_path) == ["in.csv"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_a_stream_that_is_no_lines_takes_nothing_away_and_does_not_stand_in_the_way(tmp_path, stages):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-P", "-m", "sarathi_pp", "generate", "--emulate", str(ADDER.parent / "emulated.json")]
    command += ["-i", "-", "-o", str(out), "-q", "--stages", stages]

    def run(data: bytes, *more: str) -> int:
        return subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, input=data).returncode

    assert run(b"id,prompt\n1,hi\n") == 65 and not out.exists()
    assert run(b'{"prompt_token_ids": [3]}\n') == 0
    written = out.read_bytes()
    assert run(b"id,prompt\n1,hi\n", "--overwrite") == 65 and out.read_bytes() == written


def test_a_model_that_asks_for_beams_runs_without_them_if_line_or_command_says_so(tmp_path):
    """If the user cannot write to the model directory, the user cannot remove the setting from the file."""
    model = copy_model(tmp_path)
    settings = {"eos_token_id": 3, "num_beams": 4, "max_length": 9}
    (model / "generation_config.json").write_text(json.dumps(settings))
    lines = ('{"id": "asks", "prompt": "12+30="}', '{"id": "off", "prompt": "12+30=", "num_beams": 1}')
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    command = [sys.executable, "-P", "-m", "sarathi_pp", "generate", "--model", str(model), "--quiet"]
    found = {}
    for options, code in (([], 3), (["--override-generation-config", '{"num_beams": 1}'], 0)):
        files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / f"{code}.jsonl")]
        done = subprocess.run([*command, *files, *options], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert ("asks for num_beams = 4" in done.stderr) == bool(code)
        lines = [json.loads(line) for line in (tmp_path / f"{code}.jsonl").read_text().splitlines()]
        found[code] = {line["id"]: line for line in lines}
    assert found[3]["asks"]["error"]["code"] == "unsupported_setting"
    # The prompt has 7 tokens with its BOS, and 2 are left of a max_length of 9.
    answers = (found[3]["off"], found[0]["off"], found[0]["asks"])
    assert [(one["text"], one["num_prompt_tokens"], one["num_output_tokens"]) for one in answers] == [("42", 7, 2)] * 3
