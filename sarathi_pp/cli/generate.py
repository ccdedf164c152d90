"""`sarathi-pp generate`: options to a RunConfig, then a launcher, or one rank of a run."""

from __future__ import annotations

import shlex
import shutil
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from sarathi_pp.cli.options import naming_options
from sarathi_pp.cli.values import Bytes, Count, JsonObject, LayerSplit, Real
from sarathi_pp.config import ATTENTIONS, DEVICES, DTYPES, HEADS, TRANSPORTS, RunConfig, stages_among
from sarathi_pp.core.policy import POLICIES, with_tbt_slo
from sarathi_pp.inputs.input_format import INPUT_FORMATS

if TYPE_CHECKING:
    from sarathi_pp.cli.show import BatchDisplay
    from sarathi_pp.distributed.environment import Place
    from sarathi_pp.outputs.journal import Start
    from sarathi_pp.run.preflight import BatchJob

_STANDARD_INPUT = dict.fromkeys(("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"), "-")
_STANDARD_OUTPUT = dict.fromkeys(("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"), "-")
_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "ignore_eos")


@click.command()
@click.option("--model", metavar="DIR|HUB_ID", help="Model directory, or an id on the Hugging Face Hub.")
@click.option(
    "--emulate",
    type=click.Path(path_type=Path),
    metavar="PROFILE",
    help="No model: stages sleep the time that this profile.json says. Prompts are token ids.",
)
@click.option("--input", "-i", "input_path", required=True, metavar="FILE|-", help="Prompts: JSON Lines or plain text.")
@click.option(
    "--input-format",
    type=click.Choice(INPUT_FORMATS),
    default="auto",
    show_default=True,
    help="text: a prompt per line; auto: by name and first lines.",
)
@click.option(
    "--output",
    "-o",
    "output_path",
    required=True,
    metavar="FILE|-",
    help="Answers: JSON Lines, in the order they finish.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Traces, report.json, exit_code.  [default: OUTPUT.run; none with -]",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output and run directory.")
@click.option("--resume", is_flag=True, help="Go on with an existing output: rows that have a line are skipped.")
@click.option("--retry-errors", is_flag=True, help="With --resume: run rows again that ended with an error.")
@click.option("--force", is_flag=True, help="With --resume: go on though model, parameters or input have changed.")
@click.option(
    "--strict",
    is_flag=True,
    help="Refuse an input file of which a line cannot run, before the model loads; and any input that is no file.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Start again, and resume, so often after a stage was lost; under torchrun its own option.",
)
@click.option(
    "--stages",
    "--pipeline-parallel-size",
    "--pp-size",
    type=Count(),
    help="Pipeline stages; under torchrun its processes, shared out over replicas.  [default: 1]",
)
@click.option(
    "--replicas",
    "--data-parallel-size",
    type=Count(),
    default=1,
    show_default=True,
    help="Pipelines of so many stages, which share the prompts; one that is lost leaves its own to the others.",
)
@click.option(
    "--tensor-parallel-size",
    "--tp-size",
    type=Count(),
    default=1,
    show_default=True,
    help="Ranks that hold each stage together; it divides the model's KV heads.",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="profile.json of this model and machine: decides what is auto.",
)
@click.option(
    "--layer-split",
    type=LayerSplit(),
    default="auto",
    show_default=True,
    help="Layers a stage; auto: of equal time by the profile, else even.",
)
@click.option(
    "--policy",
    default="balanced",
    show_default=True,
    metavar="NAME[:key=value,...]",
    help=f"One of {', '.join(sorted(POLICIES))}, or a class as package.module:Class.",
)
@click.option(
    "--chunk-size",
    "--max-num-batched-tokens",
    type=Count(auto=True),
    default="auto",
    help="Most tokens in a microbatch; auto: where the profile's throughput saturates, else the policy's own.",
)
@click.option("--max-num-seqs", type=Count(), help="Running sequences over a whole pipeline.  [default: 64 x stages]")
@click.option(
    "--tbt-slo",
    type=Real(0, min_open=True),
    help="Most seconds between two tokens of a request, as far as the stages allow; balanced keeps it.",
)
@click.option(
    "--inflight",
    type=Count(auto=True),
    default="auto",
    help="Most microbatches at once; auto: stages, and one more for balanced or where stage times jitter.",
)
@click.option(
    "--max-new-tokens", "--max-tokens", type=click.IntRange(min=0), help="Most tokens to generate.  [default: 256]"
)
@click.option("--temperature", type=float, help="0 is greedy.")
@click.option("--top-k", type=int, help="Sample from the k likeliest tokens; 0 keeps all.")
@click.option("--top-p", type=float, help="Sample from the likeliest tokens that hold this share.")
@click.option("--min-p", type=float, help="Drop tokens below this share of the likeliest one.")
@click.option("--stop", multiple=True, help="String that ends an output; may be given several times.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the end-of-sequence token.")
@click.option(
    "--override-generation-config",
    type=JsonObject(),
    help="JSON object that wins over the model's generation_config.json.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Of all sampling; each request draws from it and its id.",
)
@click.option(
    "--request-rate", type=float, default=float("inf"), show_default=True, help="Arrivals a second (Poisson)."
)
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True)
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True)
@click.option("--attention", type=click.Choice(ATTENTIONS), default="auto", show_default=True)
@click.option(
    "--max-model-len", type=Count(), help="Most tokens of prompt and output together.  [default: the model's]"
)
@click.option("--kv-cache-memory", type=Bytes(), help="KV cache of each stage, like 4GiB.")
@click.option(
    "--gpu-memory-utilization", type=float, default=0.9, show_default=True, help="Share of a GPU's memory to use."
)
@click.option(
    "--page-size", "--block-size", type=Count(auto=True), default="auto", help="Tokens a KV page.  [default: 16]"
)
@click.option(
    "--head",
    type=click.Choice(HEADS),
    default="auto",
    show_default=True,
    help="last: the last stage always computes it; auto: on CPU the first one too, for some microbatches, where that "
    "makes their times equal.",
)
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="auto",
    show_default=True,
    help="auto: memory that ranks of a host have in common where they compute on CPU, NCCL between GPUs, else gloo; "
    "gloo: that alone.",
)
@click.option(
    "--peer-timeout",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds of silence after which a stage counts as lost.",
)
@click.option(
    "--join-timeout",
    type=float,
    default=300.0,
    show_default=True,
    help="Seconds in which all ranks must have come, and each must have loaded its stage.",
)
@click.option(
    "--verify",
    type=click.Choice(["sha256"]),
    help="Compare weight files with their published sums, or those in the model's SHA256SUMS.",
)
@click.option("--debug-nan", is_flag=True, help="Name the first stage whose output held NaN or infinity; slower.")
@click.option("--enforce-eager", is_flag=True, help="Launch each microbatch anew on a GPU, without CUDA graphs.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve Prometheus metrics on loopback while the run is on; 0 picks a port.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as the last line of standard output.")
@click.option("--quiet", "-q", is_flag=True, help="No progress and no table.")
def generate(**options: Any) -> int:
    """Answer a file of prompts with a pipeline of stages.

    One line of input gives one line of output; a line that cannot run gives an error line and the run goes on
    (exit code 3 at the end). Sampling options are defaults that each line may override.
    """
    from sarathi_pp.distributed.environment import let_threads_sleep
    from sarathi_pp.process.signals import stoppable

    let_threads_sleep()
    with stoppable("the run"):
        return _generate(options)


def _generate(options: dict[str, Any]) -> int:
    from sarathi_pp.cli.show import BatchDisplay, RunConsole
    from sarathi_pp.distributed.environment import find_place
    from sarathi_pp.inputs.source import is_stream
    from sarathi_pp.run.batch import run_batch
    from sarathi_pp.run.preflight import BatchJob, is_unkept

    place = find_place()
    job = BatchJob(
        config=_config(options, place.world_size if place else None),
        input_path=_STANDARD_INPUT.get(options["input_path"], options["input_path"]),
        output_path=_STANDARD_OUTPUT.get(options["output_path"], options["output_path"]),
        start=_start(options),
        retry_errors=options["retry_errors"],
        force=options["force"],
        strict=options["strict"],
        verify=options["verify"] is not None,
        metrics_port=options["metrics_port"],
        how_to_resume=_how_to_resume(options, under_torchrun=place is not None and place.under_torchrun),
        input_format=options["input_format"],
    )
    console = RunConsole(quiet=place is not None and place.rank != 0)
    display = BatchDisplay(
        console,
        quiet=options["quiet"],
        as_json=options["as_json"],
        metrics_port=options["metrics_port"],
        kept=job.config.run_dir is not None or not is_unkept(job.output_path),
    )
    restarts = options["max_restarts"]
    if restarts and any(map(is_stream, (job.input_path, job.output_path))):
        raise click.UsageError("--max-restarts: a stream cannot be gone on with; name files for --input and --output")
    if place is not None and place.store is None and restarts:
        raise click.UsageError("--max-restarts: torchrun starts its processes again itself; give it to torchrun")
    with ExitStack() as held:
        job = _with_scratch(job, place, held)
        if place is None and (job.config.num_ranks > 1 or restarts):
            return _launch(job, display, restarts)
        from sarathi_pp.report.run_reader import analyse

        return run_batch(job, place, display, analyse)


def _with_scratch(job: BatchJob, place: Place | None, held: ExitStack) -> BatchJob:
    """Return the job with a run directory that is removed in the end, if the user named none and keeps no output."""
    from sarathi_pp.run.preflight import is_unkept

    if job.config.run_dir is not None or not is_unkept(job.output_path):
        return job
    if place is not None and place.store is not None:  # our launcher removes its own folder, whatever ends this rank
        return replace(job, config=replace(job.config, run_dir=Path(place.store).parent / "run"))
    scratch = Path(held.enter_context(TemporaryDirectory(prefix="sarathi-pp-")))
    return replace(job, config=replace(job.config, run_dir=scratch / "run"), scratch=scratch)


def _how_to_resume(options: dict[str, Any], *, under_torchrun: bool) -> str:
    from sarathi_pp.inputs.source import is_stream

    if any(map(is_stream, (options["input_path"], options["output_path"]))):
        return "a stream cannot be resumed: send the lines without an answer again"
    if under_torchrun:
        return "to resume, give --resume to the same command"
    program = ["sarathi-pp"] if shutil.which("sarathi-pp") else [sys.executable, "-m", "sarathi_pp"]
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--resume", "--overwrite")]
    return f"to resume:\n{shlex.join([*program, *arguments, '--resume'])}"


def _start(options: dict[str, Any]) -> Start:
    if options["resume"] and options["overwrite"]:
        raise click.UsageError("--resume goes on with an output and --overwrite replaces it: give one of them")
    for name in ("retry_errors", "force"):
        if options[name] and not options["resume"]:
            raise click.UsageError(f"--{name.replace('_', '-')} says how to resume: give --resume too")
    return "resume" if options["resume"] else "replace" if options["overwrite"] else "new"


def _launch(job: BatchJob, display: BatchDisplay, max_restarts: int) -> int:
    from sarathi_pp.distributed.environment import mesh_of
    from sarathi_pp.distributed.launcher import descriptors_of, launch
    from sarathi_pp.run.batch import end_if_finished
    from sarathi_pp.run.preflight import check_lines, check_weights, identify, preflight

    checked = identify(job, preflight(job))
    if (code := end_if_finished(job, checked, display)) is not None:
        return code
    check_lines(job, checked, display.warn)
    check_weights(job)
    mesh, descriptors = mesh_of(job.config), descriptors_of(job.input_path, job.output_path)
    code = launch(mesh, sys.argv[1:], display.error, max_restarts=max_restarts, descriptors=descriptors)
    if code:
        checked.run_dir.write_end(code)
    return code


def _config(options: dict[str, Any], world_size: int | None) -> RunConfig:
    replicas, shards = options["replicas"], options["tensor_parallel_size"]
    stages = options["stages"] or 1
    if world_size is not None:
        stages = stages_among(world_size, options["stages"], replicas, shards)
    if (options["model"] is None) == (options["emulate"] is None):
        raise click.UsageError("give either --model or, to run without one, --emulate PROFILE")
    bound_s = options["tbt_slo"]
    named = {key: options[key] for key in _SAMPLING if options[key] not in (None, ())}
    with naming_options():
        return RunConfig(
            model=options["model"] or "",
            emulate=options["emulate"],
            profile=options["profile"],
            stages=stages,
            replicas=replicas,
            tensor_parallel_size=shards,
            policy=with_tbt_slo(options["policy"], bound_s) if bound_s else options["policy"],
            chunk_size=options["chunk_size"],
            max_num_seqs=options["max_num_seqs"],
            max_model_len=options["max_model_len"],
            page_size=options["page_size"],
            kv_cache_memory_bytes=options["kv_cache_memory"],
            gpu_memory_utilization=options["gpu_memory_utilization"],
            layer_split=options["layer_split"],
            inflight=options["inflight"],
            dtype=options["dtype"],
            device=options["device"],
            attention=options["attention"],
            request_rate=options["request_rate"],
            seed=options["seed"],
            peer_timeout_s=options["peer_timeout"],
            join_timeout_s=options["join_timeout"],
            debug_nan=options["debug_nan"],
            enforce_eager=options["enforce_eager"],
            head=options["head"],
            transport=options["transport"],
            run_dir=options["run_dir"],
            sampling_overrides=named,
            override_generation_config=options["override_generation_config"] or {},
        )
