"""Each option is declared once, and sets its field. Its help is one short line in a section."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from sarathi_pp.cli.main import cli
from sarathi_pp.cli.options import SAMPLING, run_config
from sarathi_pp.config import ALIASES, KV_CACHE_DTYPE_ALIASES, RunConfig, option_of, options_of
from sarathi_pp.errors import ConfigError
from sarathi_pp.sampling_params import SAMPLING_ALIASES, SamplingParams

COMMANDS = ("generate", "profile", "plan", "bench", "simulate", "doctor", "check", "report", "compare")
NEEDED = {
    "generate": ["--input", "in", "--output", "out", "--model", "m"],
    "profile": ["--output", "out", "--model", "m"],
    "plan": ["--model", "m"],
}
# Options of these commands that are not in their RunConfig.
OF_NO_RUN_CONFIG = {
    "generate": {
        *("input_path", "input_format", "output_path", "overwrite", "strict", "metrics_port", "as_json", "quiet"),
        *("resume", "retry_errors", "force", "max_restarts", "verify"),
    },
    "profile": {"output", "overwrite", "as_json", "quiet"},
    "plan": {"workload", "as_json", "cards", "device_memory", "devices", "hosts"},
}
# A field of RunConfig, the options of generate that set it, and its value then.
FIELDS: dict[str, tuple[list[str], object]] = {
    "model": ([], "m"),
    "stages": (["--stages", "3"], 3),
    "replicas": (["--replicas", "2"], 2),
    "tensor_parallel_size": (["--tensor-parallel-size", "2"], 2),
    "policy": (["--policy", "balanced", "--tbt-slo", "0.5"], "balanced:tbt_slo=0.5"),
    "chunk_size": (["--chunk-size", "1K"], 1024),
    "max_num_seqs": (["--max-num-seqs", "8"], 8),
    "max_model_len": (["--max-model-len", "100"], 100),
    "page_size": (["--page-size", "8"], 8),
    "kv_cache_memory_bytes": (["--kv-cache-memory", "4GiB"], 4 << 30),
    "kv_cache_dtype": (["--kv-cache-dtype", "fp8"], "fp8"),
    "gpu_memory_utilization": (["--gpu-memory-utilization", "0.5"], 0.5),
    "layer_split": (["--layer-split", "3,2"], (3, 2)),
    "inflight": (["--inflight", "5"], 5),
    "dtype": (["--dtype", "bfloat16"], "bfloat16"),
    "weights": (["--weights", "stored"], "stored"),
    "device": (["--device", "cpu"], "cpu"),
    "attention": (["--attention", "sdpa"], "sdpa"),
    "request_rate": (["--request-rate", "2"], 2.0),
    "seed": (["--seed", "7"], 7),
    "peer_timeout_s": (["--peer-timeout", "5"], 5.0),
    "join_timeout_s": (["--join-timeout", "6"], 6.0),
    "debug_nan": (["--debug-nan"], True),
    "enforce_eager": (["--enforce-eager"], True),
    "head": (["--head", "last"], "last"),
    "prefix_cache": (["--prefix-cache", "prompts"], "prompts"),
    "order": (["--order", "input"], "input"),
    "order_window": (["--order-window", "2K"], 2048),
    "transport": (["--transport", "gloo"], "gloo"),
    "run_dir": (["--run-dir", "run"], Path("run")),
    "emulate": (["--emulate", "profile.json"], Path("profile.json")),
    "profile": (["--profile", "profile.json"], Path("profile.json")),
    "sampling_overrides": (["--top-k", "5", "--stop", "a", "--stop", "b"], {"top_k": 5, "stop": ("a", "b")}),
    "override_generation_config": (["--override-generation-config", '{"max_length": 9}'], {"max_length": 9}),
    "default_chat_template_kwargs": (["--default-chat-template-kwargs", '{"think": false}'], {"think": False}),
}
# Fields of SamplingParams that only a line of the input or a Python program sets. `--seed` is the run's.
OF_A_REQUEST_ALONE = {
    *("seed", "skip_special_tokens", "logit_bias", "allowed_token_ids", "bad_words_ids", "suppress_tokens"),
    *("begin_suppress_tokens", "min_length", "typical_p", "epsilon_cutoff", "eta_cutoff", "structured_outputs"),
}
# Options of sampling, and the values of the fields that they set.
SAMPLING_VALUES: dict[str, tuple[list[str], object]] = {
    "max_new_tokens": (["--max-tokens", "3"], 3),
    "min_new_tokens": (["--min-tokens", "3"], 3),
    "stop_token_ids": (["--stop-token-ids", "7,5"], (7, 5)),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "presence_penalty": (["--presence-penalty", "0.5"], 0.5),
    "frequency_penalty": (["--frequency-penalty", "-0.5"], -0.5),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "no_repeat_ngram_size": (["--no-repeat-ngram-size", "3"], 3),
    "logprobs": (["--logprobs", "5"], 5),
    "prompt_logprobs": (["--prompt-logprobs", "5"], 5),
    "logprobs_from": (["--logprobs-from", "3"], 3),
    "n": (["--n", "3"], 3),
    "bad_words": (["--bad-words", "a b", "--bad-words", "c"], ("a b", "c")),
}
# Options of one name with another meaning in this command, so that each has its own help.
OWN_MEANING = {
    *(("profile", "--output"), ("bench", "--output"), ("compare", "--html")),
    *(("profile", "--seed"), ("simulate", "--seed"), ("simulate", "--tbt-slo")),
}
LONGEST_HELP = 70


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def parse(name: str, *arguments: str) -> dict[str, Any]:
    return command(name).make_context(name, [*NEEDED[name], *arguments]).params


def options() -> Iterator[tuple[str, click.Option]]:
    for name in COMMANDS:
        yield from ((name, one) for one in command(name).params if isinstance(one, click.Option))


@pytest.mark.parametrize("field", FIELDS)
def test_an_option_sets_each_field_of_a_run_config(field: str) -> None:
    arguments, value = FIELDS[field]
    parsed = parse("generate", *arguments)
    if field == "emulate":
        parsed["model"] = None
    assert getattr(run_config(parsed, None), field) == value


@pytest.mark.parametrize("name", KV_CACHE_DTYPE_ALIASES)
def test_an_option_takes_names_of_values_in_other_engines(name: str) -> None:
    config = run_config(parse("generate", "--kv-cache-dtype", name), None)
    assert config.kv_cache_dtype == KV_CACHE_DTYPE_ALIASES[name]


@pytest.mark.parametrize(
    ("given", "said"),
    [("bfloat16", "must be auto or fp8; auto follows --dtype bfloat16"), ("fp8_e5m2", "not one of 'auto', 'fp8'")],
)
def test_a_type_of_keys_and_values_that_is_not_supported_is_refused(given: str, said: str) -> None:
    with pytest.raises(click.BadParameter, match=said):
        parse("generate", "--kv-cache-dtype", given)


@pytest.mark.parametrize("field", [*ALIASES.values(), *SAMPLING_ALIASES.values()])
def test_an_option_has_the_other_names_of_its_field(field: str) -> None:
    found = [option.opts for name, option in options() if name == "generate" and option.opts[0] == option_of(field)]
    assert found == [[*options_of(field)]]


def test_no_option_has_another_name_that_no_field_has() -> None:
    names = {one for name, option in options() if name == "generate" for one in option.opts[1:] if one.startswith("--")}
    fields_with_aliases = {*ALIASES.values(), *SAMPLING_ALIASES.values()}
    assert names == {one for field in fields_with_aliases for one in options_of(field)[1:]}


def test_no_field_of_a_run_config_is_forgotten() -> None:
    assert FIELDS.keys() == {one.name for one in fields(RunConfig)}
    defaults = RunConfig(model="")
    assert not [name for name, (_, value) in FIELDS.items() if value == getattr(defaults, name)], "these show nothing"


def test_an_option_sets_each_sampling_parameter_of_all_requests() -> None:
    names = {option.name for option in SAMPLING.options()} - {
        "override_generation_config",
        "default_chat_template_kwargs",
    }
    assert names == {one.name for one in fields(SamplingParams)} - OF_A_REQUEST_ALONE


@pytest.mark.parametrize("field", SAMPLING_VALUES)
def test_a_sampling_option_sets_the_field_of_its_name(field: str) -> None:
    arguments, value = SAMPLING_VALUES[field]
    found = run_config(parse("generate", *arguments), None).sampling_overrides
    assert found == {field: value} and getattr(SamplingParams(**found), field) == value  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NEEDED)
def test_without_options_a_run_config_has_its_own_defaults(name: str) -> None:
    assert run_config(parse(name), None) == RunConfig(model="m")


@pytest.mark.parametrize("name", NEEDED)
def test_no_option_is_ignored(name: str) -> None:
    """An option without a field of its name would be dropped without an error."""
    flags = {flag.removeprefix("--").replace("-", "_") for args, _ in FIELDS.values() for flag in args}
    known = flags | {"model"} | {option.name for option in SAMPLING.options()}
    assert {one.name for one in command(name).params} - known == OF_NO_RUN_CONFIG[name]


def test_torchrun_says_how_many_stages_there_are() -> None:
    parsed = parse("generate", "--replicas", "2", "--tensor-parallel-size", "2")
    assert run_config(parsed, 12).stages == 3
    assert run_config(parse("profile", "--tensor-parallel-size", "2"), 4).stages == 2
    with pytest.raises(ConfigError, match="torchrun started 6 processes"):
        run_config(parsed, 6)


def test_an_error_names_the_option() -> None:
    with pytest.raises(ConfigError, match=r"^--peer-timeout is 0\.0; it must be above 0 seconds"):
        run_config(parse("profile", "--peer-timeout", "0"), None)


def test_each_option_has_a_line_of_help() -> None:
    bad = []
    for name, option in options():
        text = (option.help or "").removesuffix(" May be repeated.")
        names_policies = "--policy" in option.opts
        if not text.endswith(".") or ";" in text or (len(text) > LONGEST_HELP and not names_policies):
            bad.append((name, option.opts[0], len(text), text))
    assert not bad


def test_an_option_has_one_help_in_all_commands() -> None:
    texts = defaultdict(set)
    for name, option in options():
        if (name, option.opts[0]) not in OWN_MEANING:
            texts[option.opts[0]].add((option.help or "").removesuffix(" May be repeated."))
    assert not {option: found for option, found in texts.items() if len(found) > 1}


@pytest.mark.parametrize("name", ["generate", "profile", "plan", "bench", "simulate"])
def test_help_lists_each_option_once_in_its_section(name: str) -> None:
    text = CliRunner().invoke(cli, [name, "--help"]).output
    sections = dict(re.findall(r"^(\w[\w ]*):\n((?:  .*\n)+)", text, re.MULTILINE))
    sections.pop("Commands", None)
    listed = {title: re.findall(r"^  (?:-\w, )?(--[\w-]+)", body, re.MULTILINE) for title, body in sections.items()}
    assert listed.pop("Other options") == ["--help"]
    expected = defaultdict(list)
    for option in command(name).params:
        expected[getattr(option, "section", None)].append(option.opts[0])
    assert listed == expected


@pytest.mark.parametrize(
    "arguments", [["simulate", "--preset", "gpt3-a100-tp8pp8"], ["bench", "--model", "m"]], ids=["simulate", "bench"]
)
def test_a_workload_is_needed(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert (done.exit_code, "Missing option '--workload'" in done.output) == (2, True), done.output
