"""`sarathi-pp plan`: check if a model fits, and choose its layer split and chunk size, without running it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sarathi_pp.cli.option_group import Option, OptionGroup, SectionedCommand
from sarathi_pp.cli.options import MEMORY, MODEL, PARALLELISM, RUN, SCHEDULE, WORKLOAD, run_config
from sarathi_pp.cli.values import Bytes, Count, Listed
from sarathi_pp.config import RunConfig
from sarathi_pp.core.cost.cards import CARDS
from sarathi_pp.errors import CapacityError
from sarathi_pp.process.activity import Activity
from sarathi_pp.report import formats
from sarathi_pp.report.status import StatusLine

HARDWARE = OptionGroup(
    "Hardware elsewhere",
    Option(
        "--card",
        "cards",
        type=Listed(click.Choice(sorted(CARDS)), "NAME[,NAME...]"),
        help="Card of each device: h100-80g for all, or a100-80g,rtx-4090.",
    ),
    Option(
        "--device-memory",
        type=Listed(Bytes(), "SIZE[,SIZE...]"),
        show_default="the card's",
        help="Memory of each device, such as 24GiB. One size is for all devices.",
    ),
    Option("--devices", type=Count(), show_default="one per size or card", help="Devices per host."),
    Option("--hosts", type=Count(), default=1, help="Hosts with these devices."),
)


@click.command(
    cls=SectionedCommand,
    params=[
        WORKLOAD.option("--workload", default="uniform:n=256,min=256,max=512,pd=8"),
        *RUN.options("--json"),
        MODEL.option("--model", required=True),
        *MODEL.options("--dtype", "--device", "--max-model-len"),
        *MEMORY.options(),
        *HARDWARE.options(),
        PARALLELISM.option("--stages", show_default="1, or all described devices"),
        *PARALLELISM.options("--tensor-parallel-size", "--layer-split"),
        SCHEDULE.option("--profile", show_default="an estimate from the shape"),
        *SCHEDULE.options("--max-num-seqs"),
    ],
)
def plan(workload: str, as_json: bool, **options: Any) -> None:
    """Check if a model fits, choose its layer split and chunk size, and predict its speed. Runs nothing.

    The model needs no more than its config.json. Weights are not downloaded. The exit code is 2 if the model does not
    fit.
    """
    config = run_config(options, None)
    if config.profile is not None and not (options["cards"] or options["device_memory"]):
        if config.gpu_memory_utilization != RunConfig(model="").gpu_memory_utilization:
            raise click.UsageError("--profile sets the number of KV pages; change it with --kv-cache-memory")
    document = _make(config, workload, options)
    if as_json:
        click.echo(json.dumps(document))
    else:
        Console().print(render_plan(document), crop=False)
    if not document["fits"]:
        raise CapacityError(document["verdict"])


def _make(config: RunConfig, workload: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan. A status line shows what takes time meanwhile."""
    activity = Activity()
    with StatusLine(Console(stderr=True), activity):
        with activity.phase("loading libraries"):
            from sarathi_pp.bench.workload_file import read_workload
            from sarathi_pp.tuning.hardware import Hardware
            from sarathi_pp.tuning.plan import make_plan

        hardware = Hardware(
            hosts=options["hosts"],
            devices=options["devices"],
            memory=options["device_memory"] or (),
            cards=options["cards"] or (),
        )
        with activity.phase(f"planning {config.model}"):
            return make_plan(config, read_workload(workload), hardware, use_all_devices=options["stages"] is None)


def render_plan(document: Mapping[str, Any]) -> RenderableType:
    """Render the document of a plan (tuning/plan.py). The line of options is not wrapped."""
    notes = [Text(f"note: {note}", style="yellow") for note in document["notes"]]
    verdict = Text(document["verdict"], style="bold green" if document["fits"] else "bold red")
    return Group(
        _subject(document), verdict, *_advice(document), "", _stages(document), *_explanations(document), *notes
    )


def _subject(document: Mapping[str, Any]) -> Text:
    """Return the model, and the devices that the verdict is about."""
    used = document["devices"][: document["stages"] * document["tensor_parallel_size"]]
    devices = ", ".join(f"{count} x {title.removeprefix('a ')}" for title, count in Counter(used).items())
    hosts = f"{document['hosts']} hosts, together " if document["hosts"] > 1 else ""
    from_profile = "the device of the profile" if document["source"] == "profile" else "this host"
    hardware = f"{hosts}{devices}" if devices else f"{from_profile} ({document['device']})"
    stages = "1 stage" if document["stages"] == 1 else f"{document['stages']} stages"
    return Text(f"{document['model']} in {stages} on {hardware}", style="dim")


def _advice(document: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the options to use, or changes with which the model would fit."""
    if document["fits"]:
        # Not wrapped, so that it can be copied.
        yield Text(f"options to use: {' '.join(document['options'])}", no_wrap=True, overflow="ignore")
        yield Text.assemble(
            "predicted: ",
            (f"{formats.count(document['total_tokens_per_s'])} tokens/s", "bold"),
            ", bubble ",
            (formats.share(document["bubble_ratio"]), "bold"),
            f", {formats.seconds(document['wall_s'])} s, {document['microbatches']:,} microbatches",
        )
    for remedy in document["would_fit"]:
        yield Text(f"would fit: {' '.join(remedy['options'])}  ({remedy['text']})")


def _explanations(document: Mapping[str, Any]) -> Iterator[Text]:
    """Yield lines that explain the figures of the table."""
    yield Text(
        f"workload {document['workload']}: {document['prompt_to_output']:.1f} prompt tokens per output token\n"
        f"saturated at {document['saturation_tokens']} tokens per microbatch: more of them take longer in proportion"
    )
    if kinds := list(_kinds_of_layers(document)):
        yield Text("\n  ".join(("layers differ in time and memory", *kinds)))
    stored = [stage["stored_bytes"] for stage in document["per_stage"]]
    if document["quantised"] is not None and None not in stored:
        yield Text(
            f"GiB that each stage reads from its files ({document['quantised']}): {', '.join(map(formats.gib, stored))}"
        )
    if document["source"] != "profile":
        yield Text("times are estimates from the model's shape; `sarathi-pp profile` measures them")
    least = ", ".join(f"{stage['stage']} {formats.gib(stage['total_bytes'])} GiB" for stage in document["floor"])
    tokens = f"{document['longest_request_tokens']:,} tokens"
    yield Text(f"least memory of a stage, with one layer and a request of {tokens}: {least}")
    if each := document["state_bytes_per_sequence"]:
        states = ", ".join(formats.gib(stage["state_bytes"]) for stage in document["per_stage"])
        yield Text(
            f"KV includes the states of {document['max_num_seqs']} sequences: {states} GiB. One has "
            f"{each / 2**20:.3g} MiB in all stages"
        )
    if (shards := document["tensor_parallel_size"]) > 1:
        yield Text(f"{shards} ranks hold each stage together; the table shows the memory of one rank")


def _kinds_of_layers(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with the kinds of layers of the stages, if kinds differ. Equal neighbours share a line."""
    for kinds, stages in groupby(document["per_stage"], key=lambda stage: stage["layer_kinds"]):
        numbers = [stage["stage"] for stage in stages]
        if kinds:
            title = f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]} to {numbers[-1]}"
            yield f"{title}: {kinds}{' each' if len(numbers) > 1 else ''}"


def _stages(document: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    headings = ("stage", "layers", "time\nms", "weights\nGiB", "working\nGiB", "KV\nGiB", "KV\npages", "KV\ntokens")
    for heading in (*headings, "total\nGiB", "free\nGiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in document["per_stage"]:
        first, end = stage["layers"]
        short, free = stage["short_bytes"], formats.gib(stage["free_bytes"])
        pages = stage["pages"]
        table.add_row(
            str(stage["stage"]),
            f"{first}-{end - 1}",
            f"{1e3 * stage['microbatch_s']:.1f}",
            formats.gib(stage["weights_bytes"]),
            formats.gib(stage["working_bytes"]),
            formats.gib(stage["kv_bytes"]),
            "-" if pages is None else f"{pages:,}",
            "-" if pages is None else f"{pages * document['page_size']:,}",
            formats.gib(stage["total_bytes"]),
            Text(f"-{formats.gib(short)}", style="bold red") if short else free,
        )
    return table
