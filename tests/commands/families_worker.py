"""One rank of several pipelines, one after the other, over one set of processes: a Rank for each model.

    torchrun --nproc-per-node 2 families_worker.py PLAN ANSWERS

PLAN: a JSON list of {"model", "run_dir", "prompts", "new_tokens"}. ANSWERS: rank 0 writes each model's output
tokens there, in the plan's order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sarathi_pp.analysis.replicas import Replica, summarise_replicas
from sarathi_pp.analysis.summary import read_timeline
from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.config import RunConfig
from sarathi_pp.core.request import Request
from sarathi_pp.distributed.control_plane import ControlPlane
from sarathi_pp.distributed.environment import find_environment
from sarathi_pp.engine.progress import IgnoreReports
from sarathi_pp.errors import SarathiError
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.inputs.row import Row
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.process.watchdog import Watchdog
from sarathi_pp.run.preflight import Preflight
from sarathi_pp.run.rank import set_up
from sarathi_pp.run.setup import Member, agree_on_start
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.trace.clock import SystemClock
from tests.engine.pipeline import ListSink, ListSource


class Leaver:
    def leave(self, error: SarathiError) -> None:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)


def answer(case: dict[str, Any], plane: ControlPlane) -> list[list[int]]:
    """Run this rank's part of one model; return the output tokens on rank 0 and an empty list on other ranks."""
    clock, model_dir = SystemClock(), Path(case["model"])
    config = RunConfig(
        model=case["model"],
        stages=plane.env.world_size,
        chunk_size=16,
        page_size=4,
        kv_cache_memory_bytes=16 << 20,
        dtype="float32",
        device="cpu",
    )
    run_dir = RunDirectory(Path(case["run_dir"]))
    checked = Preflight(config, model_dir, None, check_model(model_dir), GenerationDefaults(), run_dir)
    member = Member(checked, plane, Watchdog(Leaver()), clock)
    rank = set_up(member, agree_on_start(member))
    sink = ListSink()
    if plane.env.rank != 0:
        rank.serve()
    else:
        params = SamplingParams(max_new_tokens=case["new_tokens"], seed=0)
        rows = [
            Row(index + 1, index, "own", Request(index, tuple(prompt), params, clock.now()))
            for index, prompt in enumerate(case["prompts"])
        ]
        engine = rank.driver(IgnoreReports())
        engine.run(ListSource(rows), sink)
        engine.close()
    finished = rank.finish()
    if finished is not None:
        replicas = [Replica.fold(read_timeline(traces)) for traces in finished.traces]
        finished.keep([summarise_replicas(replicas) | dict(finished.facts)])
    return [list(sink.completions[index].token_ids) for index in sorted(sink.completions)]


def main(plan: Path, answers: Path) -> None:
    env = find_environment()
    assert env is not None, "start this under torchrun"
    plane = ControlPlane.join(env, 60, 60)
    outputs = [answer(case, plane) for case in json.loads(plan.read_text())]
    if env.rank == 0:
        answers.write_text(json.dumps(outputs))
    plane.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
