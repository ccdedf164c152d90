"""Measure the cost of the coordinator in milliseconds per step, and the speed of the simulator.

    python examples/benchmarks/measure_coordinator.py --output docs/benchmarks/results/coordinator.json

A step is the work of the coordinator's rank for one microbatch: pick, pages, plan and the encoded frame. The time to
take in the result is a separate figure. Both are timed on one core for 8 stages with 16 to 4096 running sequences. The
same number of prompts waits, and every microbatch has prefill and decodes. Figures are medians after the pipeline is
full.

The prefix cache is timed with 256 running sequences and 50,000 pages: off and on, with prompts of about 1,200 tokens
that share 1,024 of them in 8 groups, and with prompts that share none.

The simulator runs SARATHI's GPT-3 pipeline. Its speed is in microbatch-stages per second: with the real coordinator,
and for the virtual clock alone on the schedule of that run. The last figure is the most memory that Python held,
without the timeline.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from record import Record

from sarathi_pp.config import PrefixCacheMode
from sarathi_pp.core.coordinator import Coordinator
from sarathi_pp.core.pages import PagePool
from sarathi_pp.core.plan import MicroBatch, SampledToken, StageTime, StepResult
from sarathi_pp.core.policy import PolicySpec, parse_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.request import Request
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.sim.experiment import Experiment, run, simulate
from sarathi_pp.sim.pipeline import VirtualPipeline, links_of
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import parse_workload
from sarathi_pp.wire.codec import MicroBatchFrame, encode

STAGES = 8
RUNNING = (16, 64, 256, 1024, 2048, 4096)
PROMPT, OUTPUT = 512, 256
# With the prefix cache: running sequences, pages, groups of prompts and the tokens that a group shares.
SHARING, PAGES, GROUPS, SHARED = 256, 50_000, 8, 1024
VOCABULARY = 32_000


def requests() -> Iterator[Request]:
    index = 0
    while True:
        sampling = SamplingParams(max_new_tokens=1 + (index * 97) % (2 * OUTPUT), ignore_eos=True, seed=index)
        yield Request(index, (1,) * PROMPT, sampling)
        index += 1


def sharing_requests(num_shared: int) -> Iterator[Request]:
    """Yield requests whose prompts begin with the `num_shared` tokens of their group."""
    draw = random.Random(0)
    groups = [draw.choices(range(VOCABULARY), k=num_shared) for _ in range(GROUPS)]
    for index in itertools.count():
        own = draw.choices(range(VOCABULARY), k=draw.randrange(100, 300) + SHARED - num_shared)
        sampling = SamplingParams(max_new_tokens=1 + (index * 97) % (2 * OUTPUT), ignore_eos=True, seed=index)
        yield Request(index, tuple(draw.choice(groups) + own), sampling)


def time_prefix_cache(policy: PolicySpec, steps: int) -> dict[str, dict[str, float]]:
    chunk_size = max(256, 4 * SHARING // STAGES)
    limits = Limits(STAGES, chunk_size, SHARING, 4096, 16, PAGES, policy.inflight(STAGES))
    modes: tuple[PrefixCacheMode, ...] = ("off", "all")
    return {
        f"{name}, {mode}": time_steps(policy, replace(limits, prefix_cache=mode), sharing_requests(num_shared), steps)
        for name, num_shared in (("shared", SHARED), ("nothing shared", 0))
        for mode in modes
    }


def time_running(policy: PolicySpec, running: int, steps: int) -> dict[str, float]:
    chunk_size = max(256, 4 * running // STAGES)
    limits = Limits(STAGES, chunk_size, running, 4096, 16, running * 64, policy.inflight(STAGES))
    return time_steps(policy, limits, requests(), steps)


def time_steps(policy: PolicySpec, limits: Limits, arriving: Iterator[Request], steps: int) -> dict[str, float]:
    """Time `steps` microbatches of a full pipeline. Return median and 99th percentile in milliseconds."""
    running = limits.max_num_seqs
    cost = preset("gpt3-a100-tp8pp8").cost if policy.kind.wants_cost else None
    coordinator = Coordinator(limits, policy.make(), cost=cost)
    inflight = deque[MicroBatch]()
    step_ms: list[float] = []
    result_ms: list[float] = []
    submit_ms: list[float] = []
    decodes: list[int] = []
    while len(step_ms) < steps:
        while coordinator.num_waiting < running:
            request = next(arriving)
            began = time.perf_counter()
            coordinator.submit(request)
            submit_ms.append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
        microbatch = coordinator.next_microbatch()
        if microbatch is not None:
            encode(MicroBatchFrame(microbatch), microbatch.index)
            if coordinator.num_running >= 0.9 * running:
                step_ms.append(1e3 * (time.perf_counter() - began))
                decodes.append(microbatch.num_decodes)
            inflight.append(microbatch)
        if len(inflight) == limits.inflight or microbatch is None:
            oldest = inflight.popleft()
            drawn = [chunk for chunk in oldest.chunks if chunk.sampling is not None]
            tokens = tuple(SampledToken(chunk.sequence, chunk.epoch, 7) for chunk in drawn)
            began = time.perf_counter()
            coordinator.complete(StepResult(oldest.index, tokens, (StageTime(oldest.index, 0.01),) * STAGES))
            result_ms.append(1e3 * (time.perf_counter() - began))
    return {
        "step_ms_p50": statistics.median(step_ms),
        "step_ms_p99": statistics.quantiles(step_ms, n=100)[98],
        "result_ms_p50": statistics.median(result_ms),
        "submit_ms_p50": statistics.median(submit_ms),
        "hit_rate": coordinator.prefixes.cached_tokens / max(1, coordinator.prefixes.prompt_tokens),
        "decodes_a_microbatch": statistics.fmean(decodes),
    }


def time_simulator(policy: PolicySpec, num_requests: int) -> dict[str, float]:
    spec = f"zipf:n={num_requests},min=1024,max=4096,theta=0.4,pd=10,seed=31"
    profile = preset("gpt3-a100-tp8pp8")
    experiment = Experiment(
        profile=profile, workload=parse_workload(spec), policy=policy, chunk_size=policy.kind.default_chunk_size
    )
    began = time.perf_counter()
    timeline = simulate(experiment)
    wall_s = time.perf_counter() - began
    schedule = [replace(MicroBatch.parse(event.text), issued_s=event.at_s) for event in timeline.issued]
    began = time.perf_counter()
    pipeline = VirtualPipeline(profile.cost, links_of(profile, len(profile.cost.stages)))
    for microbatch in schedule:
        pipeline.run(microbatch)
    clock_s = time.perf_counter() - began
    spans = len(schedule) * STAGES
    return {
        "requests": num_requests,
        "microbatch_stages": spans,
        "wall_s": wall_s,
        "spans_per_s": spans / wall_s,
        "clock_alone_spans_per_s": spans / clock_s,
    }


def peak_bytes(num_requests: int) -> int:
    """Return the most bytes that Python held during a simulation that does not keep its events."""
    spec = f"poisson:rate=4,zipf:n={num_requests},min=1024,max=4096,theta=0.4,pd=20,seed=31"
    experiment = Experiment(
        profile=preset("gpt3-a100-tp8pp8"),
        workload=parse_workload(spec),
        policy=parse_policy("sarathi"),
        chunk_size=256,
    )
    gc.collect()
    tracemalloc.start()
    run(experiment, lambda stage, event: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def index_bytes() -> int:
    """Return the bytes of a pool whose pages are all in the index, and idle."""
    gc.collect()
    tracemalloc.start()
    pool = PagePool(PAGES, 16)
    pages = pool.take(PAGES)
    for page in pages:
        pool.enter(page, page.to_bytes(16, "little"))
    pool.give_back(pages)
    found = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return found


@click.command()
@click.option("--policy", "policies", multiple=True, default=("balanced", "sarathi", "vllm"), show_default=True)
@click.option("--steps", type=click.IntRange(min=100), default=600, show_default=True)
@click.option("--requests", "num_requests", type=click.IntRange(min=10), default=10_000, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(policies: tuple[str, ...], steps: int, num_requests: int, output: Path | None) -> None:
    record = Record.begin()
    step_rows: dict[str, Any] = {}
    for policy in policies:
        step_rows[policy] = {}
        for running in RUNNING:
            row = step_rows[policy][str(running)] = time_running(parse_policy(policy), running, steps)
            print(f"{policy:10} {running:5} running  " + "  ".join(f"{k} {v:.3f}" for k, v in row.items()), flush=True)
    sharing = {policy: time_prefix_cache(parse_policy(policy), steps) for policy in policies}
    for policy, rows in sharing.items():
        for name, row in rows.items():
            print(f"{policy:10} {name:20}  " + "  ".join(f"{k} {v:.3f}" for k, v in row.items()), flush=True)
    simulator = {policy: time_simulator(parse_policy(policy), num_requests) for policy in policies}
    for policy, row in simulator.items():
        print(f"{policy:10} simulated  " + "  ".join(f"{k} {v:.0f}" for k, v in row.items()), flush=True)
    memory = {str(count): peak_bytes(count) for count in (100, 200, 400)}
    print("bytes at peak by requests, the same number in flight: ", memory)
    figures = {
        "steps": step_rows,
        "prefix_cache": sharing,
        "index_bytes_per_page": index_bytes() / PAGES,
        "simulator": simulator,
        "peak_bytes": memory,
    }
    print(json.dumps(record.write(output, figures)))


if __name__ == "__main__":
    main()
