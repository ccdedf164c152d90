"""The arguments of an LLM: names that users of other engines and of our command write, and errors in these names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from sarathi_pp import LLM, SamplingParams
from sarathi_pp.api.arguments import Arguments
from sarathi_pp.config import ALIASES, RunConfig
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.errors import CapacityError, ConfigError, SarathiError

ADDER = str(Path(__file__).parents[2] / "examples" / "tiny-adder")


def config(**options: object) -> RunConfig:
    return Arguments("m", options.pop("stages", None), options).config()


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_sets_its_field(alias: str) -> None:
    assert getattr(config(**{alias: 7}), ALIASES[alias]) == 7


def test_what_other_engines_say_and_is_so_is_taken() -> None:
    taken = {"trust_remote_code": False, "quantization": None, "load_format": "auto", "tokenizer": "m", "emulate": None}
    assert config(**taken, request_rate=math.inf) == config()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chunk_sise": 3}, "LLM has no argument 'chunk_sise'; did you mean chunk_size? help(sarathi_pp.RunConfig)"),
        ({"tensor_paralel_size": 2}, "did you mean tensor_parallel_size?"),
        ({"zzz": 3}, "LLM has no argument 'zzz'; help(sarathi_pp.RunConfig) lists all"),
        ({"stages": 2, "pp_size": 2}, "stages and pp_size are the same argument. Give one of them"),
        ({"block_size": 16, "page_size": 16}, "block_size and page_size are the same argument"),
        ({"pp_size": 0}, "pp_size=0: it must be an integer of at least 1"),
        ({"max_tokens": 3}, "LLM has no argument 'max_tokens'. SamplingParams has it"),
        ({"n": 1}, "LLM has no argument 'n'. SamplingParams has it"),
        ({"trust_remote_code": True}, "trust_remote_code=True cannot be honoured: code of a model's author is never"),
        ({"tokenizer": "other"}, "tokenizer='other' cannot be honoured: the tokenizer is read from"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb=4 cannot be honoured"),
        ({"emulate": Path("p.json")}, "emulate='p.json' cannot be honoured: an LLM runs its model. Use the command"),
        ({"request_rate": 2}, "request_rate=2 cannot be honoured: all prompts of a call arrive at once"),
    ],
)
def test_arguments_that_cannot_work_are_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as raised:
        config(**options)
    assert "--" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "text", "reworded"),
    [
        ({"policy": "x:y=1"}, "--policy x:y=1: x has no parameter", "policy='x:y=1': x has no parameter"),
        ({"policy": "a.b:C:k=1"}, "--policy a.b:C: there is no module", "policy='a.b:C': there is no module"),
        ({}, "try  more --stages, or --stages 2,", "try  more stages, or stages=2,"),
        ({"pp_size": 3}, "--stages is 3, and torchrun", "pp_size is 3, and torchrun"),
        ({}, "--layer-split 3,2 gives the", "layer_split=[3, 2] gives the"),
        ({}, "--layer-split even", "layer_split='even'"),
        ({}, "--kv-cache-memory 12MiB or less", "kv_cache_memory_bytes='12MiB' or less"),
        (
            {},
            "--device cuda: none; use --device cpu",
            "device='cuda': none; use device='cpu'",
        ),
        ({}, "ends; --debug-nan reports more", "ends; debug_nan=True reports more"),
        ({}, "within --join-timeout; is", "within join_timeout_s; is"),
        ({}, "Raise --kv-cache-memory, and run again with --resume --retry-errors", "Raise kv_cache_memory_bytes"),
        ({}, "--override-generation-config '{\"a\": 1}'", 'override_generation_config={"a": 1}'),
        ({}, "torchrun: --master-addr", "torchrun: --master-addr"),
        ({}, "--head-room and --stages-2", "--head-room and --stages-2"),
    ],
)
def test_options_become_arguments(given: dict[str, object], text: str, reworded: str) -> None:
    assert Arguments("m", None, given).reword(text) == reworded


# For each field, a value that RunConfig refuses, or that a later check refuses.
WRONG: Mapping[str, object] = {
    "model": "/nowhere/at/all",
    "stages": 9,
    "replicas": 0,
    "tensor_parallel_size": 3,
    "policy": "bogus",
    "chunk_size": 0,
    "max_num_seqs": 0,
    "max_model_len": 10**6,
    "page_size": "x",
    "kv_cache_memory_bytes": 100,
    "gpu_memory_utilization": 2,
    "layer_split": [3, 3],
    "inflight": 0,
    "dtype": "int8",
    "weights": "int4",
    "kv_cache_dtype": "fp8_e5m2",
    "device": "cuda",
    "attention": "triton",
    "request_rate": 1,
    "seed": "x",
    "peer_timeout_s": 0,
    "join_timeout_s": 0,
    "debug_nan": 3,
    "enforce_eager": 3,
    "head": "first",
    "transport": "nccl",
    "prefix_cache": "on",
    "order": "random",
    "order_window": 0,
    "run_dir": str(Path(__file__).parent),
    "emulate": "p.json",
    "profile": "/nowhere/at/all.json",
    "sampling_overrides": {"top_p": 9},
    "override_generation_config": {"bogus": 1},
    "default_chat_template_kwargs": "x",
}


@pytest.mark.parametrize("name", [one.name for one in fields(RunConfig)])
def test_an_error_about_any_field_names_no_option(name: str) -> None:
    options = {"model": ADDER, name: WRONG[name]}
    with pytest.raises(SarathiError) as raised:
        LLM(**options)  # type: ignore[arg-type]
    said = re.sub(r"`?sarathi-pp [^`;]*", "", str(raised.value))
    assert "--" not in said, said


@pytest.mark.parametrize(
    "policy", ["sarathi:x=1", "no_module:Class", "json:JSONDecoder", "json:absent", "balanced:tbt_slo=x"]
)
def test_errors_about_policies_name_the_argument(policy: str) -> None:
    arguments = Arguments(ADDER, None, {"policy": policy})
    with pytest.raises(ConfigError, match="^policy="), arguments.named():
        parse_policy(policy)


def test_an_error_of_a_stage_names_the_argument() -> None:
    with pytest.raises(CapacityError, match="a larger kv_cache_memory, more stages, or a smaller page_size"):
        LLM(ADDER, kv_cache_memory=100)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokns": 3}, "SamplingParams has no argument 'max_tokns'; did you mean max_tokens?"),
        ({"zzz": 3}, "SamplingParams has no argument 'zzz'; help(sarathi_pp.SamplingParams) lists all"),
        ({"best_of": 2}, "SamplingParams(best_of=2) is not supported yet; remove best_of"),
        ({"max_tokens": 1, "max_new_tokens": 1}, "max_new_tokens and max_tokens are the same parameter"),
    ],
)
def test_sampling_arguments_that_cannot_work_are_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_sampling_takes_the_names_of_other_engines() -> None:
    params = SamplingParams(max_tokens=8, n=1, presence_penalty=0.0, stop_token_ids=None)  # type: ignore[arg-type]
    assert params == SamplingParams(8) and params.max_tokens == params.max_new_tokens == 8
