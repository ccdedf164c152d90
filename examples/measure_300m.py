"""Policies on a 300M-parameter model with random weights, run and simulated: bubbles, throughput, 2 stages against 1.

    python examples/measure_300m.py --work-dir /tmp/m300 --pd 8 --pd 20 --pd 2 --output examples/figures/real-300m.json

Makes the checkpoint (16 layers, hidden 1024, bfloat16, seeded; 600 MB in the work directory) and for each P:D the
workload `uniform:n=32,min=256,max=1024,pd=P:D` (32 prompts of 256 to 1024 random tokens, end of sequence ignored, all
there at time 0). A round measures a profile of 2 stages and runs `sarathi-pp generate` for every case in turn, one
compute thread a stage. Machines drift, so speed is compared within a round only, and a single stage runs right before
or after the two of the same policy, in turn from round to round. Two jobs of a single stage at once show what the cores
can do together. Each run of 2 stages is also simulated, from its round's profile and from costs fitted to its own
spans: the first predicts, the second shows what of the error is the machine's drift. `balanced` gets no chunk size, the
others 256. The cores are kept awake; on a shared host each run waits until the host is quiet, and is run again, at most
twice, where it took more than 6 % of the cores meanwhile (`steal.py`). Prints each run and writes all figures as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
from awake import awake
from record import Record
from steal import QUIET, stolen, wait_until_quiet

from sarathi_pp.bench.profile import fit_cost
from sarathi_pp.core.policy import auto_chunk_size
from sarathi_pp.core.profile import Profile
from sarathi_pp.runtime.profile_file import read_profile
from sarathi_pp.sim.experiment import Experiment, report_of
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.trace.recorder import read_trace
from sarathi_pp.trace.timeline import Timeline

POLICIES = ("balanced", "sarathi", "orca")
ON_ONE_STAGE = ("balanced", "sarathi")
# Also run twice at once on one stage each: two stages cannot be faster than cores that share memory let two jobs be.
TWICE = "sarathi"
SEQS = 32
SEEDS = 9
TRIES = 3
PATIENCE_S = 120.0
FIGURES = ("wall_s", "total_tokens_per_s", "bubble_ratio", "bubble_ratio_steady", "overlap", "microbatch_tokens_cv")
PREDICTIONS = ("predicted", "predicted from its own costs")
PREDICTED = ("wall_s", "bubble_ratio", "bubble_ratio_steady")

Report = dict[str, Any]


def make_checkpoint(directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=3712,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters", file=sys.stderr)
    model.save_pretrained(directory)


def workload(ratio: int) -> str:
    return f"uniform:n=32,min=256,max=1024,pd={ratio},seed=0"


def write_prompts(path: Path, spec: str) -> None:
    with path.open("w") as file:
        for request in parse_workload(spec).requests():
            row = {
                "id": request.index,
                "prompt_token_ids": list(request.prompt_token_ids),
                "max_new_tokens": request.sampling.max_new_tokens,
                "ignore_eos": True,
            }
            file.write(json.dumps(row) + "\n")


class Work(NamedTuple):
    """The directory of the model and its prompts, and what the weights are held in."""

    dir: Path
    dtype: str


def start(work: Work, name: str, stages: int, *options: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-P", "-m", "sarathi_pp", name, "--model", str(work.dir / "model"), "--quiet", "--json"]
    words += ["--dtype", work.dtype, "--stages", str(stages), "--max-num-seqs", str(SEQS), "--overwrite", *options]
    return subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> Report:
    """The JSON that a command prints at its end."""
    printed, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    report: Report = json.loads(printed.splitlines()[-1])
    return report


class Run(NamedTuple):
    """stolen: share of the cores' time that the host took meanwhile. reports, run_dirs: of each copy."""

    stolen: float
    reports: list[Report]
    run_dirs: list[Path]


def run(work: Work, policy: str, stages: int, ratio: int, copies: int = 1) -> Run:
    """As many copies of a run, started at once when the host is quiet.

    Run again where it was not for long; the least disturbed one counts.
    """
    tries: list[Run] = []
    for attempt in range(TRIES):
        wait_until_quiet(PATIENCE_S)
        outputs = [work.dir / f"answers-{attempt}-{copy}.jsonl" for copy in range(copies)]
        with stolen() as lost:
            reports = run_once(work, policy, stages, ratio, outputs)
        tries.append(Run(lost.share, reports, [output.with_name(f"{output.name}.run") for output in outputs]))
        if lost.share <= QUIET:
            break
    return min(tries, key=lambda one: one.stolen)


def run_once(work: Work, policy: str, stages: int, ratio: int, outputs: Iterable[Path]) -> list[Report]:
    given = ["--input", str(work.dir / f"prompts-{ratio}.jsonl"), "--policy", policy]
    given += ["--chunk-size", str(auto_chunk_size(policy))]
    if stages > 1:
        given += ["--profile", str(work.dir / "profile.json"), "--layer-split", "even"]
    started = [start(work, "generate", stages, *given, "--output", str(output)) for output in outputs]
    reports = [finish(process) for process in started]
    assert all(report["failed"] == 0 and report["requests"] == 32 for report in reports), reports
    return reports


def predict(profile: Profile, policy: str, ratio: int) -> Report:
    """Medians over several seeds of the noise that the profile has seen."""
    experiment = Experiment(
        profile=profile,
        workload=parse_workload(workload(ratio)),
        policy=policy,
        chunk_size=auto_chunk_size(policy),
        max_num_seqs=SEQS,
    )
    reports = [report_of(replace(experiment, seed=seed)) for seed in range(SEEDS)]
    return {name: statistics.median(report[name] for report in reports) for name in PREDICTED}


def refitted(profile: Profile, run_dir: Path) -> Profile:
    """The profile with what microbatches cost in that run itself: the machine as it was then."""
    traces = sorted((run_dir / "attempt-0000").glob("trace-*.jsonl"))
    fit = fit_cost(Timeline.read(read_trace(trace) for trace in traces))
    assert fit is not None, run_dir
    return replace(profile, cost=fit.model)


def case_name(ratio: int, policy: str, stages: int) -> str:
    return f"P:D {ratio}, {policy}, {stages} stage{'s' * (stages > 1)}"


def order(ratios: tuple[int, ...], singles: tuple[int, ...], index: int) -> Iterator[tuple[int, str, int]]:
    """P:D, policy and stages of the runs of round `index`, first to last."""
    for ratio in ratios:
        for policy in POLICIES:
            both = ratio in singles and policy in ON_ONE_STAGE
            for stages in ((1, 2) if index % 2 else (2, 1)) if both else (2,):
                yield ratio, policy, stages


def one_round(work: Work, cases: Iterable[tuple[int, str, int]]) -> Report:
    wait_until_quiet(PATIENCE_S)
    finish(start(work, "profile", 2, "--output", str(work.dir / "profile.json")))
    profile = read_profile(work.dir / "profile.json")
    found: Report = {"profile error": profile.error}
    for ratio, policy, stages in cases:
        made = run(work, policy, stages, ratio)
        [report] = made.reports
        kept = (*FIGURES, "microbatches", "per_stage", "chunk_size", "inflight")
        case = found[case_name(ratio, policy, stages)] = {name: report[name] for name in kept}
        case["stolen"] = made.stolen
        shown = "  ".join(f"{name} {report[name]:.3f}" for name in FIGURES)
        print(f"P:D {ratio:2} {policy:8} {stages}  {shown}  stolen {made.stolen:.3f}", flush=True)
        if stages > 1:
            case["predicted"] = predict(profile, policy, ratio)
            own = refitted(profile, made.run_dirs[0])
            case["predicted from its own costs"] = predict(own, policy, ratio)
            for kind in PREDICTIONS:
                print(f"    {kind}  " + " ".join(f"{value:.3f}" for value in case[kind].values()), flush=True)
        elif policy == TWICE:
            both = run(work, policy, 1, ratio, copies=2)
            case["wall_s of two at once"] = statistics.fmean(one["wall_s"] for one in both.reports)
            print(f"    two at once  wall_s {case['wall_s of two at once']:.3f}", flush=True)
    return found


def spread(values: list[float]) -> Report:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def share(case: Report) -> float:
    """Of one stage's time, what two would take without any bubble on cores that do not slow each other down."""
    computed_s = [stage["compute_s"] for stage in case["per_stage"]]
    return float(max(computed_s) / sum(computed_s))


def summary(rounds: list[Report], singles: tuple[int, ...]) -> Report:
    names = [name for name in rounds[0] if name != "profile error"]
    cases = {case: {name: spread([one[case][name] for one in rounds]) for name in FIGURES} for case in names}
    errors = {
        case: {
            kind: {
                "wall, predicted / measured": spread([r[case][kind]["wall_s"] / r[case]["wall_s"] for r in rounds]),
                "bubble, predicted - measured": spread(
                    [r[case][kind]["bubble_ratio"] - r[case]["bubble_ratio"] for r in rounds]
                ),
            }
            for kind in PREDICTIONS
        }
        for case in names
        if PREDICTIONS[0] in rounds[0][case]
    }
    speedups: Report = {}
    for ratio in singles:
        walls = speedups[f"P:D {ratio}"] = {}
        for policy in ON_ONE_STAGE:
            one, two = case_name(ratio, policy, 1), case_name(ratio, policy, 2)
            walls[policy] = spread([r[two]["wall_s"] / r[one]["wall_s"] for r in rounds])
            walls[f"{policy}, slowest stage's share of the compute"] = spread([share(r[two]) for r in rounds])
        one = case_name(ratio, TWICE, 1)
        walls["two jobs of one stage at once / one after the other"] = spread(
            [r[one]["wall_s of two at once"] / (2 * r[one]["wall_s"]) for r in rounds]
        )
    return {"cases": cases, "prediction": errors, "wall of 2 stages / wall of 1": speedups}


@click.command()
@click.option("--work-dir", type=click.Path(path_type=Path), required=True)
@click.option(
    "--pd",
    "ratios",
    type=click.IntRange(min=1),
    multiple=True,
    default=(8,),
    show_default=True,
    help="Prompt tokens to output tokens; may be given several times.",
)
@click.option(
    "--single-stage",
    "singles",
    type=int,
    metavar="PD",
    multiple=True,
    help="A --pd to run on one stage too; may be given several times.  [default: the first --pd]",
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Where the JSON goes; written after every round.")
def main(
    work_dir: Path,
    ratios: tuple[int, ...],
    singles: tuple[int, ...],
    dtype: str,
    rounds: int,
    output: Path | None,
) -> None:
    singles = singles or ratios[:1]
    for ratio in singles:
        if ratio not in ratios:
            raise click.UsageError(f"--single-stage {ratio} is not among --pd {' --pd '.join(map(str, ratios))}")
    record = Record.begin()
    work_dir.mkdir(parents=True, exist_ok=True)
    if not (work_dir / "model" / "config.json").exists():
        make_checkpoint(work_dir / "model")
    for ratio in ratios:
        write_prompts(work_dir / f"prompts-{ratio}.jsonl", workload(ratio))
    work = Work(work_dir, dtype)
    results: list[Report] = []
    with awake():
        for index in range(rounds):
            results.append(one_round(work, order(ratios, singles, index)))
            made = {"rounds made": f"{len(results)} of {rounds}"}
            document = record.write(output, {**made, **summary(results, singles), "rounds": results})
    print(json.dumps({name: value for name, value in document.items() if name != "rounds"}, indent=1))


if __name__ == "__main__":
    main()
