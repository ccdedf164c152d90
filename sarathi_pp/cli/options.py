"""The options that commands share, in groups, and the RunConfig that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from sarathi_pp.cli.option_group import Option, OptionGroup
from sarathi_pp.cli.values import Bytes, Count, JsonObject, KvCacheDtype, LayerSplit, Listed, Real
from sarathi_pp.config import (
    ATTENTIONS,
    DEVICES,
    DTYPES,
    HEADS,
    ORDERS,
    PREFIX_CACHES,
    TRANSPORTS,
    WEIGHTS,
    RunConfig,
    option_of,
    options_of,
    stages_among,
)
from sarathi_pp.core.policy import POLICIES, with_tbt_slo
from sarathi_pp.errors import ConfigError, OptionError
from sarathi_pp.inputs.input_format import INPUT_FORMATS
from sarathi_pp.sampling_params import SamplingParams

_PATH = click.Path(path_type=Path)

RUN = OptionGroup(
    "Run",
    Option(
        "--input",
        "-i",
        "input_path",
        required=True,
        metavar="FILE|-",
        help="Prompts: JSON Lines, or plain text with a prompt on each line.",
    ),
    Option(
        "--input-format",
        type=click.Choice(INPUT_FORMATS),
        default="auto",
        help="Format of the input. auto decides by name and first lines.",
    ),
    Option(
        "--output",
        "-o",
        "output_path",
        required=True,
        metavar="FILE|-",
        help="Answers: JSON Lines, in the order in which requests finish.",
    ),
    Option(
        "--run-dir",
        type=_PATH,
        metavar="DIR",
        show_default="OUTPUT.run, none with -",
        help="Directory for traces, report.json and exit_code.",
    ),
    Option("--overwrite", is_flag=True, help="Replace an existing output and run directory."),
    Option("--strict", is_flag=True, help="Refuse a stream, and a file with a line that cannot run."),
    Option(
        "--request-rate",
        type=float,
        default=float("inf"),
        help="Requests per second that arrive, as a Poisson process.",
    ),
    Option(
        "--order",
        type=click.Choice(ORDERS),
        default="auto",
        help="prefix: prompts with equal beginnings follow each other.",
    ),
    Option(
        "--order-window",
        type=Count(),
        metavar="ROWS",
        show_default="2048",
        help="Most rows of a file that the order prefix reads ahead.",
    ),
    Option("--seed", type=int, default=0, help="Seed of all sampling. A request draws from this and its id."),
    Option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        help="Serve Prometheus metrics on this loopback port. 0 picks one.",
    ),
    Option("--json", "as_json", is_flag=True, help="Print one JSON document as the last line of standard output."),
    Option("--quiet", "-q", is_flag=True, help="Show no progress and no table."),
)

# For commands without --input. Help lists it in the section of RUN.
WORKLOAD = OptionGroup(
    RUN.title,
    Option(
        "--workload",
        metavar="SPEC|FILE",
        help="Requests, such as uniform:n=32,min=256,max=1024,pd=8, or a file.",
    ),
)

MODEL = OptionGroup(
    "Model",
    Option("--model", metavar="DIR|HUB_ID", help="Model directory, or an id on the Hugging Face Hub."),
    Option(
        "--emulate",
        type=_PATH,
        metavar="PROFILE",
        help="Sleep the stage times of this profile.json. Runs no model.",
    ),
    Option(
        "--dtype",
        type=click.Choice(DTYPES),
        default="auto",
        help="Float type of the computation. auto: one that is fast here.",
    ),
    Option(
        "--weights",
        type=click.Choice(WEIGHTS),
        default="dtype",
        help="Dequantise weights to dtype, or keep FP8 and MXFP4 on a GPU.",
    ),
    Option("--device", type=click.Choice(DEVICES), default="auto", help="Device that the stages compute on."),
    Option("--attention", type=click.Choice(ATTENTIONS), default="auto", help="Implementation of attention."),
    Option(
        "--max-model-len",
        type=Count(),
        show_default="the model's",
        help="Most tokens of prompt and output together.",
    ),
)

MEMORY = OptionGroup(
    "Memory",
    Option(
        *options_of("kv_cache_memory_bytes"),
        type=Bytes(),
        show_default="from free memory",
        help="KV cache of each rank, such as 4GiB.",
    ),
    Option(
        "--kv-cache-dtype",
        type=KvCacheDtype(),
        default="auto",
        help="auto: that of --dtype. fp8: one byte per value. Changes answers.",
    ),
    Option("--gpu-memory-utilization", type=float, default=0.9, help="Share of a GPU's memory to use, at most 1."),
    Option(
        *options_of("page_size"),
        type=Count(auto=True),
        default="auto",
        show_default="16; flash and varlen 256",
        help="Tokens per page of the KV cache.",
    ),
)

PARALLELISM = OptionGroup(
    "Parallelism",
    Option(
        *options_of("stages"),
        type=Count(),
        show_default="1, under torchrun from its processes",
        help="Pipeline stages of each replica.",
    ),
    Option(
        *options_of("replicas"),
        type=Count(),
        default=1,
        help="Pipelines that share the requests.",
    ),
    Option(
        *options_of("tensor_parallel_size"),
        type=Count(),
        default=1,
        help="Ranks that share each stage. Must divide the model's KV heads.",
    ),
    Option(
        "--layer-split",
        type=LayerSplit(),
        default="auto",
        help="Layers per stage. auto: equal time by the profile, otherwise even.",
    ),
    Option(
        "--head",
        type=click.Choice(HEADS),
        default="auto",
        help="Stage of the LM head. auto: on CPU the first may compute it too.",
    ),
    Option(
        "--transport",
        type=click.Choice(TRANSPORTS),
        default="auto",
        help="auto: shared memory on CPUs of a host, NCCL on GPUs, or gloo.",
    ),
)

SCHEDULE = OptionGroup(
    "Schedule",
    Option(
        "--profile",
        type=_PATH,
        metavar="FILE",
        help="profile.json of this model and machine. It sets auto options.",
    ),
    Option(
        "--policy",
        default="balanced",
        metavar="NAME[:key=value,...]",
        help=f"One of {', '.join(sorted(POLICIES))}, or a class as package.module:Class.",
    ),
    Option(
        *options_of("chunk_size"),
        type=Count(auto=True),
        default="auto",
        show_default="auto, by the profile or the policy",
        help="Most tokens in a microbatch.",
    ),
    Option(
        "--max-num-seqs",
        type=Count(),
        show_default="64 x stages",
        help="Most sequences that run at once in a pipeline.",
    ),
    Option(
        "--inflight",
        type=Count(auto=True),
        default="auto",
        show_default="auto, the stages or one more",
        help="Most microbatches at once in a pipeline.",
    ),
    Option(
        "--prefix-cache",
        type=click.Choice(PREFIX_CACHES),
        default="auto",
        help="KV pages that requests with equal beginnings share.",
    ),
    Option(
        "--tbt-slo",
        type=Real(0, min_open=True),
        help="Most seconds between tokens of a request. balanced keeps to it.",
    ),
)

SAMPLING = OptionGroup(
    "Sampling",
    Option(
        *options_of("max_new_tokens"),
        type=click.IntRange(min=0),
        show_default="256",
        help="Most tokens to generate per request.",
    ),
    Option("--temperature", type=float, help="Randomness of sampling. 0 is greedy."),
    Option("--top-k", type=int, help="Sample from the k likeliest tokens. 0 keeps all."),
    Option("--top-p", type=float, help="Sample from the likeliest tokens that hold this share."),
    Option("--min-p", type=float, help="Drop tokens below this share of the likeliest one."),
    Option("--stop", multiple=True, help="String that ends an output. May be repeated."),
    Option("--ignore-eos", is_flag=True, default=None, help="Continue after the end-of-sequence token."),
    Option(
        *options_of("min_new_tokens"),
        type=click.IntRange(min=0),
        show_default="0",
        help="Least tokens to generate per request.",
    ),
    Option(
        "--stop-token-ids",
        type=Listed(click.IntRange(min=0), "N,N,..."),
        help="Ids of tokens that end an output.",
    ),
    Option(
        "--include-stop-str-in-output",
        is_flag=True,
        default=None,
        help="Keep the stop string or stop token in the text.",
    ),
    Option("--presence-penalty", type=float, help="Subtract this from the logits of tokens in the output."),
    Option("--frequency-penalty", type=float, help="Subtract this once per earlier use of a token."),
    Option("--repetition-penalty", type=float, help="Factor against tokens of prompt and output. 1 is off."),
    Option("--no-repeat-ngram-size", type=int, help="Never repeat a sequence of this many tokens. 0 is off."),
    Option("--logprobs", type=int, metavar="N", help="Return log probabilities, and those of N likeliest tokens."),
    Option("--prompt-logprobs", type=int, metavar="N", help="The same for the tokens of prompts."),
    Option("--logprobs-from", type=int, help="Position of the first prompt token of --prompt-logprobs."),
    Option("--n", type=int, metavar="N", help="Outputs of each prompt, each with another seed. Needs sampling."),
    Option("--bad-words", multiple=True, metavar="TEXT", help="Text to keep out of outputs. May be repeated."),
    Option(
        "--override-generation-config",
        type=JsonObject(),
        help="Settings that win over the model's generation_config.json.",
    ),
    Option(
        "--default-chat-template-kwargs",
        type=JsonObject(),
        help="Variables for the chat template. Those of a line win.",
    ),
)

RECOVERY = OptionGroup(
    "Recovery",
    Option("--resume", is_flag=True, help="Continue an existing output. Rows that have a line are skipped."),
    Option("--retry-errors", is_flag=True, help="With --resume: run rows again that ended with an error."),
    Option("--force", is_flag=True, help="With --resume: continue although model, parameters or input differ."),
    Option(
        "--max-restarts",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Restart and resume up to N times after a stage fails.",
    ),
    Option(
        *options_of("peer_timeout_s"),
        type=float,
        default=60.0,
        help="Seconds of silence after which a stage counts as lost.",
    ),
    Option(
        *options_of("join_timeout_s"),
        type=float,
        default=300.0,
        help="Seconds for all ranks to join, and of silence during set-up.",
    ),
)

DEBUGGING = OptionGroup(
    "Debugging",
    Option(
        "--verify",
        type=click.Choice(["sha256"]),
        help="Compare weight files with published sums or with SHA256SUMS.",
    ),
    Option("--debug-nan", is_flag=True, help="Report the first stage whose output has NaN or infinity."),
    Option("--enforce-eager", is_flag=True, help="Do not use CUDA graphs."),
)


def run_config(options: Mapping[str, Any], world_size: int | None) -> RunConfig:
    """Return the run that the options of a command describe.

    An option sets the field of the same name. A field keeps its default if its option is None, or absent from the
    command. `--seed` is the run's seed. Only an input line can give a request its own seed.

    Args:
        options: values by name of the command's parameter. Options that are not of a RunConfig are ignored.
        world_size: number of processes that torchrun has started; None without torchrun.

    Raises:
        ConfigError: a value is wrong. The message names the option.
    """
    given = {one.name: options.get(_parameter(one.name)) for one in fields(RunConfig)}
    if world_size is not None:
        replicas, shards = options.get("replicas", 1), options["tensor_parallel_size"]
        given["stages"] = stages_among(world_size, options["stages"], replicas, shards)
    if "emulate" in options and (options["model"] is None) == (options["emulate"] is None):
        raise click.UsageError("give either --model or, to run without one, --emulate PROFILE")
    given["sampling_overrides"] = {
        one.name: options[one.name]
        for one in fields(SamplingParams)
        if one.name != "seed" and options.get(one.name) not in (None, ())
    }
    try:
        if bound_s := options.get("tbt_slo"):
            given["policy"] = with_tbt_slo(options["policy"], bound_s)
        return RunConfig(**{"model": "", **{name: value for name, value in given.items() if value is not None}})
    except OptionError as error:
        raise ConfigError(error.for_command) from None


def _parameter(field: str) -> str:
    """Return click's name for the option that sets a field of RunConfig: peer_timeout for peer_timeout_s."""
    return option_of(field).removeprefix("--").replace("-", "_")
