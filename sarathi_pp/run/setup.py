"""One rank of a run, from joining the others to leaving them.

join -> check that all ranks have the same software, model and options -> load this stage's slice
     -> count pages, agree on the minimum -> open the edges -> serve (rank 0: the engine) -> gather traces
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from sarathi_pp.analysis.replicas import figures
from sarathi_pp.analysis.summary import Analyse
from sarathi_pp.config import ResolvedRun, RunConfig
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.cost.repartition import recut
from sarathi_pp.core.head_placement import HeadPlacement, moves_head
from sarathi_pp.core.load_balancer import most_held, most_held_tokens
from sarathi_pp.core.partition import partition
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.distributed.agreement import Agreement
from sarathi_pp.distributed.clock_sync import Offset, align
from sarathi_pp.distributed.control_plane import Topology
from sarathi_pp.distributed.devices import Standing, choose_device, stand
from sarathi_pp.distributed.edges import open_post, open_wires
from sarathi_pp.distributed.fingerprint import passport, software
from sarathi_pp.distributed.transport import choose_transport, has_nccl, nccl_lanes
from sarathi_pp.engine.dispatcher import Dispatcher
from sarathi_pp.engine.engine import Engine, StopCheckers
from sarathi_pp.engine.progress import Snapshot
from sarathi_pp.engine.replica import AbortedError, RemoteSink, RemoteSource
from sarathi_pp.errors import OutputError, PeerLostError, SarathiError
from sarathi_pp.model.checkpoint.support import ModelFacts
from sarathi_pp.outputs.profile_file import read_profile
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.process.host import host_id
from sarathi_pp.process.watchdog import Watchdog
from sarathi_pp.run.auto_options import estimated_cost
from sarathi_pp.run.collect_traces import gather
from sarathi_pp.stages.capacity import kv_cache_bytes, limits_of, pools_of, resolve
from sarathi_pp.stages.cuda_timer import CudaTimer
from sarathi_pp.stages.emulated_stage import EmulatedStages, over_link
from sarathi_pp.stages.memory_demand import Demand, require_room, room_for, sharers_of
from sarathi_pp.stages.runner import StageRunner
from sarathi_pp.stages.stage import StageMaker
from sarathi_pp.trace.clock import Clock
from sarathi_pp.trace.events import TraceEnd, TraceStart
from sarathi_pp.trace.recorder import Recorder
from sarathi_pp.trace.timer import HostTimer, Timer
from sarathi_pp.wire.byte_stream import Remote
from sarathi_pp.wire.channel import Receiver, edge_buffers
from sarathi_pp.wire.codec import Heartbeat
from sarathi_pp.wire.message import Payloads
from sarathi_pp.wire.shared_memory import MAX_SLOTS

_log = logging.getLogger(__name__)

# First calls cost the same for larger microbatches.
_WARM_UP_TOKENS = 256
_WARM_UP_KEYS = 4096
# What to try if the ranks of a host need more memory together than there is.
_FEWER_WEIGHTS = "more hosts, fewer ranks on that one, or a host or container with more memory"
_FEWER_PAGES = "--kv-cache-memory {each} or less, or a smaller --max-num-seqs or --max-model-len"


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
        self.mesh = mesh = topology.mesh
        self.seat = seat = mesh.seat(place.rank)
        self.facts = facts
        self._topology = topology
        self._clock = clock
        self._config = config
        self._profile = profile
        self._model_dir = model_dir
        self._watchdog = watchdog
        self._lost: dict[int, SarathiError] = {}
        agreement = Agreement(topology)
        torch.set_num_threads(place.num_threads())
        agreement.each(lambda: passport(config, facts), "reading versions and options", must_match=True)
        standings = [Standing(**found) for found in agreement.each(self._choose_device, "choosing its device")]
        self._on_cpu = all(one.gpu is None for one in standings)
        self._transport = choose_transport(standings, config.transport)
        _log.info("activations by %s: %s", self._transport.name, self._transport.reason)
        mine = {"path": str(run_dir.path), "attempt": run_dir.attempt, "replaces": run_dir.replaces}
        first = agreement.each(lambda: mine, "choosing the run directory")[0]
        self._run_dir = run_dir.joining(
            Path(first["path"]), first["attempt"], own=config.run_dir is not None, replaces=first["replaces"]
        )
        located(self._run_dir)
        layers = agreement.alike(lambda: partition(facts.num_layers, mesh.stages, config.layer_split))
        dtype_name = facts.dtype if config.dtype == "auto" else config.dtype
        self.dtype: torch.dtype = getattr(torch, dtype_name)
        self._moves_head = self._may_move_head(standings)
        self._shards = topology.open_shards(config.peer_timeout_s, self._transport.name)
        agreement.each(self._choose_stages, "choosing kernels")
        maker = self._maker
        self.layers = layers[seat.stage]
        weights = self._agree_on_room(agreement, lambda: maker.weight_bytes(self.layers), "weights", _FEWER_WEIGHTS)
        loaded = agreement.each(lambda: self._load(self.layers, room_for(place.rank, weights)), "loading its layers")
        self._moves_head = all(loaded[mesh.leader(replica)]["head"] for replica in range(mesh.replicas))
        stages = agreement.each(
            lambda: {"pages": maker.count_pages(self.layers, sharers_of(place.rank, weights))}, "counting KV pages"
        )
        self._max_pages = min(stage["pages"] for stage in stages)
        self.run: ResolvedRun = agreement.alike(
            lambda: resolve(
                config,
                facts,
                layers,
                [stage["pages"] for stage in stages],
                page_size=maker.page_size,
                dtype=dtype_name,
                device=maker.device_name,
                attention=maker.attention,
                moves_head=self._moves_head,
            )
        )
        pages = f"KV pages of {maker.page_size} tokens"
        self._agree_on_room(agreement, lambda: maker.shard_bytes(self.run, self.layers), pages, _FEWER_PAGES)
        agreement.each(self._make_stage, "making its stage")
        agreement.each(self._warm_up, "compiling kernels and warming up")
        homes = agreement.each(lambda: {"identity": self._run_dir.identity()}, "opening the run directory")
        self._sends_trace = homes[0] != homes[place.rank]
        agreement.each(lambda: self._open_trace(alone=self._sends_trace), "opening its trace")
        self._offset = align(self._topology, clock.now, range(mesh.replicas))
        self._recorder.record(self._trace_start(self._offset))
        self._dispatcher: Dispatcher | None = None
        self._upstream, self._runner = self._connect()
        self._remotes = [self._remote(rank) for rank in self._others_to_talk_to()]
        self._topology.start()

    def driver(
        self,
        eos_token_ids: Collection[int],
        stop_checkers: StopCheckers,
        observe: Callable[[Snapshot], None],
        warn: Callable[[str], None] = lambda text: None,
    ) -> Engine | Dispatcher:
        """Rank 0's: of the pipeline, or of all replicas of it."""
        if self.mesh.replicas == 1:
            return self._engine(eos_token_ids, stop_checkers, observe, warn)
        self._dispatcher = Dispatcher(
            lambda seen: self._engine(eos_token_ids, stop_checkers, seen, warn),
            self._remotes,
            most_held(self.run.max_num_seqs),
            most_held_tokens(self.run.num_pages * self.run.page_size),
            self.mesh.stages,
            self._clock,
            observe=observe,
            warn=warn,
        )
        return self._dispatcher

    def lead(self, eos_token_ids: Collection[int], stop_checkers: StopCheckers) -> None:
        """Another replica's leader: answer what rank 0 asks until it says goodbye."""
        (rank0,) = self._remotes
        source, sink = RemoteSource(rank0.incoming, self._clock, self._offset.offset_s), RemoteSink(rank0.outgoing)
        engine = self._engine(eos_token_ids, stop_checkers, sink.observe)
        aborted = True
        while aborted:
            try:
                engine.run(source, sink, source.asked)
                aborted = False
            except AbortedError:
                pass
        engine.close()
        sink.close()

    def _others_to_talk_to(self) -> list[int]:
        """Of requests and answers: rank 0 with the other leaders, in order, and they with rank 0."""
        if not self.seat.leads or self.mesh.replicas == 1:
            return []
        return [0] if self.place.rank else [self.mesh.leader(replica) for replica in range(1, self.mesh.replicas)]

    def _remote(self, rank: int) -> Remote:
        timeout_s = self.run.peer_timeout_s
        return open_post(self._topology, rank, timeout_s, self._clock, self._runner.progress, self._on_loss())

    def _on_loss(self) -> Callable[[SarathiError], None]:
        """Who is told when an edge of this rank breaks."""
        several = self.mesh.replicas > 1 and self.place.rank == 0
        return self._lost_elsewhere if several else self._watchdog.report

    def _lost_elsewhere(self, error: SarathiError) -> None:
        """Of several replicas one may go: who next reads or writes there finds out, and ends no process."""

    def _engine(
        self,
        eos_token_ids: Collection[int],
        stop_checkers: StopCheckers,
        observe: Callable[[Snapshot], None],
        warn: Callable[[str], None] = lambda text: None,
    ) -> Engine:
        policy = parse_policy(self.run.policy)
        return Engine(
            limits_of(self.run),
            policy.make(),
            self._runner,
            self._upstream,
            self._recorder,
            self._clock,
            eos_token_ids=eos_token_ids,
            stop_checkers=stop_checkers,
            observe=observe,
            cost=self._known_cost() if policy.kind.wants_cost else None,
            heads=HeadPlacement(self._known_cost()) if self.run.moves_head else None,
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
            shards=run.tensor_parallel_size,
        )

    def _open_trace(self, *, alone: bool) -> dict[str, Any]:
        """alone: in a directory that is not rank 0's, which alone is cleared for a new run."""
        path = self._run_dir.trace_path(self.mesh, self.seat)
        if alone:
            self._run_dir.drop_replaced()
            path.unlink(missing_ok=True)
        self._run_dir.make(path.parent)
        self._recorder = Recorder(path, most_bytes=self._run_dir.most_trace_bytes)
        return {}

    def describe(self) -> dict[str, Any]:
        """What run.json holds."""
        hosts = [self._topology.hosts[rank] for rank in self.mesh.ranks]
        found = {
            "hosts": hosts,
            "transport": self._transport.name,
            "shared_memory_edges": self._topology.shared_edges,
            **self._memory(),
        }
        return {**dataclasses.asdict(self.run), **found, **software(), "fingerprint": self.facts.fingerprint}

    def serve(self) -> None:
        """Every other rank: run what comes until rank 0 says goodbye."""
        self._runner.serve(self._upstream)

    @property
    def lost(self) -> Mapping[int, SarathiError]:
        """Replicas that have ended before the run did."""
        return self._lost

    def finish(self, analyse: Analyse = figures, facts: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Close this rank's trace, bring all traces to rank 0, which gets the report that `analyse` makes of them.

        facts: what the report is to say besides.
        Each report is written before the next is asked for: whoever ends the process by then has that one.
        """
        self._watchdog.dismiss()
        if self._dispatcher is not None:
            self._lost.update(self._dispatcher.lost)
        offset = align(self._topology, self._clock.now, self._present(), self._give_up)
        graphs = self._stage.graphed
        self._recorder.record(
            TraceEnd(
                at_s=self._clock.now(),
                clock_offset_s=0.0 if self.seat.leads else offset.offset_s,
                clock_uncertainty_s=offset.uncertainty_s,
                peak_rss_bytes=_peak_rss_bytes(),
                bytes_read=self._stage.bytes_read,
                graph_hits=graphs[0] if graphs else None,
                graph_misses=graphs[1] if graphs else None,
            )
        )
        self._recorder.close()
        traces = gather(self._topology, self._run_dir, self._present(), self._give_up, sends=self._sends_trace)
        if self.place.rank != 0:
            return None
        for replica in self._lost:
            self._run_dir.forget(replica)
        if not traces:
            raise PeerLostError("no replica is left: " + "; ".join(map(str, self._lost.values())))
        report: dict[str, Any] | None = None
        for report in analyse(traces, {**self._report_facts(), **(facts or {})}):
            if self._lost:
                # Answers are counted as they are written; those of a lost replica are requests that no trace tells of.
                report["requests"] = max(report["requests"], report["completed"] + report["failed"])
            self._run_dir.write_report(report)
        return report

    def _give_up(self, replica: int, error: SarathiError) -> None:
        """Raises it where there is no other."""
        if self.mesh.replicas == 1:
            raise error
        self._lost.setdefault(replica, error)

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
        return dataclasses.asdict(stand(self.device, host_id(), nccl=has_nccl()))

    def _may_move_head(self, standings: Sequence[Standing]) -> bool:
        """As far as is known before the first stage has loaded it."""
        mesh, profile, head = self.mesh, self._profile, self._config.head
        if profile is not None:
            return moves_head(head, profile.device, mesh.stages, profile.tensor_parallel_size)
        # Else last bits would show whose product it was, which hangs on times.
        alike = len({standing.arithmetic for standing in standings}) == 1
        return moves_head(head, "cpu" if self._on_cpu else "cuda", mesh.stages, mesh.shards) and alike

    def _choose_stages(self) -> dict[str, Any]:
        """What an attention backend needs may be installed on some hosts alone."""
        config = self._config
        if self._profile is not None:
            self._maker: StageMaker = EmulatedStages(config, self._profile, self._clock, moves_head=self._moves_head)
        else:
            # Imports transformers, which takes seconds that an emulated run does not need.
            from sarathi_pp.model.tensor_parallel import TensorShard
            from sarathi_pp.stages.model_stage import ModelStages

            group = self._shards
            shard = TensorShard(group.index, group.size, group.all_reduce) if group is not None else None
            self._maker = ModelStages(
                config,
                self._model_dir,
                self.facts,
                self.dtype,
                self.device,
                shard,
                moves_head=self._moves_head,
                by_nccl=self._transport.name == "nccl",
            )
        return {}

    def _agree_on_room(self, agreement: Agreement, count: Callable[[], int], what: str, remedy: str) -> list[Demand]:
        """Return what each rank needs of its device's memory, if there is room for all of them together.

        count: the bytes that this rank needs. what, remedy: for the message of CapacityError.
        """
        answers = agreement.each(lambda: Demand(count(), pools_of(self.device)).to_json(), f"adding up {what}")
        demands = [Demand.from_json(answer) for answer in answers]
        agreement.alike(lambda: require_room(demands, self._topology.hosts, what, remedy))
        return demands

    def _load(self, layers: tuple[int, int], room_bytes: int) -> dict[str, Any]:
        self._maker.load(layers, room_bytes)
        return {"head": self._maker.has_head}

    def _make_stage(self) -> dict[str, Any]:
        self._stage = self._maker.make(self.run, self.layers, self.dtype)
        return {}

    def _warm_up(self) -> dict[str, Any]:
        longest = self.run.max_model_len
        self._stage.warm_up(min(self.run.chunk_size, longest, _WARM_UP_TOKENS), min(longest, _WARM_UP_KEYS))
        return {}

    def _connect(self) -> tuple[Receiver[torch.Tensor], StageRunner]:
        """The way in, and what computes and sends."""
        run, clock, mesh = self.run, self._clock, self.mesh
        by_nccl = self._transport.name == "nccl"
        self._topology.open_edges(
            run.peer_timeout_s, nccl_lanes(self.device, clock) if by_nccl else None, share=self._may_share(run)
        )
        shared = ", ".join(f"{source} to {target}" for source, target in self._topology.shared_edges)
        _log.info("edges through shared memory, between ranks: %s", shared or "none")
        # The senders' heartbeats tell of the runner, and the runner sends: whichever is first needs the other.
        runner: list[StageRunner] = []
        activations = Payloads(run.max_microbatch_tokens, (self.facts.hidden_size,), self.dtype, self.device)
        wires = open_wires(
            self._topology,
            run,
            activations,
            self.facts.head_size or self.facts.hidden_size,
            clock,
            lambda: runner[0].progress() if runner else Heartbeat(0, False),
            self._on_loss(),
        )
        runner.append(
            StageRunner(
                self._stage,
                wires.way_out,
                self._recorder,
                clock,
                self._timer(),
                index=self.seat.stage,
                name=mesh.title(self.place.rank),
                debug_nan=self._config.debug_nan,
                shards=wires.shards,
                collectives_s=self._spent_in_sums if self._shards is not None else None,
            )
        )
        return over_link(wires.way_in, self._profile, self.seat.stage, mesh.stages, clock), runner[0]

    def _may_share(self, run: ResolvedRun) -> bool:
        """Whether edges go through memory where two ranks have some in common: what lies there is on CPU."""
        by_gloo = self._transport.name == "gloo" and self._config.transport == "auto"
        return by_gloo and self._on_cpu and edge_buffers(run.inflight) <= MAX_SLOTS

    def _spent_in_sums(self) -> float:
        assert self._shards is not None
        return self._shards.spent_s

    def _timer(self) -> Timer:
        return CudaTimer(self._clock) if self.device.type == "cuda" else HostTimer(self._clock)

    def _trace_start(self, offset: Offset) -> TraceStart:
        run, leads = self.run, self.seat.leads
        return TraceStart(
            at_s=self._clock.now(),
            unix_s=self._clock.wall(),
            rank=self.place.rank,
            stage=self.seat.stage,
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
            clock_offset_s=0.0 if leads else offset.offset_s,
            clock_uncertainty_s=offset.uncertainty_s,
            replica=self.seat.replica,
            num_replicas=self.mesh.replicas,
            replica_offset_s=offset.offset_s if leads else 0.0,
        )

    def _present(self) -> list[int]:
        return [replica for replica in range(self.mesh.replicas) if replica not in self._lost]

    def _report_facts(self) -> dict[str, Any]:
        return {
            "model": self.run.model,
            "dtype": self.run.dtype,
            "attention": self.run.attention,
            "max_num_seqs": self.run.max_num_seqs,
            "max_model_len": self.run.max_model_len,
            "request_rate": self.run.request_rate,
            **({"tensor_parallel_size": self.mesh.shards} if self.mesh.shards > 1 else {}),
            **self._memory(),
        }

    def _memory(self) -> dict[str, int | None]:
        """Bytes of the largest shard, None where stages are emulated and hold nothing; pages that each stage could."""
        held = None
        if self._profile is None:
            held = kv_cache_bytes(self.run, self.facts.sharded(self.mesh.shards), self.dtype)
        return {"kv_cache_bytes": held, "max_pages": self._max_pages}


def _peak_rss_bytes() -> int:
    """The largest resident memory of this process image. Not getrusage: its peak survives an exec. 0 without /proc."""
    with suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
