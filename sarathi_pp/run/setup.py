"""How a rank is made, step by step. All ranks take the steps together, and each returns a finished value.

    agree_on_start   the same software, model and options everywhere; devices; the run directory
    load_stage       kernels chosen, this stage's layers read, KV pages counted
    agree_on_run     the run resolved, the same on every rank
    make_stage       memory for KV pages taken, kernels compiled
    open_trace       this rank's trace, and its clock's offset
    open_pipeline    the edges, and what computes between them

What a rank finds wrong in a step of the agreement is raised on every rank. What opens edges and compares clocks raises
where it fails, and the other ranks lose that peer.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from sarathi_pp.config import ResolvedRun
from sarathi_pp.core.head_placement import moves_head
from sarathi_pp.core.partition import partition
from sarathi_pp.distributed.agreement import Agreement, Step
from sarathi_pp.distributed.clock_sync import ClockOffset, sync_clocks
from sarathi_pp.distributed.control_plane import ControlPlane
from sarathi_pp.distributed.devices import DeviceInfo, choose_device, describe_device
from sarathi_pp.distributed.edges import Edges, open_shard_group
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.distributed.fingerprint import rank_fingerprint
from sarathi_pp.distributed.transport import Transport, choose_transport, has_nccl, nccl_options
from sarathi_pp.errors import OutputError
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.process.host import host_id
from sarathi_pp.process.watchdog import Watchdog
from sarathi_pp.run.preflight import Preflight
from sarathi_pp.stages.capacity import pools_of, resolve
from sarathi_pp.stages.cuda_timer import CudaTimer
from sarathi_pp.stages.emulated_stage import EmulatedStages, over_link
from sarathi_pp.stages.memory_demand import Demand, require_room, room_for, sharers_of
from sarathi_pp.stages.runner import StageRunner
from sarathi_pp.stages.stage import Stage, StageMaker
from sarathi_pp.trace.clock import Clock
from sarathi_pp.trace.events import TraceStart
from sarathi_pp.trace.recorder import Recorder
from sarathi_pp.trace.timer import HostTimer, Timer
from sarathi_pp.wire.byte_stream import Remote
from sarathi_pp.wire.channel import Receiver, edge_buffers
from sarathi_pp.wire.edge_options import EdgeOptions, IgnoreLosses, LossListener
from sarathi_pp.wire.mesh import Coordinate, Mesh
from sarathi_pp.wire.message import Payloads
from sarathi_pp.wire.shard_group import ShardGroup
from sarathi_pp.wire.shared_memory import MAX_SLOTS
from sarathi_pp.wire.stage_progress import StageProgress

_log = logging.getLogger(__name__)

# Of a resolved run, what may differ from rank to rank: where the weights are, and what computes there.
_RANKS_OWN = ("model", "device", "attention")

# First calls cost the same for larger microbatches.
_WARM_UP_TOKENS = 256
_WARM_UP_KEYS = 4096
# What to try if the ranks of a host need more memory together than there is.
_FEWER_WEIGHTS = "more hosts, fewer ranks on that one, or a host or container with more memory"
_FEWER_PAGES = "--kv-cache-memory {each} or less, or a smaller --max-num-seqs or --max-model-len"


@dataclass(frozen=True, slots=True)
class Member:
    """A process that has joined the others: what it has checked before, and what it reaches them by.

    watchdog: told of lost peers.
    """

    checked: Preflight
    plane: ControlPlane
    watchdog: Watchdog
    clock: Clock

    @property
    def env(self) -> RankEnvironment:
        return self.plane.env

    @property
    def mesh(self) -> Mesh:
        return self.plane.mesh

    @property
    def coordinate(self) -> Coordinate:
        return self.mesh.coordinate(self.env.rank)

    @property
    def agreement(self) -> Agreement:
        return Agreement(self.plane)


@dataclass(frozen=True, slots=True)
class AgreedStart:
    """What ranks agree on before they load anything.

    devices: where each rank computes. transport: how activations travel between stages.
    """

    device: torch.device
    devices: tuple[DeviceInfo, ...]
    transport: Transport
    run_dir: RunDirectory

    @property
    def on_cpu(self) -> bool:
        """Whether every rank is."""
        return all(device_info.gpu is None for device_info in self.devices)


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """This rank's layers [first, end), loaded by `maker`.

    split: the layers of every stage. shards: its part in the stage; None where the rank holds the stage alone.
    num_pages: KV pages for which each rank has room. moves_head: whether the first stage has loaded the head too.
    """

    maker: StageMaker
    split: tuple[tuple[int, int], ...]
    layers: tuple[int, int]
    dtype: torch.dtype
    shards: ShardGroup | None
    num_pages: tuple[int, ...]
    moves_head: bool


@dataclass(frozen=True, slots=True)
class OpenTrace:
    """offset: of this rank's clock. sends: the trace does not lie in rank 0's directory."""

    recorder: Recorder
    offset: ClockOffset
    sends: bool

    def abandon(self) -> None:
        """Keep what was recorded."""
        with suppress(OutputError):
            self.recorder.close()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """This rank's stage, connected to the others."""

    upstream: Receiver[torch.Tensor]  # microbatches; on a leader, results
    runner: StageRunner
    remotes: tuple[Remote, ...]  # other leaders, on rank 0; rank 0, on another leader
    shared_edges: tuple[tuple[int, int], ...]  # edges of the run that use shared memory, as pairs of ranks


def agree_on_start(member: Member) -> AgreedStart:
    """Raises ConfigError where ranks differ in what must be the same."""
    checked, env, agreement = member.checked, member.env, member.agreement
    config, run_dir = checked.config, checked.run_dir
    torch.set_num_threads(env.num_threads())
    with agreement.step("reading versions and options", must_match=True) as step:
        step.own = rank_fingerprint(config, checked.facts)
    with agreement.step("choosing its device") as step:
        device = choose_device("cpu" if checked.profile is not None else config.device, env)
        step.own = dataclasses.asdict(describe_device(device, host_id(), nccl=has_nccl()))
    devices = tuple(DeviceInfo(**answer) for answer in step.answers)
    transport = choose_transport(devices, config.transport)
    _log.info("activations by %s: %s", transport.name, transport.reason)
    with agreement.step("choosing the run directory") as step:
        step.own = {"path": str(run_dir.path), "attempt": run_dir.attempt, "replaces": run_dir.replaces}
    first = step.answers[0]
    with agreement.step("making the run directory"):
        run_dir = run_dir.joining(
            Path(first["path"]), first["attempt"], own=config.run_dir is not None, replaces=first["replaces"]
        )
    return AgreedStart(device, devices, transport, run_dir)


def load_stage(member: Member, start: AgreedStart) -> LoadedStage:
    """Read this stage's weights. Raises CapacityError where ranks have no room for them together."""
    checked, env, mesh, agreement = member.checked, member.env, member.mesh, member.agreement
    config, facts = checked.config, checked.facts
    with agreement.alike():
        split = partition(facts.num_layers, mesh.stages, config.layer_split)
    layers = split[member.coordinate.stage]
    dtype: torch.dtype = getattr(torch, _dtype_name(checked))
    shards = open_shard_group(member.plane, config.peer_timeout_s, start.transport.name)
    with agreement.step("loading transformers and choosing kernels"):
        maker = _choose_maker(member, start, dtype, shards)
    with agreement.step("adding up weights") as step:
        step.own = Demand(maker.weight_bytes(layers), pools_of(start.device)).to_json()
    weights = _require_room(member, step, "weights", _FEWER_WEIGHTS)
    with agreement.step("loading its layers", maker.reading) as loading:
        maker.load(layers, room_for(env.rank, weights))
        loading.own = {"head": maker.has_head}
    with agreement.step("counting KV pages") as counting:
        counting.own = {"pages": maker.count_pages(layers, sharers_of(env.rank, weights))}
    return LoadedStage(
        maker=maker,
        split=split,
        layers=layers,
        dtype=dtype,
        shards=shards,
        num_pages=tuple(stage["pages"] for stage in counting.answers),
        moves_head=all(loading.answers[mesh.leader(replica)]["head"] for replica in range(mesh.replicas)),
    )


def agree_on_run(member: Member, loaded: LoadedStage) -> ResolvedRun:
    """Decide what was left open. Raises ConfigError, CapacityError or PolicyError for what cannot run.

    A policy of the user's own decides too, and may give another answer on another rank.
    """
    checked, maker = member.checked, loaded.maker
    with member.agreement.step("resolving the run", must_match=True) as step:
        run = resolve(
            checked.config,
            checked.facts,
            loaded.split,
            loaded.num_pages,
            page_size=maker.page_size,
            dtype=_dtype_name(checked),
            device=maker.device_name,
            attention=maker.attention,
            moves_head=loaded.moves_head,
        )
        step.own = {name: value for name, value in dataclasses.asdict(run).items() if name not in _RANKS_OWN}
    return run


def make_stage(member: Member, start: AgreedStart, loaded: LoadedStage, run: ResolvedRun) -> Stage:
    """Take the memory for KV pages and bear the costs of first calls. Raises CapacityError."""
    maker, agreement = loaded.maker, member.agreement
    pages = f"KV pages of {maker.page_size} tokens"
    with agreement.step(f"adding up {pages}") as step:
        step.own = Demand(maker.shard_bytes(run, loaded.layers), pools_of(start.device)).to_json()
    _require_room(member, step, pages, _FEWER_PAGES)
    with agreement.step("making its stage"):
        stage = maker.make(run, loaded.layers, loaded.dtype)
    longest = run.max_model_len
    num_tokens, num_keys = min(run.chunk_size, longest, _WARM_UP_TOKENS), min(longest, _WARM_UP_KEYS)
    with agreement.step("compiling kernels and warming up"):
        stage.warm_up(num_tokens, num_keys)
    return stage


def open_trace(member: Member, start: AgreedStart, loaded: LoadedStage, run: ResolvedRun) -> OpenTrace:
    """Begin this rank's trace, in rank 0's directory or in one of its own, which alone is cleared for a new run."""
    run_dir, agreement, clock = start.run_dir, member.agreement, member.clock
    with agreement.step("opening the run directory") as step:
        step.own = {"identity": run_dir.identity()}
    sends = step.answers[0] != step.answers[member.env.rank]
    path = run_dir.trace_path(member.mesh, member.coordinate)
    with agreement.step("opening its trace"):
        if sends:
            run_dir.drop_replaced()
            path.unlink(missing_ok=True)
        run_dir.make(path.parent)
        recorder = Recorder(path, most_bytes=run_dir.most_trace_bytes)
    try:
        offset = sync_clocks(member.plane, clock, range(member.mesh.replicas)).offset
        recorder.record(_trace_start(member, loaded, run, offset))
    except BaseException:
        with suppress(OutputError):
            recorder.close()
        raise
    return OpenTrace(recorder, offset, sends)


def open_pipeline(
    member: Member, start: AgreedStart, loaded: LoadedStage, run: ResolvedRun, stage: Stage, trace: OpenTrace
) -> Pipeline:
    """Open this rank's edges. Raises PeerLostError if one does not open."""
    checked, clock, mesh, shards = member.checked, member.clock, member.mesh, loaded.shards
    options = EdgeOptions(clock, StageProgress(stage), _loss_listener(member), run.peer_timeout_s)
    nccl = nccl_options(start.device, clock) if start.transport.name == "nccl" else None
    edges = Edges.connect(member.plane, options, nccl, share=_may_share(member, start, run))
    shared = ", ".join(f"{source} to {target}" for source, target in edges.shared)
    _log.info("edges through shared memory, between ranks: %s", shared or "none")
    facts = checked.facts
    activations = Payloads(run.max_microbatch_tokens, (facts.hidden_size,), loaded.dtype, start.device)
    wires = edges.open_wires(run, activations, facts.lm_head_size or facts.hidden_size)
    runner = StageRunner(
        stage,
        wires.way_out,
        trace.recorder,
        clock,
        _timer(start, clock),
        progress=options.progress,
        index=member.coordinate.stage,
        name=mesh.title(member.env.rank),
        debug_nan=checked.config.debug_nan,
        shards=wires.shards,
        shard_group=shards,
    )
    upstream = over_link(wires.way_in, checked.profile, member.coordinate.stage, mesh.stages, clock)
    remotes = tuple(edges.open_byte_stream(rank) for rank in _other_leaders(member))
    return Pipeline(upstream, runner, remotes, tuple(edges.shared))


def _dtype_name(checked: Preflight) -> str:
    return checked.facts.dtype if checked.config.dtype == "auto" else checked.config.dtype


def _choose_maker(member: Member, start: AgreedStart, dtype: torch.dtype, shards: ShardGroup | None) -> StageMaker:
    """Raises what is missing here: what an attention backend needs may be installed on some hosts alone."""
    checked, config = member.checked, member.checked.config
    moves = _may_move_head(member, start)
    if checked.profile is not None:
        return EmulatedStages(config, checked.profile, member.clock, moves_head=moves)
    # Imports transformers, which takes seconds that an emulated run does not need.
    from sarathi_pp.model.tensor_parallel import TensorShard
    from sarathi_pp.stages.model_stage import ModelStages

    assert checked.model_dir is not None, "only emulated stages have no model"
    return ModelStages(
        config,
        checked.model_dir,
        checked.facts,
        dtype,
        start.device,
        TensorShard(shards.index, shards.size, shards.all_reduce) if shards is not None else None,
        moves_head=moves,
        by_nccl=start.transport.name == "nccl",
    )


def _may_move_head(member: Member, start: AgreedStart) -> bool:
    """As far as is known before the first stage has loaded it."""
    mesh, profile, head = member.mesh, member.checked.profile, member.checked.config.head
    if profile is not None:
        return moves_head(head, profile.device, mesh.stages, profile.tensor_parallel_size)
    # Else last bits would show whose product it was, which hangs on times.
    alike = len({device_info.arithmetic for device_info in start.devices}) == 1
    return moves_head(head, "cpu" if start.on_cpu else "cuda", mesh.stages, mesh.shards) and alike


def _require_room(member: Member, step: Step, what: str, remedy: str) -> Sequence[Demand]:
    """Return the memory that each rank needs of its device, if there is room for all of them together.

    Args:
        step: its answers are the ranks' demands.
        what, remedy: for the message of CapacityError.
    """
    demands = [Demand.from_json(answer) for answer in step.answers]
    with member.agreement.alike():
        require_room(demands, member.plane.hosts, what, remedy)
    return demands


def _trace_start(member: Member, loaded: LoadedStage, run: ResolvedRun, offset: ClockOffset) -> TraceStart:
    coordinate, clock = member.coordinate, member.clock
    return TraceStart(
        at_s=clock.now(),
        unix_s=clock.wall(),
        rank=member.env.rank,
        stage=coordinate.stage,
        num_stages=run.num_stages,
        layers=loaded.layers,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=run.device,
        policy=run.policy,
        chunk_size=run.chunk_size,
        inflight=run.inflight,
        num_pages=run.num_pages,
        page_size=run.page_size,
        clock_offset_s=0.0 if coordinate.leads else offset.offset_s,
        clock_uncertainty_s=offset.uncertainty_s,
        replica=coordinate.replica,
        num_replicas=member.mesh.replicas,
        replica_offset_s=offset.offset_s if coordinate.leads else 0.0,
    )


def _may_share(member: Member, start: AgreedStart, run: ResolvedRun) -> bool:
    """Whether edges go through memory where two ranks have some in common: what lies there is on CPU."""
    by_gloo = start.transport.name == "gloo" and member.checked.config.transport == "auto"
    return by_gloo and start.on_cpu and edge_buffers(run.inflight) <= MAX_SLOTS


def _loss_listener(member: Member) -> LossListener:
    """Return who is told when an edge of this rank breaks.

    Losing one of several replicas does not end the process of rank 0. Its next read or write on that edge raises.
    """
    return IgnoreLosses() if member.mesh.replicas > 1 and member.env.rank == 0 else member.watchdog


def _timer(start: AgreedStart, clock: Clock) -> Timer:
    return CudaTimer(clock) if start.device.type == "cuda" else HostTimer(clock)


def _other_leaders(member: Member) -> list[int]:
    """Those to talk to of requests and answers: rank 0 with the other leaders, in order, and they with rank 0."""
    mesh = member.mesh
    if not member.coordinate.leads or mesh.replicas == 1:
        return []
    return [0] if member.env.rank else [mesh.leader(replica) for replica in range(1, mesh.replicas)]
