"""Properties that two starts must share for their answers to belong in one file."""

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.config import RunConfig
from sarathi_pp.inputs.generation_config import read_generation_config
from sarathi_pp.model.dtypes import choose_dtypes
from sarathi_pp.outputs.run_identity import differences, grown_input, identity_of, input_digest

ADDER = Path(__file__).parents[2] / "examples" / "tiny-adder"
CONFIG = RunConfig(model=str(ADDER))


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(ADDER, tmp_path / "model")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "1+1="}\n')
    return path


def identity(model, prompts, config=CONFIG, **sampling):
    defaults = read_generation_config(model).with_command(sampling)
    facts = check_model(model)
    dtypes = choose_dtypes(config.dtype, facts.dtype, "cpu")
    return identity_of(config, facts, dtypes, defaults, model, str(prompts))


@pytest.mark.parametrize(
    "change",
    [{"stages": 2}, {"policy": "orca"}, {"chunk_size": 7}, {"max_num_seqs": 3}, {"inflight": 4}, {"page_size": 32}],
)
def test_what_changes_no_answer_may_change(change, model, prompts):
    assert identity(model, prompts) == identity(model, prompts, replace(CONFIG, **change))


def weights_trained_on(model):
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    (header,) = struct.unpack("<Q", data[:8])
    for place in range(8 + header, len(data), 2):
        data[place] ^= 1
    path.write_bytes(data)


def another_template(model):
    (model / "chat_template.jinja").write_text("{{ messages }}")


def another_end(model):
    path = model / "generation_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "eos_token_id": [5, 7]}))


@pytest.mark.parametrize(
    ("change", "what"), [(weights_trained_on, "model"), (another_template, "tokenizer"), (another_end, "eos_token_ids")]
)
def test_another_model_is_another_run(change, what, model, prompts):
    before = identity(model, prompts)
    change(model)
    (found,) = differences(before, identity(model, prompts))
    assert found.startswith(f"{what} was ")


@pytest.mark.parametrize(
    ("config", "sampling", "says"),
    [
        ({"seed": 1}, {}, "seed was 0 and is 1"),
        ({"dtype": "bfloat16"}, {}, "dtype was float32 and is bfloat16"),
        ({"max_model_len": 16}, {}, "max_model_len was "),
        ({}, {"max_new_tokens": 5}, "max_new_tokens was "),
        ({}, {"temperature": 0.5}, "temperature was 0.0 and is 0.5"),
        ({}, {"stop": ["x"]}, 'stop was [] and is ["x"]'),
    ],
)
def test_other_parameters_are_another_run(config, sampling, says, model, prompts):
    changed = identity(model, prompts, replace(CONFIG, **config), **sampling)
    (found,) = differences(identity(model, prompts), changed)
    assert found.startswith(says)


def test_another_input_is_another_run(model, prompts):
    before = identity(model, prompts)
    prompts.write_text('{"prompt": "1+2="}\n')
    assert differences(before, identity(model, prompts)) == ["the input file was changed"]


def test_a_stream_has_no_digest():
    assert input_digest("-") == input_digest("/dev/null") == ("a stream", "nothing")


@pytest.mark.parametrize(
    ("was", "becomes", "alike"),
    [
        (b"one\n", b"one\ntwo\n", True),
        (b"one\n", b"one\n", True),
        (b"", b"one\n", True),
        (b"one", b"one\ntwo", True),
        (b"one", b"one\r\ntwo", True),
        (b"one", b"one two\n", False),  # the last line had no end, and became another one
        (b"one\r", b"one\r\ntwo", True),
        (b"one", b"one\rtwo\n", False),
        (b"one\ntwo\n", b"one\n", False),
        (b"one\n", b"two\ntwo\n", False),
        (b"one\n", b"\none\n", False),
    ],
)
def test_lines_may_be_appended_to_an_input(was, becomes, alike, model, prompts):
    prompts.write_bytes(was)
    before = identity(model, prompts)
    prompts.write_bytes(becomes)
    now = identity(model, prompts)
    found = differences(before, grown_input(before, now, str(prompts)))
    assert found == ([] if alike else ["the input file was changed"])
    assert now["input_bytes"] == str(len(becomes))


def test_an_input_of_an_earlier_release_is_compared_as_a_whole(model, prompts):
    before = identity(model, prompts)
    del before["input_bytes"]
    now = identity(model, prompts)
    assert differences(before, grown_input(before, now, str(prompts))) == []
    prompts.write_text(prompts.read_text() + "more\n")
    now = identity(model, prompts)
    assert differences(before, grown_input(before, now, str(prompts))) == ["the input file was changed"]


def test_what_the_run_json_holds_is_compared_as_it_was(model, prompts):
    found = identity(model, prompts, temperature=0.25)
    assert differences(json.loads(json.dumps(found)), found) == []
