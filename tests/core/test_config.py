"""Values that Python programs naturally hold become options, or an error names the argument and its valid values."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

from sarathi_pp.config import RunConfig, size_in_bytes
from sarathi_pp.errors import ConfigError, OptionError, RowError
from sarathi_pp.sampling_params import SamplingParams


class Torch:
    """A dtype or device of torch, which these tests do not import."""

    __module__ = "torch"

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("model", Path("a/b"), "a/b"),
        ("run_dir", "out", Path("out")),
        ("run_dir", PurePosixPath("out"), Path("out")),
        ("profile", "p.json", Path("p.json")),
        ("emulate", "p.json", Path("p.json")),
        ("kv_cache_memory_bytes", "1GiB", 1 << 30),
        ("kv_cache_memory_bytes", "500 MB", 500_000_000),
        ("kv_cache_memory_bytes", "4096", 4096),
        ("kv_cache_memory_bytes", np.int64(4096), 4096),
        ("layer_split", [3, 2], (3, 2)),
        ("layer_split", np.array([3, 2]), (3, 2)),
        ("layer_split", (layers for layers in (3, 2)), (3, 2)),
        ("layer_split", "even", "even"),
        ("stages", np.int32(2), 2),
        ("chunk_size", np.uint8(64), 64),
        ("seed", np.int64(-5), -5),
        ("gpu_memory_utilization", np.float32(0.5), 0.5),
        ("gpu_memory_utilization", 1, 1.0),
        ("request_rate", 3, 3.0),
        ("request_rate", math.inf, math.inf),
        ("peer_timeout_s", 5, 5.0),
        ("join_timeout_s", np.float64(5.5), 5.5),
        ("debug_nan", np.bool_(True), True),
        ("dtype", Torch("torch.bfloat16"), "bfloat16"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8"),
        ("device", Torch("cuda"), "cuda"),
    ],
)
def test_natural_values_convert(name: str, given: object, taken: object) -> None:
    config = RunConfig(**{"model": "m", name: given})  # type: ignore[arg-type]
    value = getattr(config, name)
    assert (value, type(value)) == (taken, type(taken))
    # This is the way to a worker of an LLM.
    assert RunConfig(**json.loads(json.dumps(asdict(config), default=str))) == config


WRONG = [
    ("model", 3, "a string"),
    ("policy", None, "a string"),
    ("attention", 1, "a string"),
    ("stages", 2.0, "an integer of at least 1"),
    ("stages", True, "an integer of at least 1"),
    ("replicas", "2", "an integer of at least 1"),
    ("tensor_parallel_size", 0, "an integer of at least 1"),
    ("chunk_size", 0, "an integer of at least 1"),
    ("max_num_seqs", -1, "an integer of at least 1"),
    ("max_model_len", 1.5, "an integer of at least 1"),
    ("page_size", [16], "an integer of at least 1"),
    ("inflight", 0, "an integer of at least 1"),
    ("kv_cache_memory_bytes", "much", "a size of at least one byte"),
    ("kv_cache_memory_bytes", 1.5, "a size of at least one byte"),
    ("kv_cache_memory_bytes", 0, "a size of at least one byte"),
    ("gpu_memory_utilization", 0, "a number in (0, 1]"),
    ("gpu_memory_utilization", "0.9", "a number in (0, 1]"),
    ("gpu_memory_utilization", math.nan, "a number in (0, 1]"),
    ("layer_split", "2,3", "one integer per stage"),
    ("layer_split", [2.5], "one integer per stage"),
    ("layer_split", 3, "one integer per stage"),
    ("dtype", "int8", "one of auto, float32"),
    ("dtype", [], "one of auto, float32"),
    ("weights", "int4", "one of dtype, stored"),
    ("kv_cache_dtype", "fp8_e5m2", "one of auto, fp8"),
    ("kv_cache_dtype", "bfloat16", "auto, which follows dtype='bfloat16', or fp8"),
    ("device", Torch("cuda:1"), "one of auto, cpu, cuda"),
    ("head", "first", "one of auto, last"),
    ("transport", None, "one of auto, gloo"),
    ("prefix_cache", True, "one of auto, off, prompts, all"),
    ("order", "random", "one of auto, input, prefix"),
    ("order_window", 0, "an integer of at least 1"),
    ("request_rate", 0, "above 0"),
    ("request_rate", "fast", "above 0"),
    ("seed", 1 << 63, "a 64-bit integer"),
    ("seed", 1.0, "a 64-bit integer"),
    ("peer_timeout_s", 0, "above 0 seconds"),
    ("join_timeout_s", "60", "above 0 seconds"),
    ("debug_nan", 1, "True or False"),
    ("enforce_eager", "yes", "True or False"),
    ("run_dir", 3, "a path"),
    ("emulate", ["a"], "a path"),
    ("profile", b"p", "a path"),
    ("sampling_overrides", {"bogus": 1}, "fields of SamplingParams"),
    ("sampling_overrides", [1], "a dictionary"),
    ("override_generation_config", "x", "a dictionary"),
    ("default_chat_template_kwargs", "x", "a dictionary"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_a_wrong_value_names_the_argument_and_for_the_command_the_option(
    name: str, value: object, allowed: str
) -> None:
    options = {"model": "m", name: value}
    with pytest.raises(OptionError) as raised:
        RunConfig(**options)  # type: ignore[arg-type]
    assert str(raised.value).startswith(f"{name}=") and f"it must be {allowed}" in str(raised.value)
    option = name.replace("_", "-").removesuffix("-bytes").removesuffix("-s")
    for_command = raised.value.for_command
    assert for_command.startswith(f"--{option} is ") and f"it must be {allowed}" in for_command


def test_every_field_has_a_wrong_value() -> None:
    assert {name for name, _, _ in WRONG} == {one.name for one in fields(RunConfig)}


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("max_new_tokens", np.int64(3), 3),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", np.float64(0.5), 0.5),
        ("top_k", np.int32(-1), 0),
        ("top_p", np.float16(0.5), 0.5),
        ("min_p", np.float32(0.25), 0.25),
        ("seed", np.uint8(7), 7),
        ("ignore_eos", np.bool_(True), True),
        ("skip_special_tokens", np.bool_(False), False),
        ("presence_penalty", np.float32(0.5), 0.5),
        ("no_repeat_ngram_size", np.int64(3), 3),
        ("stop_token_ids", np.array([3, 4]), (3, 4)),
        ("allowed_token_ids", [np.int32(3)], (3,)),
        ("allowed_token_ids", None, None),
        ("suppress_tokens", None, ()),
        ("bad_words_ids", [np.array([1, 2])], ((1, 2),)),
        ("logit_bias", {np.int64(3): np.float32(0.5)}, ((3, 0.5),)),
        ("logit_bias", None, ()),
    ],
)
def test_sampling_takes_numbers_of_numpy(name: str, given: object, taken: object) -> None:
    params = SamplingParams(**{name: given})  # type: ignore[arg-type]
    assert getattr(params, name) == taken
    json.dumps(asdict(params))


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_new_tokens", 2.0), ("temperature", "1"), ("top_k", np.array([1])), ("seed", "x"), ("ignore_eos", 1)],
)
def test_sampling_names_the_field(name: str, value: object) -> None:
    with pytest.raises(RowError) as raised:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert raised.value.message.startswith(f"{name} is ")


def test_sampling_has_the_defaults_of_its_fields() -> None:
    """Its constructor is written out, to accept the names of other engines."""
    assert asdict(SamplingParams()) == {one.name: one.default for one in fields(SamplingParams)}
    assert replace(SamplingParams(3), seed=1) == SamplingParams(max_tokens=3, seed=1)
    listed = SamplingParams(min_tokens=2, logit_bias={3: 1, 2: 1}, stop_token_ids=[1], bad_words_ids=[[1]])
    assert (listed.min_tokens, listed.logit_bias) == (2, ((2, 1.0), (3, 1.0)))
    assert {listed: 1}[replace(listed, seed=None)] == 1
    assert SamplingParams(**json.loads(json.dumps(asdict(listed)))) == listed


def test_a_shortest_output_is_given_in_one_way() -> None:
    with pytest.raises(RowError, match="min_length is 9; it must be 0 if min_new_tokens is given, which is 2"):
        SamplingParams(min_new_tokens=2, min_length=9)
    with pytest.raises(ConfigError, match="min_new_tokens and min_tokens are the same parameter; give one of them"):
        SamplingParams(min_new_tokens=2, min_tokens=2)


def test_sizes() -> None:
    texts = ("1", "1k", "1KiB", "1.5 GiB", " 2TB ", "", "-1", "1XB")
    assert list(map(size_in_bytes, texts)) == [1, 1000, 1024, 3 << 29, 2 * 10**12, None, None, None]
