"""Options that commands share: which model, on what, in how many stages; and policies side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from sarathi_pp.cli.values import Bytes, Count, LayerSplit
from sarathi_pp.config import DEVICES, DTYPES, RunConfig, stages_among
from sarathi_pp.core.policy import POLICIES
from sarathi_pp.errors import ConfigError, OptionError

_MODEL_OPTIONS = (
    click.option("--model", required=True, metavar="DIR|HUB_ID", help="Model directory, or an id on the Hub."),
    click.option(
        "--stages",
        "--pipeline-parallel-size",
        "--pp-size",
        type=Count(),
        help="Pipeline stages; under torchrun its processes.  [default: 1]",
    ),
    click.option(
        "--tensor-parallel-size",
        "--tp-size",
        type=Count(),
        default=1,
        show_default=True,
        help="Ranks that hold each stage together.",
    ),
    click.option("--layer-split", type=LayerSplit(), default="auto", help="Layers a stage.  [default: auto]"),
    click.option("--max-num-seqs", type=Count(), help="Running sequences over the pipeline.  [default: 64 x stages]"),
    click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True),
    click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True),
    click.option(
        "--max-model-len", type=Count(), help="Most tokens of prompt and output together.  [default: the model's]"
    ),
    click.option("--kv-cache-memory", type=Bytes(), help="KV cache of each stage, like 4GiB."),
    click.option(
        "--gpu-memory-utilization", type=float, default=0.9, show_default=True, help="Share of a GPU's memory to use."
    ),
    click.option(
        "--page-size", "--block-size", type=Count(auto=True), default="auto", help="Tokens a KV page.  [default: 16]"
    ),
)


policies_option = click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("balanced",),
    show_default=True,
    metavar="NAME[:key=value,...]",
    help=f"May be given several times. One of {', '.join(sorted(POLICIES))}, or a class as package.module:Class.",
)


def workload_option(*, example: str, default: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--workload",
        required=default is None,
        default=default,
        show_default=default is not None,
        metavar="SPEC|FILE",
        help=f"Like {example}; or a file with a line a request, as generate writes its output.",
    )


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds them to a command, in the order above."""
    for option in reversed(_MODEL_OPTIONS):
        command = option(command)
    return command


def run_config(options: dict[str, Any], world_size: int | None) -> RunConfig:
    """The run that these options describe. world_size: torchrun's processes, each of which is a shard of a stage."""
    stages, shards = options["stages"] or 1, options["tensor_parallel_size"]
    if world_size is not None:
        stages = stages_among(world_size, options["stages"], 1, shards)
    named = ("model", "layer_split", "max_num_seqs", "dtype", "device", "max_model_len", "page_size")
    some = ("gpu_memory_utilization", "attention", "run_dir", "seed", "profile")
    given = {name: options[name] for name in (*named, *some) if name in options}
    if "peer_timeout" in options:
        given["peer_timeout_s"] = options["peer_timeout"]
    with naming_options():
        return RunConfig(
            stages=stages, tensor_parallel_size=shards, kv_cache_memory_bytes=options["kv_cache_memory"], **given
        )


@contextmanager
def naming_options() -> Iterator[None]:
    """Let an error of a RunConfig that is made inside name the command's option, not Python's argument."""
    try:
        yield
    except OptionError as error:
        raise ConfigError(error.for_command) from None
