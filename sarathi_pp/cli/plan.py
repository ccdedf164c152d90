"""`sarathi-pp plan`: how to cut a model and its prompts, without running it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sarathi_pp.cli.option_group import SectionedCommand
from sarathi_pp.cli.options import MEMORY, MODEL, PARALLELISM, RUN, SCHEDULE, WORKLOAD, run_config
from sarathi_pp.config import RunConfig
from sarathi_pp.report import formats


@click.command(
    cls=SectionedCommand,
    params=[
        WORKLOAD.option("--workload", default="uniform:n=256,min=256,max=512,pd=8"),
        *RUN.options("--json"),
        MODEL.option("--model", required=True),
        *MODEL.options("--dtype", "--device", "--max-model-len"),
        *MEMORY.options(),
        *PARALLELISM.options("--stages", "--tensor-parallel-size", "--layer-split"),
        SCHEDULE.option("--profile", show_default="an estimate from the shape"),
        *SCHEDULE.options("--max-num-seqs"),
    ],
)
def plan(workload: str, as_json: bool, **options: Any) -> None:
    """Say how to cut a model into stages and prompts into chunks, what fits, and what to expect. Runs nothing."""
    from sarathi_pp.bench.workload_file import read_workload
    from sarathi_pp.tuning.plan import make_plan

    config = run_config(options, None)
    if config.profile is not None and config.gpu_memory_utilization != RunConfig(model="").gpu_memory_utilization:
        raise click.UsageError("--profile says how many KV pages fit: give --kv-cache-memory to have others")
    found = make_plan(config, read_workload(workload))
    if as_json:
        click.echo(json.dumps(found))
    else:
        Console().print(render_plan(found))


def render_plan(found: Mapping[str, Any]) -> RenderableType:
    """A plan as bench/plan makes it. Fits 80 columns."""
    basis = "measured" if found["source"] == "profile" else "estimated from the model's shape: right in kind only"
    split = ",".join(map(str, found["layer_split"]))
    lines = [
        Text.assemble(
            ("--chunk-size ", "dim"),
            (str(found["chunk_size"]), "bold"),
            ("  --layer-split ", "dim"),
            (split, "bold"),
            ("  --inflight ", "dim"),
            (str(found["inflight"]), "bold"),
            ("  --max-num-seqs ", "dim"),
            (str(found["max_num_seqs"]), "bold"),
        ),
        Text(
            f"tile {found['tile']}, ridge {found['ridge']}, saturated at {found['saturation_tokens']} tokens; "
            f"times {basis}"
        ),
        Text(f"{found['workload']}: {found['prompt_to_output']:.1f} prompt tokens for each output token"),
        Text.assemble(
            "predicted: ",
            (f"{formats.count(found['total_tokens_per_s'])} tokens/s", "bold"),
            ", bubble ",
            (formats.share(found["bubble_ratio"]), "bold"),
            f", {formats.seconds(found['wall_s'])} s, {found['microbatches']:,} microbatches",
        ),
    ]
    if (shards := found["tensor_parallel_size"]) > 1:
        lines.append(Text(f"{shards} ranks hold each stage together; weights and KV are of one of them"))
    notes = [Text(f"note: {note}", style="yellow") for note in found["notes"]]
    return Group(*lines, "", _stages(found), *notes)


def _stages(found: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("stage", "layers", "microbatch\nms", "weights\nGiB", "KV\nGiB", "KV pages", "KV tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in found["per_stage"]:
        first, end = stage["layers"]
        table.add_row(
            str(stage["stage"]),
            f"{first}-{end - 1}",
            f"{1e3 * stage['microbatch_s']:.1f}",
            formats.gib(stage["weights_bytes"]),
            formats.gib(stage["kv_bytes"]),
            f"{stage['pages']:,}",
            f"{stage['pages'] * found['page_size']:,}",
        )
    return table
