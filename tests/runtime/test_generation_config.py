import json

import pytest
import transformers

from sarathi_pp.config import SamplingParams
from sarathi_pp.errors import ConfigError, InputError, RowError
from sarathi_pp.runtime.generation_config import GenerationDefaults, read_generation_config
from tests.model.families import write_checkpoint


def read(folder, generation: dict | None = None, config: dict | None = None) -> GenerationDefaults:
    for name, record in (("generation_config.json", generation), ("config.json", config)):
        if record is not None:
            (folder / name).write_text(json.dumps(record))
    return read_generation_config(folder)


def test_without_files_greedy_and_no_end_of_sequence(tmp_path):
    defaults = read(tmp_path)
    assert defaults.params({}) == SamplingParams()
    assert defaults.eos_token_ids == frozenset()
    assert "eos_token_id" in defaults.warnings[0]


def test_line_over_command_over_model_over_builtin(tmp_path):
    model = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "eos_token_id": 2}
    defaults = read(tmp_path, model).with_command({"top_k": 7, "max_new_tokens": 5})
    assert defaults.params({"top_p": 0.1}) == SamplingParams(max_new_tokens=5, temperature=0.6, top_k=7, top_p=0.1)
    assert defaults.params({"temperature": 0}).greedy


def test_sampling_settings_hold_only_with_do_sample(tmp_path):
    settings = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "eos_token_id": 2}
    assert read(tmp_path, settings).params({}) == SamplingParams()
    # The model's top_k does not come back when the caller turns sampling on.
    assert read(tmp_path, settings).params({"temperature": 1.0}) == SamplingParams(temperature=1.0)
    assert read(tmp_path, {"do_sample": True, "eos_token_id": 2}).params({}).temperature == 1.0


def test_length_and_stop_strings_of_the_model_are_honoured(tmp_path):
    defaults = read(tmp_path, {"max_new_tokens": 8, "stop_strings": "END", "eos_token_id": 2})
    assert defaults.params({}) == SamplingParams(max_new_tokens=8, stop=("END",))
    assert defaults.warnings == ()


@pytest.mark.parametrize("wrong", ["</s>", True, -1, [2, "</s>"]])
def test_an_end_of_sequence_that_is_no_token_is_refused(wrong, tmp_path):
    with pytest.raises(InputError, match=r"config.json: eos_token_id is .*; it must be a token id or a list of them"):
        read(tmp_path, None, {"eos_token_id": wrong})


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": 9}, {2}),
        ({"eos_token_id": [2, 3]}, None, {2, 3}),
        ({}, {"eos_token_id": 9}, set()),
        (None, {"eos_token_id": [9, 10]}, {9, 10}),
        (None, {"text_config": {"eos_token_id": 4}}, {4}),
        ({"eos_token_id": None}, {"eos_token_id": None}, set()),
    ],
)
def test_the_end_of_sequence_is_the_model_configs_where_no_other_file_is(tmp_path, generation, config, expected):
    assert read(tmp_path, generation, config).eos_token_ids == expected


@pytest.mark.parametrize(
    "setting",
    [
        {"num_beams": 4},
        {"repetition_penalty": 1.1},
        {"no_repeat_ngram_size": 3},
        {"typical_p": 0.5},
        {"penalty_alpha": 0.6},
        {"bad_words_ids": [[5]]},
        {"min_new_tokens": 3},
        {"forced_eos_token_id": 2},
        {"suppress_tokens": [1]},
        {"num_return_sequences": 2},
        {"sequence_bias": [[[1], 2.0]]},
    ],
)
def test_what_would_change_tokens_is_refused_by_name(tmp_path, setting):
    with pytest.raises(ConfigError, match=rf"{next(iter(setting))}.*remove"):
        read(tmp_path, {"eos_token_id": 2, **setting})


def test_neutral_and_harmless_settings_pass_and_unknown_ones_are_reported(tmp_path):
    neutral = {
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "typical_p": 1.0,
        "bad_words_ids": None,
        "min_length": 0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "transformers_version": "5.0",
        "max_length": 4096,
        "use_cache": True,
        "eos_token_id": 2,
    }
    assert read(tmp_path, neutral).warnings == ()
    warnings = read(tmp_path, {**neutral, "sparkle": 1}).warnings
    assert len(warnings) == 1 and "sparkle" in warnings[0]


@pytest.mark.parametrize(
    "data",
    [b"{", b"[]", b'{"eos_token_id": "x"}', b'{"eos_token_id": true}', b'{"do_sample": true, "top_p": 7}', b"\xff"],
)
def test_a_broken_file_is_an_input_error_that_names_it(tmp_path, data):
    (tmp_path / "generation_config.json").write_bytes(data)
    with pytest.raises(InputError, match=r"generation_config\.json"):
        read_generation_config(tmp_path)


def test_values_out_of_range_blame_the_command_or_the_line(tmp_path):
    defaults = read(tmp_path)
    with pytest.raises(ConfigError, match="top_p is 3"):
        defaults.with_command({"top_p": 3})
    with pytest.raises(RowError, match="top_p is 3") as caught:
        defaults.params({"top_p": 3})
    assert caught.value.code == "invalid_parameter"
    with pytest.raises(RowError, match="too large|finite|at least"):
        defaults.params({"temperature": 10**400})


@pytest.mark.parametrize("stop", ["a\ud800", ["ok", "\udcff"], ("\udfff\ud800",)])
def test_a_stop_string_that_utf8_cannot_write_is_refused_wherever_it_comes_from(stop, tmp_path):
    with pytest.raises(RowError, match="it must be text that UTF-8 can write"):
        SamplingParams(stop=stop)
    with pytest.raises(RowError) as refused:
        read(tmp_path).params({"stop": stop})
    assert refused.value.code == "invalid_parameter"
    with pytest.raises(ConfigError, match="sampling options: stop is"):
        read(tmp_path).with_command({"stop": stop})
    with pytest.raises(InputError, match="generation_config.json: stop is"):
        read(tmp_path, {"stop_strings": stop})
    assert SamplingParams(stop="\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")).stop


def test_end_tokens_are_those_generate_stops_at(tmp_path):
    write_checkpoint("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def both():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        return model.generation_config.eos_token_id, read_generation_config(tmp_path).eos_token_ids

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert both() == ([5, 6], {5, 6})
    (tmp_path / "generation_config.json").write_text('{"bos_token_id": 5}')
    assert both() == (None, set())
    (tmp_path / "generation_config.json").unlink()
    assert both() == (2, {2})
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "eos_token_id"}))
    assert both() == (None, set())
