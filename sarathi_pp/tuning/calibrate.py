"""`sarathi-pp profile`: run synthetic requests through the real runtime, and fit a profile to its traces.

timetable (core/policy/calibration) -> requests -> the runtime -> traces -> measure.py -> profile.json
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.config import ResolvedRun, RunConfig
from sarathi_pp.core.cost.model import LayerCost
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.cost.sizing import MOST_TOKENS, saturation
from sarathi_pp.core.policy.calibration import make_timetable
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.distributed.refusal import refuse
from sarathi_pp.errors import RowError, SarathiError
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.inputs.row import Row
from sarathi_pp.inputs.source import MemorySource
from sarathi_pp.model.kv import page_bytes, page_dtype
from sarathi_pp.outputs.profile_file import write_profile
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.run.auto_options import estimated_cost
from sarathi_pp.run.display import Display
from sarathi_pp.run.ending import Ending, exit_code, handle_signals
from sarathi_pp.run.joining import joined, ready
from sarathi_pp.run.preflight import Preflight, open_model
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.stages.capacity import limits_of
from sarathi_pp.trace.clock import SystemClock
from sarathi_pp.trace.recorder import read_trace
from sarathi_pp.tuning.measure import Measurement, measure

if TYPE_CHECKING:
    from sarathi_pp.run.rank import Rank


def run_profile(
    config: RunConfig, env: RankEnvironment | None, output: Path, display: Display, *, overwrite: bool
) -> int:
    """Run one rank of a calibration, and return the exit code of this process. Rank 0 writes the profile.

    Args:
        env: rank of this process; None if it is the only one.
        output: path of the profile.
        overwrite: the run directory may replace that of an earlier run. If the configuration names no run directory,
            it is deleted at the end.
    """
    env, config = env or RankEnvironment(), calibration_config(config)
    try:
        config, model_dir, profile, facts = open_model(config)
    except SarathiError as error:
        return refuse(error, env, config.join_timeout_s, display)
    # The run directory is in the launcher's own directory, if there is one. The launcher removes it even if a rank
    # fails.
    private = Path(env.store).parent if env.store else None
    with TemporaryDirectory(prefix="sarathi-pp-", dir=private) as scratch, ExitStack() as held:
        run_dir = RunDirectory(config.run_dir or Path(scratch) / "run")
        if config.run_dir is not None and env.rank == 0:
            run_dir = held.enter_context(RunDirectory.claim(config.run_dir, overwrite=overwrite))
        config = replace(config, run_dir=run_dir.path)
        checked = Preflight(config, model_dir, profile, facts, GenerationDefaults(), run_dir, reads_text=False)
        ending = Ending(env, config, display, run_dir)
        found: dict[str, Any] | None = None
        with exit_code(ending):
            with handle_signals(ending), joined(env, config, display.activity) as plane:
                with ready(checked, plane, ending) as rank:
                    if env.rank == 0:
                        _answer(rank, display)
                    else:
                        rank.serve()
                    with display.activity.phase("collecting traces"):
                        finished = rank.finish()
                if finished is not None:
                    with display.activity.phase("fitting the cost model"):
                        found = finished.keep([_write_profile(rank, facts, finished.traces[0], output)])
            if found is not None:
                display.show(found)
    return ending.code


def calibration_config(config: RunConfig) -> RunConfig:
    """Return the configuration of the calibration run that measures the stages of a run with this configuration.

    Its microbatches must compute all tokens of the timetable, so no page may be shared. Each result must be back when
    the timetable counts on it, so no microbatch is issued ahead.
    """
    policy = f"calibration:seed={config.seed}"
    limited = replace(config, chunk_size=MOST_TOKENS, inflight=config.stages)
    return replace(limited, policy=policy, head="last", prefix_cache="off")


def _answer(rank: Rank, display: Display) -> None:
    """Run the requests of the timetable on rank 0. Their prompts are token ids."""
    run, facts = rank.run, rank.checked.facts
    rank.checked.run_dir.begin(rank.describe())
    with display.activity.phase("choosing microbatches"):
        rows = _rows(run, facts)
    num_microbatches = len(make_timetable(limits_of(run, facts), run.seed).steps)
    with (
        display.progress(run.num_stages, num_microbatches) as listener,
        rank.driving(listener) as driver,
    ):
        driver.run(MemorySource(rows), _Discard())


def _rows(run: ResolvedRun, facts: ModelFacts) -> list[Row]:
    timetable = make_timetable(limits_of(run, facts), run.seed)
    draw, now_s = random.Random(run.seed), SystemClock().now()
    rows = []
    for index, (prompt, output) in enumerate(zip(timetable.prompts, timetable.outputs, strict=True)):
        token_ids = tuple(draw.choices(range(facts.vocab_size), k=prompt))
        sampling = SamplingParams(max_new_tokens=output, ignore_eos=True, seed=index)
        rows.append(Row(index + 1, index, "own", Request(index, token_ids, sampling, now_s), arrival_s=now_s))
    return rows


def _write_profile(rank: Rank, facts: ModelFacts, traces: Sequence[Path], output: Path) -> dict[str, Any]:
    """Compute the profile from the traces, and write it. Return it as JSON, with further figures for the user.

    Raises:
        ConfigError: see `measure`.
        OutputError: the profile cannot be written.
    """
    run = rank.run
    dtype: torch.dtype = getattr(torch, run.dtype)
    warm_up = make_timetable(limits_of(run, facts), run.seed).warm_up
    measurement = measure([list(read_trace(trace)) for trace in traces], warm_up, facts.hidden_size * dtype.itemsize)
    profile = _profile(run, facts, measurement, dtype, _layer_costs(rank.checked, run))
    write_profile(output, profile)
    return {
        **profile.to_json(),
        "output": str(output),
        "saturation_tokens": saturation(profile.cost),
        "stage_errors": list(measurement.fit.stage_errors),
        **{name: getattr(measurement, name) for name in ("microbatches", "held_out", "disturbed", "throughput")},
    }


def _layer_costs(checked: Preflight, run: ResolvedRun) -> tuple[LayerCost, ...]:
    """Return how the layers of a stage divide its time, by the estimate. A calibration measures only whole stages."""
    if checked.model_dir is None:
        assert checked.profile is not None, "stages without a model have a profile"
        return checked.profile.cost.layer_costs
    return estimated_cost(
        checked.model_dir,
        checked.facts,
        run.layers,
        dtypes=checked.dtypes,
        device=run.device,
        page_size=run.page_size,
        kv_cache_dtype=run.kv_cache_dtype,
        shards=run.tensor_parallel_size,
    ).layer_costs


def _profile(
    run: ResolvedRun,
    facts: ModelFacts,
    measurement: Measurement,
    dtype: torch.dtype,
    layer_costs: tuple[LayerCost, ...],
) -> Profile:
    held = facts.sharded(run.tensor_parallel_size)

    def sized(layers: tuple[int, int]) -> int:
        return page_bytes(held.caches[slice(*layers)], run.page_size, page_dtype(run.kv_cache_dtype, dtype))

    model = measurement.fit.model
    stages = tuple(replace(stage, page_bytes=sized(stage.layers)) for stage in model.stages)
    return Profile(
        model=run.model,
        device=run.device,
        dtype=run.dtype,
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        cost=replace(model, stages=stages, layer_costs=layer_costs),
        link_latency_s=measurement.link.latency_s,
        link_bytes_per_s=measurement.link.bytes_per_s,
        links=measurement.links,
        jitter_cv=measurement.jitter_cv,
        drift=measurement.drift,
        pages=run.num_pages,
        max_num_seqs=run.max_num_seqs,
        error=measurement.fit.error,
        page_size=run.page_size,
        kv_cache_dtype="fp8" if run.kv_cache_dtype == "fp8" else "auto",
        tensor_parallel_size=run.tensor_parallel_size,
        host_s=measurement.host_s,
    )


class _Discard:
    """A sink that discards the answers.

    It raises an error for a failed request: then the model's logits are not finite, and its times say nothing.
    """

    def finish(self, row: Row, completion: Completion, metrics: Mapping[str, object]) -> None:
        pass

    def fail(self, row: Row, error: RowError) -> None:
        raise SarathiError(f"calibration request {row.id}: {error.message}")

    def close(self) -> None:
        pass
