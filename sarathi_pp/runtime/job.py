"""One rank of a run, from joining the others to leaving them.

join -> check that all ranks have the same software, model and options -> load this stage's slice
     -> count pages, agree on the minimum -> open the edges -> serve (rank 0: the engine) -> gather traces
"""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

import sarathi_pp
from sarathi_pp.config import ResolvedRun, RunConfig
from sarathi_pp.core.cost import CostModel
from sarathi_pp.core.cut import recut
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import make_policy, wants_cost
from sarathi_pp.core.profile import Profile
from sarathi_pp.errors import ConfigError, OutputError, SarathiError, error_class
from sarathi_pp.model.support import ModelFacts
from sarathi_pp.runtime.align import Offset, align
from sarathi_pp.runtime.capacity import kv_cache_bytes, limits_of, resolve
from sarathi_pp.runtime.cuda_timer import CudaTimer
from sarathi_pp.runtime.emulated import EmulatedStages, over_link
from sarathi_pp.runtime.engine import Engine, StopCheckers
from sarathi_pp.runtime.place import Place
from sarathi_pp.runtime.profile_file import read_profile
from sarathi_pp.runtime.rundir import RunDirectory
from sarathi_pp.runtime.snapshot import Snapshot
from sarathi_pp.runtime.stage import StageMaker
from sarathi_pp.runtime.topology import Topology
from sarathi_pp.runtime.transport import Standing, choose_transport, nccl_lanes, stand
from sarathi_pp.runtime.tuning import estimated_cost
from sarathi_pp.runtime.watchdog import Watchdog
from sarathi_pp.runtime.worker import StageRunner
from sarathi_pp.trace.clock import Clock
from sarathi_pp.trace.events import TraceEnd, TraceStart
from sarathi_pp.trace.recorder import Recorder
from sarathi_pp.trace.summary import Analyse, figures
from sarathi_pp.trace.timer import HostTimer, Timer
from sarathi_pp.wire import codec
from sarathi_pp.wire.channel import QueueChannel, Receiver, Sender
from sarathi_pp.wire.torch_channel import Payloads

T = TypeVar("T")

_log = logging.getLogger(__name__)

# First calls cost the same for larger microbatches.
_WARM_UP_TOKENS = 256
_WARM_UP_KEYS = 4096


class Job:
    """This rank's stage and its place in the pipeline. Use: `Job(...)`, then `engine` or `serve`, then `finish`.

    watchdog: told of lost peers. located: told where this rank writes, once rank 0 has said so. profile: its
    stages are emulated, and model_dir is not looked at.
    Raises whatever any rank found wrong during set-up, the same error on every rank.
    """

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        facts: ModelFacts,
        topology: Topology,
        run_dir: RunDirectory,
        clock: Clock,
        watchdog: Watchdog,
        located: Callable[[RunDirectory], None] = lambda run_dir: None,
        profile: Profile | None = None,
    ) -> None:
        self.place = place = topology.place
        self.facts = facts
        self._topology = topology
        self._clock = clock
        self._config = config
        self._profile = profile
        self._model_dir = model_dir
        self._watchdog = watchdog
        torch.set_num_threads(place.num_threads())
        self._agree(lambda: _passport(config, facts), must_match=True)
        standings = [Standing(**found) for found in self._agree(self._choose_device)]
        self._sharers = standings.count(standings[place.rank])
        self._transport = choose_transport(standings)
        _log.info("activations by %s: %s", self._transport.name, self._transport.reason)
        mine = {"path": str(run_dir.path), "attempt": run_dir.attempt, "replaces": run_dir.replaces}
        first = self._agree(lambda: mine)[0]
        self._run_dir = run_dir.joining(
            Path(first["path"]), first["attempt"], own=config.run_dir is not None, replaces=first["replaces"]
        )
        located(self._run_dir)
        layers = self._alike(lambda: partition(facts.num_layers, place.world_size, config.layer_split))
        dtype_name = facts.dtype if config.dtype == "auto" else config.dtype
        self.dtype: torch.dtype = getattr(torch, dtype_name)
        self._agree(self._choose_stages)
        maker = self._maker
        self._agree(lambda: self._load(layers[place.rank]))
        stages = self._agree(lambda: {"pages": maker.count_pages(layers[place.rank])})
        self._max_pages = min(stage["pages"] for stage in stages)
        self.run: ResolvedRun = self._alike(
            lambda: resolve(
                config,
                facts,
                layers,
                [stage["pages"] for stage in stages],
                page_size=maker.page_size,
                dtype=dtype_name,
                device=maker.device_name,
                attention=maker.attention,
            )
        )
        self.layers = layers[place.rank]
        self._agree(self._make_stage)
        longest = self.run.max_model_len
        self._stage.warm_up(min(self.run.chunk_size, longest, _WARM_UP_TOKENS), min(longest, _WARM_UP_KEYS))
        homes = self._agree(lambda: {"identity": self._run_dir.identity()})
        self._agree(lambda: self._open_trace(alone=homes[0] != homes[place.rank]))
        self._recorder.record(self._trace_start(align(self._topology, clock.now)))
        self._upstream, self._runner = self._connect()
        self._topology.exchange({})

    def engine(
        self,
        eos_token_ids: Collection[int],
        stop_checkers: StopCheckers,
        observe: Callable[[Snapshot], None],
        warn: Callable[[str], None] = lambda text: None,
    ) -> Engine:
        """Rank 0's driver of the pipeline."""
        return Engine(
            limits_of(self.run),
            make_policy(self.run.policy),
            self._runner,
            self._upstream,
            self._recorder,
            self._clock,
            eos_token_ids=eos_token_ids,
            stop_checkers=stop_checkers,
            observe=observe,
            cost=self._known_cost() if wants_cost(self.run.policy) else None,
            warn=warn,
        )

    def _known_cost(self) -> CostModel:
        """What the stages cost, as far as is known before they have run anything."""
        profile = self._profile
        if profile is None and self._config.profile is not None:
            profile = read_profile(self._config.profile)
        if profile is not None:
            return recut(profile.cost, self.run.layers)
        run = self.run
        return estimated_cost(
            self._model_dir,
            self.facts,
            run.layers,
            dtype=run.dtype,
            device=self.device.type,
            page_size=run.page_size,
        )

    def _open_trace(self, *, alone: bool) -> dict[str, Any]:
        """alone: in a directory that is not rank 0's, which alone is cleared for a new run."""
        path = self._run_dir.trace_path(self.place.rank, self.place.world_size)
        if alone:
            self._run_dir.drop_replaced()
            path.unlink(missing_ok=True)
        self._recorder = Recorder(path)
        return {}

    def describe(self) -> dict[str, Any]:
        """What run.json holds."""
        found = {"hosts": self._topology.hosts, "transport": self._transport.name, **self._memory()}
        return {**dataclasses.asdict(self.run), **found, **_software(), "fingerprint": self.facts.fingerprint}

    def serve(self) -> None:
        """Every other rank: run what comes until rank 0 says goodbye."""
        self._runner.serve(self._upstream)

    def finish(self, analyse: Analyse = figures, facts: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Close this rank's trace, bring all traces to rank 0, which gets the report that `analyse` makes of them.

        facts: what the report is to say besides.
        Each report is written before the next is asked for: whoever ends the process by then has that one.
        """
        self._watchdog.dismiss()
        offset, graphs = align(self._topology, self._clock.now), self._stage.graphed
        self._recorder.record(
            TraceEnd(
                at_s=self._clock.now(),
                clock_offset_s=offset.offset_s,
                clock_uncertainty_s=offset.uncertainty_s,
                peak_rss_bytes=_peak_rss_bytes(),
                bytes_read=self._stage.bytes_read,
                graph_hits=graphs[0] if graphs else None,
                graph_misses=graphs[1] if graphs else None,
            )
        )
        self._recorder.close()
        traces = self._gather()
        if self.place.rank != 0:
            return None
        report: dict[str, Any] | None = None
        for report in analyse(traces, {**self._report_facts(), **(facts or {})}):
            self._run_dir.write_report(report)
        return report

    def take_over(self) -> None:
        """The main thread has an error in hand and ends the run itself, however long its last writes take."""
        self._watchdog.dismiss()

    def abandon(self) -> None:
        """Keep what was traced, let the watchdog rest."""
        self._watchdog.dismiss()
        with suppress(OutputError):
            self._recorder.close()

    def _choose_device(self) -> dict[str, Any]:
        """Whose memory the device has: the same of ranks that share it, whoever started them."""
        self.device = choose_device("cpu" if self._profile is not None else self._config.device, self.place)
        return dataclasses.asdict(stand(self.device, os.uname().nodename))

    def _choose_stages(self) -> dict[str, Any]:
        """What an attention backend needs may be installed on some hosts alone."""
        config = self._config
        if self._profile is not None:
            self._maker: StageMaker = EmulatedStages(config, self._profile, self._clock)
        else:
            # Imports transformers, which takes seconds that an emulated run does not need.
            from sarathi_pp.runtime.model_stage import ModelStages

            self._maker = ModelStages(config, self._model_dir, self.facts, self.dtype, self.device, self._sharers)
        return {}

    def _load(self, layers: tuple[int, int]) -> dict[str, Any]:
        self._maker.load(layers)
        return {}

    def _make_stage(self) -> dict[str, Any]:
        self._stage = self._maker.make(self.run, self.layers, self.dtype)
        return {}

    def _alike(self, work: Callable[[], T]) -> T:
        """What every rank does alike; an error is then the same on all of them, and rank 0's to show."""
        try:
            return work()
        except SarathiError as error:
            error.agreed = True
            raise

    def _agree(self, work: Callable[[], dict[str, Any]], *, must_match: bool = False) -> list[dict[str, Any]]:
        """Every rank's answer; an error on any of them is raised on all, so that none waits for one that left."""
        try:
            mine: dict[str, Any] = {"answer": work()}
        except SarathiError as error:
            mine = {"error": str(error), "class": type(error).__name__}
        answers = self._topology.exchange(mine)
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise _agreed_error(rank, answer, self.place)
        facts = [answer["answer"] for answer in answers]
        if must_match:
            _require_equal(facts)
        return facts

    def _connect(self) -> tuple[Receiver[torch.Tensor], StageRunner]:
        run, clock = self.run, self._clock
        num_buffers = run.inflight + 1
        by_nccl = self._transport.name == "nccl"
        self._topology.open_edges(run.peer_timeout_s, nccl_lanes(self.device, clock) if by_nccl else None)
        if self.place.world_size == 1:
            channel: QueueChannel[torch.Tensor] = QueueChannel(clock.now, num_buffers)
            return channel, self._runner_to(channel)
        payloads = Payloads(run.max_microbatch_tokens, (self.facts.hidden_size,), self.dtype, self.device)
        bound = codec.max_frame_bytes(
            max_tokens=run.max_microbatch_tokens,
            max_seqs=run.max_num_seqs,
            page_size=run.page_size,
            num_stages=run.num_stages,
        )
        upstream = self._topology.receiver(
            bound, payloads, num_buffers, clock.now, run.peer_timeout_s, self._watchdog.report
        )
        # The sender's heartbeats tell of the runner, and the runner sends: whichever is first needs the other.
        runner: list[StageRunner] = []
        downstream: Sender[torch.Tensor] = self._topology.sender(
            bound,
            payloads,
            num_buffers,
            lambda: runner[0].progress() if runner else (0, False),
            self._watchdog.report,
        )
        runner.append(self._runner_to(downstream))
        return over_link(upstream, self._profile, self.place.rank, run.num_stages, clock), runner[0]

    def _runner_to(self, downstream: Sender[torch.Tensor]) -> StageRunner:
        return StageRunner(
            self._stage,
            downstream,
            self._recorder,
            self._clock,
            self._timer(),
            index=self.place.rank,
            debug_nan=self._config.debug_nan,
        )

    def _timer(self) -> Timer:
        return CudaTimer(self._clock) if self.device.type == "cuda" else HostTimer(self._clock)

    def _trace_start(self, offset: Offset) -> TraceStart:
        run, rank = self.run, self.place.rank
        return TraceStart(
            at_s=self._clock.now(),
            unix_s=self._clock.wall(),
            rank=rank,
            stage=rank,
            num_stages=run.num_stages,
            layers=self.layers,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=run.device,
            policy=run.policy,
            chunk_size=run.chunk_size,
            inflight=run.inflight,
            num_pages=run.num_pages,
            page_size=run.page_size,
            clock_offset_s=offset.offset_s,
            clock_uncertainty_s=offset.uncertainty_s,
        )

    def _gather(self) -> list[Path]:
        """All traces on rank 0's disk. A rank that writes into rank 0's own directory sends nothing."""
        rank, world_size = self.place.rank, self.place.world_size
        paths = [self._run_dir.trace_path(stage, world_size) for stage in range(world_size)]
        marks = self._topology.exchange({"mark": self._run_dir.identity()})
        for stage in range(1, world_size):
            if marks[stage]["mark"] == marks[0]["mark"]:
                continue
            if rank == 0:
                partial = paths[stage].with_suffix(".part")
                self._topology.receive_file(partial, stage)
                partial.replace(paths[stage])
            elif rank == stage:
                self._topology.send_file(paths[stage], 0)
        self._topology.exchange({})
        return paths

    def _report_facts(self) -> dict[str, Any]:
        return {
            "model": self.run.model,
            "dtype": self.run.dtype,
            "attention": self.run.attention,
            "max_num_seqs": self.run.max_num_seqs,
            "max_model_len": self.run.max_model_len,
            "request_rate": self.run.request_rate,
            **self._memory(),
        }

    def _memory(self) -> dict[str, int | None]:
        """Bytes of the largest shard, None where stages are emulated and hold nothing; pages that each stage could."""
        held = None if self._profile is not None else kv_cache_bytes(self.run, self.facts, self.dtype)
        return {"kv_cache_bytes": held, "max_pages": self._max_pages}


def choose_device(wish: str, place: Place) -> torch.device:
    """The device of this rank. Ranks share a GPU where there are more of them than GPUs."""
    if wish == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if wish == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _passport(config: RunConfig, facts: ModelFacts) -> dict[str, Any]:
    """What must be the same on every rank."""
    # Where the files lie may differ (what the profile decided may not); sampling is rank 0's own affair, and how long a
    # rank waits each rank's.
    options = dataclasses.replace(
        config, model="", run_dir=None, profile=None, sampling_overrides={}, join_timeout_s=1.0
    )
    return {
        **_software(),
        "wire version": codec.VERSION,
        "model": facts.fingerprint,
        **{f"option {name}": repr(value) for name, value in dataclasses.asdict(options).items()},
    }


def _software() -> dict[str, str]:
    return {
        "sarathi_pp": sarathi_pp.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def _require_equal(passports: list[dict[str, Any]]) -> None:
    for rank, passport in enumerate(passports):
        for key, value in passport.items():
            if value != passports[0][key]:
                raise ConfigError(f"{key} differs: rank 0 has {passports[0][key]}, rank {rank} has {value}")


def _agreed_error(rank: int, answer: dict[str, Any], place: Place) -> SarathiError:
    where = f"stage {rank} (rank {rank}): " if place.world_size > 1 else ""
    error = error_class(answer["class"])(where + answer["error"])
    error.agreed = True
    return error


def _peak_rss_bytes() -> int:
    """The largest resident memory of this process image. Not getrusage, whose peak survives an exec."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
