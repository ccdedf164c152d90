import json
import re

import pytest
import torch
import transformers

from sarathi_pp.errors import ConfigError, InputError, RowError
from sarathi_pp.inputs.generation_config import (
    _HARMLESS,
    _HONOURED,
    UNSUPPORTED,
    GenerationDefaults,
    read_generation_config,
)
from sarathi_pp.sampling_params import SamplingParams
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


@pytest.mark.oldest
def test_a_model_that_samples_does_so_from_as_many_tokens_as_generate(tmp_path):
    likeliest = transformers.GenerationConfig()._get_default_generation_params()["top_k"]
    sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}
    assert read(tmp_path, sampled).params({}).top_k == read(tmp_path, {**sampled, "top_k": None}).params({}).top_k
    assert read(tmp_path, sampled).params({}).top_k == likeliest == 50
    assert read(tmp_path, {**sampled, "top_k": 0}).params({}).top_k == 0
    assert read(tmp_path, sampled).params({"top_k": -1}).top_k == 0
    # A caller that turns sampling on samples from all tokens, as with other engines.
    assert read(tmp_path, {"eos_token_id": 2}).params({"temperature": 0.6}).top_k == 0


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
        {"penalty_alpha": 0.6},
        {"forced_bos_token_id": 2},
        {"forced_eos_token_id": 2},
        {"top_h": 0.5},
        {"sequence_bias": [[[1], 2.0], [[1, 2], 2.0]]},
        {"sequence_bias": [[[1], 200.0]]},
    ],
)
def test_what_would_change_tokens_is_an_error_of_each_request_that_does_not_switch_it_off(tmp_path, setting):
    (key,) = setting
    defaults = read(tmp_path, {"do_sample": True, "eos_token_id": 2, **setting})
    with pytest.raises(
        RowError, match=rf"generation_config.json asks for {key} = .*--override-generation-config"
    ) as no:
        defaults.params({})
    assert no.value.code == "unsupported_setting"
    assert not defaults.params({}, switched_off={key}).greedy
    off = next(iter(UNSUPPORTED.get(key, ([],))), None)
    overridden = read_generation_config(tmp_path, {key: off})
    assert not overridden.params({}).greedy and overridden.unsupported == {}
    # The remedy in the message works.
    remedy = json.loads(re.search(r"--override-generation-config '(.*)'", no.value.message)[1])
    assert read_generation_config(tmp_path, remedy).unsupported == {}


def test_what_only_sampling_uses_does_not_stop_a_greedy_request(tmp_path):
    defaults = read(tmp_path, {"top_h": 0.5, "typical_p": 0.5, "epsilon_cutoff": 0.1, "eos_token_id": 2})
    assert defaults.params({}) == SamplingParams()
    with pytest.raises(RowError, match="top_h"):
        defaults.params({"temperature": 0.5})


@pytest.mark.parametrize(
    ("key", "value", "field", "kept", "off"),
    [
        ("repetition_penalty", 1.1, "repetition_penalty", 1.1, 1.0),
        ("no_repeat_ngram_size", 3, "no_repeat_ngram_size", 3, 0),
        ("typical_p", 0.5, "typical_p", 0.5, 1.0),
        ("epsilon_cutoff", 0.1, "epsilon_cutoff", 0.1, 0.0),
        ("eta_cutoff", 0.1, "eta_cutoff", 0.1, 0.0),
        ("bad_words_ids", [[5], [1, 2]], "bad_words_ids", ((5,), (1, 2)), []),
        ("suppress_tokens", [1, -1, 2], "suppress_tokens", (1, 2), []),
        ("begin_suppress_tokens", [1], "begin_suppress_tokens", (1,), []),
        ("min_new_tokens", 3, "min_new_tokens", 3, 0),
        ("min_length", 3, "min_length", 3, 0),
        ("sequence_bias", [[[1], 2.0], [[7], -2.0]], "logit_bias", ((1, 2.0), (7, -2.0)), []),
    ],
)
def test_a_setting_that_changes_tokens_is_honoured_and_each_place_above_can_replace_it(
    tmp_path, key, value, field, kept, off
):
    defaults = read(tmp_path, {"do_sample": True, "eos_token_id": 2, key: value})
    assert (defaults.unsupported, defaults.warnings) == ({}, ())
    assert getattr(defaults.params({}), field) == kept
    neutral = getattr(SamplingParams(), field)
    assert getattr(defaults.params({field: off}), field) == neutral
    assert getattr(defaults.with_command({field: off}).params({}), field) == neutral
    for removed in (off, None):
        assert getattr(read_generation_config(tmp_path, {key: removed}).params({}), field) == neutral
    assert field in defaults.settings() and field not in read_generation_config(tmp_path, {key: off}).settings()


def test_a_bias_of_the_line_replaces_one_that_is_not_supported(tmp_path):
    defaults = read(tmp_path, {"sequence_bias": [[[1, 2], 2.0]], "eos_token_id": 2})
    with pytest.raises(RowError, match="sequence_bias"):
        defaults.params({"temperature": 1})
    assert defaults.params({"logit_bias": ()}) == SamplingParams()


def test_fields_of_one_purpose_are_replaced_together(tmp_path):
    defaults = read(tmp_path, {"min_length": 9, "bad_words_ids": [[5]], "eos_token_id": 2})
    assert defaults.params({"min_new_tokens": 0}).min_length == 0
    assert defaults.params({"bad_words": ["a"]}).bad_words_ids == ()
    assert defaults.with_command({"min_new_tokens": 3}).params({"min_length": 4}) == SamplingParams(
        min_length=4, bad_words_ids=[[5]]
    )
    # `generate` does not look at min_length then.
    assert read(tmp_path, {"min_length": 9, "min_new_tokens": 0}).params({}) == SamplingParams()


# The contents of published files, at the time of writing.
PUBLISHED = {
    "Qwen2.5-7B-Instruct": {
        "bos_token_id": 151643,
        "pad_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "repetition_penalty": 1.05,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "transformers_version": "4.37.0",
    },
    "Qwen3-4B": {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "pad_token_id": 151643,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.51.0",
    },
    "Llama-3.1-8B-Instruct": {
        "bos_token_id": 128000,
        "do_sample": True,
        "eos_token_id": [128001, 128008, 128009],
        "temperature": 0.6,
        "top_p": 0.9,
        "transformers_version": "4.42.3",
    },
    "unsloth/Meta-Llama-3.1-8B-Instruct": {
        "bos_token_id": 128000,
        "do_sample": True,
        "eos_token_id": [128001, 128008, 128009],
        "max_length": 131072,
        "pad_token_id": 128004,
        "temperature": 0.6,
        "top_p": 0.9,
        "transformers_version": "4.49.0.dev0",
    },
    "gemma-3-4b-it": {
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "do_sample": True,
        "eos_token_id": [1, 106],
        "pad_token_id": 0,
        "top_k": 64,
        "top_p": 0.95,
        "transformers_version": "4.50.0.dev0",
    },
    "gpt-oss-20b": {
        "bos_token_id": 199998,
        "do_sample": True,
        "eos_token_id": [200002, 199999, 200012],
        "pad_token_id": 199999,
        "transformers_version": "4.55.0.dev0",
    },
    "DeepSeek-R1": {
        "_from_model_config": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "transformers_version": "4.39.3",
    },
    "DeepSeek-V4-Flash": {
        "_from_model_config": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "transformers_version": "4.46.3",
    },
}


@pytest.mark.oldest
@pytest.mark.parametrize("model", PUBLISHED)
def test_the_file_of_a_published_model_is_honoured(tmp_path, model):
    published = PUBLISHED[model]
    ours = read(tmp_path, published)
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path)
    params = ours.params({})
    assert ours.unsupported == {} and all("max_length bounds" in warning for warning in ours.warnings)
    assert len(ours.warnings) == ("max_length" in published)
    assert ours.max_length == published.get("max_length") == theirs.max_length
    assert ours.eos_token_ids == frozenset(end if isinstance(end := theirs.eos_token_id, list) else [end])
    for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 50), ("repetition_penalty", 1.0)):
        assert getattr(params, name) == published.get(name, neutral)
        assert getattr(theirs, name) in (None, getattr(params, name))
    for name in published.keys() & {"temperature", "top_p", "top_k", "repetition_penalty"}:
        assert getattr(ours.params({name: 1}), name) == 1


@pytest.mark.oldest
def test_every_setting_that_transformers_knows_is_classified():
    ours = {*_HONOURED, *UNSUPPORTED, *_HARMLESS}
    assert vars(transformers.GenerationConfig()).keys() <= ours
    assert len(ours) == len(_HONOURED) + len(UNSUPPORTED) + len(_HARMLESS), "each of them once"
    for key, value in transformers.GenerationConfig._get_default_generation_params().items():
        if key in UNSUPPORTED:
            assert value is None or value in UNSUPPORTED[key], f"{key}: what generate does by itself is no change"


BUILTIN = SamplingParams()
PLACES = {
    "generation_config.json": lambda settings: (settings, None),
    "beside config.json's own": lambda settings: (settings, {"temperature": 0.1, "num_beams": 7, "max_length": 3}),
    "config.json": lambda settings: (None, settings),
    "its text part": lambda settings: (None, {"text_config": settings}),
    "both": lambda settings: (
        None,
        {**settings, "text_config": {key: 7 for key in settings if settings[key] is not None}},
    ),
    "the first of its parts": lambda settings: (None, {"decoder": settings, "text_config": {"max_new_tokens": 9}}),
    "nowhere": lambda settings: (None, {"hidden_size": 4}),
}


@pytest.mark.oldest
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "eos_token_id": [2, 5]},
        {"max_length": 30, "repetition_penalty": 1.05, "num_beam_groups": 2, "eos_token_id": 2},
        {"max_new_tokens": 8, "no_repeat_ngram_size": 3, "typical_p": 0.5, "num_beams": 1},
        {"do_sample": None, "temperature": None, "eos_token_id": None, "suppress_tokens": [4]},
    ],
)
def test_settings_count_from_every_file_that_transformers_reads(place, settings, tmp_path):
    generation, config = PLACES[place](settings)
    ours = read(tmp_path, generation, config)
    try:
        theirs = transformers.GenerationConfig.from_pretrained(tmp_path)
    except OSError:
        theirs = transformers.GenerationConfig.from_pretrained(
            tmp_path, config_file_name="config.json", _from_model_config=True
        )
    params = ours.params({}, switched_off=ours.unsupported)
    for name in ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens"):
        given = getattr(theirs, name, None)
        assert getattr(params, name) == (tuple(given) if isinstance(given, list) else given or getattr(BUILTIN, name))
    end = theirs.eos_token_id
    assert ours.eos_token_ids == frozenset([] if end is None else end if isinstance(end, list) else [end])
    assert (params.temperature > 0) == (theirs.do_sample is True)
    for name in ("temperature", "top_k", "top_p", "min_p") if theirs.do_sample else ():
        assert getattr(params, name) == (50 if name == "top_k" else 1.0) or getattr(theirs, name) is not None
        assert getattr(theirs, name) in (None, getattr(params, name))
    assert ours.max_length == theirs.max_length
    assert theirs.max_new_tokens in (None, params.max_new_tokens)
    for key, off in UNSUPPORTED.items():
        value = getattr(theirs, key, None)
        assert ours.unsupported.get(key) == (None if value in off else value), key


@pytest.mark.oldest
def test_a_model_loaded_by_transformers_has_the_same_settings(tmp_path):
    """The model comes from a whole checkpoint; loading takes the settings out of config.json."""
    write_checkpoint("llama", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 7, "max_length": 30, "repetition_penalty": 1.1}
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    ours = read_generation_config(tmp_path)
    assert settings.items() <= vars(theirs).items()
    assert (ours.max_length, ours.unsupported) == (30, {})
    assert ours.params({}) == SamplingParams(temperature=0.6, top_k=7, repetition_penalty=1.1)


@pytest.mark.oldest
def test_max_length_bounds_what_generate_bounds(tmp_path):
    model = write_checkpoint("llama", tmp_path)
    defaults = read(tmp_path, {"max_length": 12})
    model.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
    for num_tokens in (1, 8, 11):
        found = model.generate(torch.full((1, num_tokens), 5), attention_mask=torch.ones(1, num_tokens))
        bound = defaults.bounded(defaults.params({}), {}, num_tokens).max_new_tokens
        assert bound == found.shape[1] - num_tokens == 12 - num_tokens
    with pytest.raises(ValueError, match="max_length"):
        model.generate(torch.full((1, 12), 5), attention_mask=torch.ones(1, 12))
    with pytest.raises(
        RowError, match="12 tokens, and .*generation_config.json allows 12 .*; give max_new_tokens"
    ) as no:
        defaults.bounded(defaults.params({}), {}, 12)
    assert no.value.code == "context_length_exceeded"
    # It counts only if no length is given.
    assert any("max_length bounds" in warning for warning in defaults.warnings)
    line = {"max_new_tokens": 40}
    assert defaults.bounded(defaults.params(line), line, 12).max_new_tokens == 40
    commanded = defaults.with_command({"max_new_tokens": 50})
    assert commanded.bounded(commanded.params({}), {}, 99).max_new_tokens == 50
    named = read(tmp_path, {"max_length": 12, "max_new_tokens": 9})
    assert named.bounded(named.params({}), {}, 99).max_new_tokens == 9
    assert not any("max_length bounds" in warning for warning in named.warnings)


def test_an_override_wins_over_the_file_and_under_command_and_line(tmp_path):
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 7, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    overrides = {"temperature": 0.5, "top_k": None, "top_p": 0.9, "eos_token_id": [3, 4], "max_length": 9}
    defaults = read_generation_config(tmp_path, overrides)
    assert defaults.params({}) == SamplingParams(temperature=0.5, top_k=50, top_p=0.9)
    assert (defaults.eos_token_ids, defaults.max_length) == ({3, 4}, 9)
    assert defaults.with_command({"temperature": 0.4}).params({"top_p": 0.1}).temperature == 0.4
    for wrong in ({"sparkle": 1}, {"top_p": 7}, {"max_length": "long", "top_p": 1}, {"eos_token_id": "x", "top_p": 1}):
        with pytest.raises(ConfigError, match="--override-generation-config"):
            read_generation_config(tmp_path, wrong)


def test_what_decides_an_answer_is_in_the_settings_that_are_compared(tmp_path):
    plain = {"eos_token_id": 2}
    before = read(tmp_path, plain).settings()
    # An output of an earlier version can be resumed, so parameters that came later are absent at their defaults.
    known = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "ignore_eos", "skip_special_tokens")
    assert before == {"eos_token_ids": [2], **{name: getattr(BUILTIN, name) for name in known}}
    added = read(tmp_path, plain).with_command({"stop_token_ids": (7,)}).settings()
    assert added == {**before, "stop_token_ids": (7,)}
    for change in ({"repetition_penalty": 1.1}, {"max_length": 30}, {"do_sample": True}, {"eos_token_id": 3}):
        assert read(tmp_path, {**plain, **change}).settings() != before
    assert read(tmp_path, {**plain, "repetition_penalty": 1.0}).settings() == before
    named = {"max_new_tokens": 8}
    with_length = read(tmp_path, {**plain, **named, "max_length": 30}).settings()
    assert with_length == read(tmp_path, {**plain, **named}).settings(), "a bound that never counts"


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
        "use_cache": True,
        "eos_token_id": 2,
    }
    assert read(tmp_path, neutral).warnings == ()
    warnings = read(tmp_path, {**neutral, "sparkle": 1}).warnings
    assert len(warnings) == 1 and "sparkle" in warnings[0]


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b'{"eos_token_id": "x"}',
        b'{"max_length": "x"}',
        b'{"max_length": 0}',
        b'{"max_length": true}',
        b'{"eos_token_id": true}',
        b'{"do_sample": true, "top_p": 7}',
        b'{"repetition_penalty": 0}',
        b'{"suppress_tokens": ["a"]}',
        b'{"sequence_bias": {"a": 1}}',
        b"\xff",
    ],
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


@pytest.mark.oldest
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


def test_the_models_number_of_outputs_counts_unless_a_line_sets_another(tmp_path):
    defaults = read(tmp_path, {"do_sample": True, "num_return_sequences": 3})
    assert (defaults.params({}).n, defaults.params({"n": 1}).n, defaults.settings()["n"]) == (3, 1, 3)
    assert defaults.with_command({"n": 2}).params({}).n == 2
