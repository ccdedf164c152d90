"""The set-up of a rank, step by step. All ranks take the steps together, and each step returns a finished value.

    agree_on_start   compare software, model and options; choose devices and the run directory
    load_stage       choose kernels, read this stage's layers, count KV pages
    agree_on_run     resolve the run, the same on every rank
    make_stage       allocate memory for KV pages, compile kernels
    load_tokenizer   load the tokenizer on leaders, the first rank of every replica
    open_trace       open this rank's trace, measure its clock's offset
    open_pipeline    open the edges (connections to other ranks), and connect the stage to them

If a rank has an error in a common step (Agreement.step), every rank raises it. Opening edges and comparing clocks are
not such steps. An error in them is raised only on the rank that has it, and the other ranks notice that it is gone.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import nullcontext, suppress
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
from sarathi_pp.model.dtypes import can_stay_coded
from sarathi_pp.model.memory import give_back
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
from sarathi_pp.text.tokenizer import Tokenizer
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

# Fields of a resolved run that may differ between ranks: path of the weights, device, attention backend.
_RANKS_OWN = ("model", "device", "attention")

# Most tokens of the microbatch that warms up a stage, and most earlier tokens in its attention. First calls take extra
# time, which does not grow with larger microbatches.
_WARM_UP_TOKENS = 256
_WARM_UP_KEYS = 4096
# Advice if all ranks of a host together need more memory than it has.
_FEWER_WEIGHTS = "more hosts, fewer ranks on that one, or a host or container with more memory"
_FEWER_PAGES = "--kv-cache-memory {each} or less, or a smaller --max-num-seqs or --max-model-len"


@dataclass(frozen=True, slots=True)
class Member:
    """A process that has joined the other ranks.

    Attributes:
        checked: facts that its checks before joining have found.
        plane: control plane, over which all ranks talk during the set-up.
        watchdog: ends the process after the loss of another rank.
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
    """The choices on which ranks agree before they load anything.

    Attributes:
        device: device of this rank.
        devices: device of each rank, by rank.
        transport: transport of activations between stages.
        run_dir: run directory of this rank.
        prepares_grammars: stages that draw read the vocabulary for grammars before the run.
    """

    device: torch.device
    devices: tuple[DeviceInfo, ...]
    transport: Transport
    run_dir: RunDirectory
    prepares_grammars: bool

    @property
    def on_cpu(self) -> bool:
        """Return whether every rank computes on a CPU."""
        return all(device_info.gpu is None for device_info in self.devices)


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """The loaded layers of this rank.

    Attributes:
        maker: the maker of this rank's stage, which has loaded the layers.
        split: layers of every stage, [first, end).
        layers: layers of this stage, [first, end).
        shards: the group of ranks that hold this stage together; None if this rank holds it alone.
        num_pages: number of KV pages for which each rank has room, by rank.
        equal_decodes: see StageMaker, of all stages.
        draws_ahead: the same.
        moves_head: True if the first stage has loaded the LM head too, so that it can compute some LM heads.
    """

    maker: StageMaker
    split: tuple[tuple[int, int], ...]
    layers: tuple[int, int]
    dtype: torch.dtype
    shards: ShardGroup | None
    num_pages: tuple[int, ...]
    equal_decodes: bool
    draws_ahead: bool
    moves_head: bool


@dataclass(frozen=True, slots=True)
class OpenTrace:
    """The open trace of this rank.

    Attributes:
        offset: offset of this rank's clock. See ClockOffset.
        sends: True if the trace is not in rank 0's directory, so that this rank must send it at the end.
    """

    recorder: Recorder
    offset: ClockOffset
    sends: bool

    def abandon(self) -> None:
        """Close the trace with the events so far, because the run ends with an error."""
        with suppress(OutputError):
            self.recorder.close()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """This rank's stage, connected to the stages of other ranks.

    Attributes:
        upstream: receives microbatches from the stage before; on a leader, results from the last stage.
        runner: computes microbatches on this rank's stage, and sends its output on.
        remotes: streams of requests and answers: on rank 0 with the other leaders, on another leader with rank 0.
        shared_edges: edges of the run that use shared memory, as pairs of ranks: the sender and the receiver.
    """

    upstream: Receiver[torch.Tensor]
    runner: StageRunner
    remotes: tuple[Remote, ...]
    shared_edges: tuple[tuple[int, int], ...]


def agree_on_start(member: Member) -> AgreedStart:
    """Compare software, model and options of all ranks. Choose devices, transport and the run directory.

    Raises:
        ConfigError: ranks differ in a value that must be equal.
    """
    checked, env, agreement = member.checked, member.env, member.agreement
    config, run_dir = checked.config, checked.run_dir
    torch.set_num_threads(env.num_threads())
    with agreement.step("reading versions and options", must_match=True) as step:
        step.own = rank_fingerprint(config, checked.facts, checked.dtypes)
    with agreement.step("choosing its device") as step:
        device = choose_device("cpu" if checked.profile is not None else config.device, env)
        step.own = dataclasses.asdict(describe_device(device, host_id(), nccl=has_nccl()))
    devices = tuple(DeviceInfo(**answer) for answer in step.answers)
    transport = choose_transport(devices, config.transport)
    _log.info("activations by %s: %s", transport.name, transport.reason)
    with agreement.step("choosing the run directory") as step:
        step.own = {
            "path": str(run_dir.path),
            "attempt": run_dir.attempt,
            "replaces": run_dir.replaces,
            "prepares_grammars": checked.prepares_grammars,
        }
    first = step.answers[0]
    with agreement.step("making the run directory"):
        run_dir = run_dir.joining(
            Path(first["path"]), first["attempt"], own=config.run_dir is not None, replaces=first["replaces"]
        )
    return AgreedStart(device, devices, transport, run_dir, first["prepares_grammars"])


def load_stage(member: Member, start: AgreedStart) -> LoadedStage:
    """Choose kernels, and read this stage's weights.

    Raises:
        CapacityError: a host has no room for the weights of all its ranks.
    """
    checked, env, mesh, agreement = member.checked, member.env, member.mesh, member.agreement
    config, facts = checked.config, checked.facts
    with agreement.alike():
        split = partition(facts.num_layers, mesh.stages, config.layer_split)
    layers = split[member.coordinate.stage]
    dtype: torch.dtype = getattr(torch, checked.dtypes.compute)
    shards = open_shard_group(member.plane, config.peer_timeout_s, start.transport.name, start.device)
    with agreement.step("loading transformers and choosing kernels") as step:
        maker = _choose_maker(member, start, dtype, shards)
        step.own = {"captures": maker.captures}
    _share_captures(member, maker, step)
    with agreement.step("adding up weights") as step:
        step.own = Demand(maker.weight_bytes(layers), pools_of(start.device)).to_json()
    weights = _require_room(member, step, "weights", _fewer_weights(checked, start.device))
    with agreement.step("loading its layers", maker.reading) as loading:
        maker.load(layers, room_for(env.rank, weights))
        loading.own = {"head": maker.has_head}
    with agreement.step("counting KV pages") as counting:
        pages = maker.count_pages(layers, sharers_of(env.rank, weights))
        counting.own = {"pages": pages, "equal_decodes": maker.equal_decodes, "draws_ahead": maker.draws_ahead}
    return LoadedStage(
        maker=maker,
        split=split,
        layers=layers,
        dtype=dtype,
        shards=shards,
        num_pages=tuple(stage["pages"] for stage in counting.answers),
        equal_decodes=all(stage["equal_decodes"] for stage in counting.answers),
        draws_ahead=all(stage["draws_ahead"] for stage in counting.answers),
        moves_head=all(loading.answers[mesh.leader(replica)]["head"] for replica in range(mesh.replicas)),
    )


def agree_on_run(member: Member, loaded: LoadedStage) -> ResolvedRun:
    """Decide the options that the user left open, such as the number of KV pages.

    The user's own policy class takes part in this, and may decide differently on different ranks. So the results of all
    ranks are compared.

    Raises:
        ConfigError, CapacityError, PolicyError: the run cannot start.
    """
    checked, maker = member.checked, loaded.maker
    with member.agreement.step("resolving the run", must_match=True) as step:
        run = resolve(
            checked.config,
            checked.facts,
            loaded.split,
            loaded.num_pages,
            page_size=maker.page_size,
            dtype=checked.dtypes.compute,
            device=maker.device_name,
            attention=maker.attention,
            moves_head=loaded.moves_head,
            equal_decodes=loaded.equal_decodes,
            draws_ahead=loaded.draws_ahead,
        )
        step.own = {name: value for name, value in dataclasses.asdict(run).items() if name not in _RANKS_OWN}
    return run


def make_stage(
    member: Member, start: AgreedStart, loaded: LoadedStage, run: ResolvedRun
) -> tuple[Stage, tuple[tuple[int, int] | None, ...]]:
    """Make this rank's stage with its KV pages, and compute first microbatches, which compile kernels.

    Returns:
        The stage, and for each rank the `threads` of its stage.

    Raises:
        CapacityError: a host has no room for the KV pages of all its ranks.
    """
    maker, agreement = loaded.maker, member.agreement
    states = " and states" if member.checked.facts.has_states else ""
    pages = f"KV pages of {maker.page_size} tokens{states}"
    with agreement.step(f"adding up {pages}") as step:
        step.own = Demand(maker.shard_bytes(run, loaded.layers), pools_of(start.device)).to_json()
    _require_room(member, step, pages, _FEWER_PAGES)
    shards = loaded.shards
    # NCCL reads its environment when sums are captured, too.
    surroundings = nullcontext() if shards is None else member.plane.surrounded(start.transport.name)
    with agreement.step("making its stage") as step, surroundings:
        stage = maker.make(run, loaded.layers, loaded.dtype)
        step.own = {"graphed": stage.graphed is not None}
    if shards is not None:
        _share_graphs(member, stage, step)
    longest = run.max_model_len
    num_tokens, num_keys = min(run.chunk_size, longest, _WARM_UP_TOKENS), min(longest, _WARM_UP_KEYS)
    with agreement.step("compiling kernels and warming up") as step:
        stage.warm_up(num_tokens, num_keys)
        if start.prepares_grammars:
            stage.prepare_grammars()
        step.own = {"threads": stage.threads}
    return stage, tuple(answer["threads"] for answer in step.answers)


def load_tokenizer(member: Member) -> Tokenizer | None:
    """Load the model's tokenizer on the leader of each replica. Return None on other ranks.

    The library keeps the interpreter's lock while it reads, so the rank sends no heartbeats. After the set-up, that
    silence would have to be shorter than --peer-timeout.

    Raises:
        InputError, UnsafeError: the tokenizer cannot be loaded.
    """
    with member.agreement.step("loading the tokenizer"):
        tokenizer = member.checked.tokenizer() if member.coordinate.leads else None
    return tokenizer


def open_trace(member: Member, start: AgreedStart, loaded: LoadedStage, run: ResolvedRun) -> OpenTrace:
    """Start this rank's trace, in rank 0's directory or in this rank's own.

    If the directory is this rank's own, remove the traces of an earlier run from it. Rank 0 does this for its own.
    """
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
    """Open this rank's edges, and connect its stage to them.

    Raises:
        PeerLostError: another rank does not open its end of an edge.
    """
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
        keeps_states=facts.has_states,
    )
    upstream = over_link(wires.way_in, checked.profile, member.coordinate.stage, mesh.stages, clock)
    remotes = tuple(edges.open_byte_stream(rank) for rank in _other_leaders(member))
    return Pipeline(upstream, runner, remotes, tuple(edges.shared))


def _share_captures(member: Member, maker: StageMaker, step: Step) -> None:
    """Let a maker capture no CUDA graphs if another rank of its tensor-parallel stage cannot.

    Args:
        step: a step that has ended. Its answers have the key `captures`.
    """
    if maker.captures and not _all_in_stage(member, step, "captures"):
        _log.warning("no CUDA graphs, each microbatch is launched without one: another rank cannot capture")
        maker.captures = False


def _share_graphs(member: Member, stage: Stage, step: Step) -> None:
    """Drop the CUDA graphs of a tensor-parallel stage if a rank of it has none. Otherwise drop them before NCCL closes.

    A sum must be in a graph on all ranks of the stage or on none. NCCL closes a communicator only when no graph
    contains its sums, and waits until then.

    Args:
        step: a step that has ended. Its answers have the key `graphed`.
    """
    if stage.graphed is not None and not _all_in_stage(member, step, "graphed"):
        _log.warning("no CUDA graphs, each microbatch is launched without one: another rank of this stage has none")
        stage.drop_graphs()
        give_back()
    member.plane.resources.callback(stage.drop_graphs)


def _all_in_stage(member: Member, step: Step, name: str) -> bool:
    """Return whether all ranks of this rank's stage have answered True under this name in a step that has ended."""
    coordinate = member.coordinate
    return all(step.answers[rank][name] for rank in member.mesh.shard_ranks(coordinate.replica, coordinate.stage))


def _choose_maker(member: Member, start: AgreedStart, dtype: torch.dtype, shards: ShardGroup | None) -> StageMaker:
    """Return the maker of this rank's stage.

    Raises:
        ConfigError: the attention backend cannot run on this host, for example because its package is not installed.
    """
    checked, config = member.checked, member.checked.config
    moves = _may_move_head(member, start)
    if checked.profile is not None:
        return EmulatedStages(config, checked.profile, member.clock, moves_head=moves)
    # These modules import transformers. That takes seconds, and an emulated run does not need it.
    from sarathi_pp.model.tensor_parallel import TensorShard
    from sarathi_pp.stages.model_stage import ModelStages

    assert checked.model_dir is not None, "only emulated stages have no model"
    by_nccl = start.transport.name == "nccl"
    return ModelStages(
        config,
        checked.model_dir,
        checked.facts,
        dtype,
        start.device,
        TensorShard(shards.index, shards.size, shards.all_reduce, capturable=by_nccl) if shards is not None else None,
        moves_head=moves,
        by_nccl=by_nccl,
        dequantised=getattr(torch, checked.dtypes.weights),
        coded=checked.dtypes.coded,
    )


def _fewer_weights(checked: Preflight, device: torch.device) -> str:
    """Return advice to the user if the weights are too large."""
    if device.type == "cuda" and can_stay_coded(checked.facts.quantised) and not checked.dtypes.coded:
        return f"--weights stored, {_FEWER_WEIGHTS}"
    return _FEWER_WEIGHTS


def _may_move_head(member: Member, start: AgreedStart) -> bool:
    """Return whether the first stage may compute LM heads, as far as it is known before it has loaded one."""
    mesh, profile, head = member.mesh, member.checked.profile, member.checked.config.head
    if profile is not None:
        return moves_head(head, profile.device, mesh.stages, profile.tensor_parallel_size)
    # Measured times decide which stage computes an LM head. If the first and the last stage computed different last
    # bits, the logits would depend on these times.
    alike = len({device_info.arithmetic for device_info in start.devices}) == 1
    return moves_head(head, "cpu" if start.on_cpu else "cuda", mesh.stages, mesh.shards) and alike


def _require_room(member: Member, step: Step, what: str, remedy: str) -> Sequence[Demand]:
    """Return the memory that each rank needs of its device, if there is room for all of them together.

    Args:
        step: a step that has ended. Its answers are the demands of all ranks.
        what: the contents of the memory, for the message of the error.
        remedy: advice to the user, for the message of the error.

    Raises:
        CapacityError: a host has not enough memory.
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
        prefix_cache=run.prefix_cache,
        issues_ahead=run.issues_ahead,
    )


def _may_share(member: Member, start: AgreedStart, run: ResolvedRun) -> bool:
    """Return whether two ranks of a host may share memory for an edge between them. Its data must be on CPU.

    An edge with very many buffers cannot be in shared memory, see MAX_SLOTS.
    """
    by_gloo = start.transport.name == "gloo" and member.checked.config.transport == "auto"
    return by_gloo and start.on_cpu and edge_buffers(run.most_inflight) <= MAX_SLOTS


def _loss_listener(member: Member) -> LossListener:
    """Return the listener that this rank's edges call if the rank at their other end is lost.

    It ends the process, except on rank 0 of several replicas: the loss of one of them does not end rank 0. Rank 0's
    next read or write on that edge raises an error instead.
    """
    return IgnoreLosses() if member.mesh.replicas > 1 and member.env.rank == 0 else member.watchdog


def _timer(start: AgreedStart, clock: Clock) -> Timer:
    return CudaTimer(clock) if start.device.type == "cuda" else HostTimer(clock)


def _other_leaders(member: Member) -> list[int]:
    """Return the ranks with which this rank exchanges requests and answers.

    Rank 0 exchanges them with the leaders (first ranks) of the other replicas, in order, and each of these with rank 0.
    Every other rank gets an empty list.
    """
    mesh = member.mesh
    if not member.coordinate.leads or mesh.replicas == 1:
        return []
    return [0] if member.env.rank else [mesh.leader(replica) for replica in range(1, mesh.replicas)]
