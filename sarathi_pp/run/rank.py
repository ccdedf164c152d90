"""One rank of a run. Rank 0 answers input lines, the other ranks compute for it. At the end, rank 0 gets all traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from sarathi_pp.checkpoint.facts.layer_cache import state_bytes
from sarathi_pp.config import ResolvedRun
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.cost.repartition import repartition
from sarathi_pp.core.head_placement import HeadPlacement
from sarathi_pp.core.load_balancer import most_held, most_held_tokens
from sarathi_pp.core.policy import Limits, parse_policy
from sarathi_pp.core.prefix_order import ROWS_OF_WINDOW, PrefixOrder
from sarathi_pp.core.prefix_routes import PrefixRoutes
from sarathi_pp.distributed.clock_sync import sync_clocks
from sarathi_pp.distributed.fingerprint import software
from sarathi_pp.engine.dispatcher import Dispatcher
from sarathi_pp.engine.engine import Engine
from sarathi_pp.engine.progress import ReplicaProgress, RunListener, Warner
from sarathi_pp.engine.replica import AbortedError, RemoteSink, RemoteSource
from sarathi_pp.errors import MissingError, PeerLostError, SarathiError
from sarathi_pp.inputs.prompt_limits import PromptLimits
from sarathi_pp.inputs.request_maker import RequestMaker
from sarathi_pp.inputs.unknown_tokens import UnknownTokens
from sarathi_pp.outputs.profile_file import read_profile
from sarathi_pp.run.auto_options import estimated_cost
from sarathi_pp.run.collect_traces import gather
from sarathi_pp.run.finished_run import FinishedRun
from sarathi_pp.run.setup import (
    AgreedStart,
    LoadedStage,
    Member,
    OpenTrace,
    Pipeline,
    agree_on_run,
    load_stage,
    load_tokenizer,
    make_stage,
    open_pipeline,
    open_trace,
)
from sarathi_pp.stages.capacity import kv_cache_bytes, limits_of, state_pages
from sarathi_pp.stages.stage import Stage
from sarathi_pp.text.tokenizer import Tokenizer
from sarathi_pp.trace.events import TraceEnd
from sarathi_pp.wire.mesh import Coordinate

Driver = Engine | Dispatcher


class Rank:
    """One rank, made of finished parts (see setup.py).

    Use `driving` on rank 0 and `serve` on every other rank, and then `finish`.
    """

    def __init__(
        self,
        member: Member,
        start: AgreedStart,
        loaded: LoadedStage,
        run: ResolvedRun,
        stage: Stage,
        tokenizer: Tokenizer | None,
        trace: OpenTrace,
        pipeline: Pipeline,
        threads: Sequence[tuple[int, int] | None],
    ) -> None:
        self.run = run
        self.checked = member.checked
        self.env = member.env
        self.coordinate = member.coordinate
        self.device = start.device
        self._member = member
        self._start = start
        self._loaded = loaded
        self._stage = stage
        self._tokenizer = tokenizer
        self._trace = trace
        self._pipeline = pipeline
        self._threads = threads
        self._dispatcher: Dispatcher | None = None
        self._lost: dict[int, SarathiError] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Only the leaders of replicas have it."""
        assert self._tokenizer is not None, "this rank leads no replica"
        return self._tokenizer

    @property
    def _limits(self) -> Limits:
        return limits_of(self.run, self.checked.facts)

    @contextmanager
    def driving(self, listener: RunListener) -> Iterator[Driver]:
        """Yield the driver that answers input lines, on rank 0. After the block, end all stages.

        After an error in the block, the watchdog does nothing more. This thread ends the run itself, however long its
        last writes take.
        """
        try:
            driver = self.driver(listener)
            yield driver
            driver.close()
        except BaseException:
            self._member.watchdog.dismiss()
            raise

    def driver(self, listener: RunListener) -> Driver:
        """Return rank 0's driver: the engine of the only pipeline, or the dispatcher of several replicas."""
        mesh = self._member.mesh
        if mesh.replicas == 1:
            return self._engine(listener)
        progress = ReplicaProgress(mesh.replicas, mesh.stages, listener)
        self._dispatcher = Dispatcher(
            self._engine(progress.of_replica(0)),
            self._pipeline.remotes,
            most_held(self.run.max_num_seqs),
            most_held_tokens(self.run.num_pages * self.run.page_size),
            progress,
            self._member.clock,
            PrefixRoutes.of(self._limits),
        )
        return self._dispatcher

    def request_maker(self, console: Warner) -> RequestMaker:
        """Return the maker of requests from input lines. Warn if the KV cache is small, or outputs may not end."""
        checked, run, tokenizer = self.checked, self.run, self.tokenizer
        limits = PromptLimits(run.max_model_len, run.num_pages, run.page_size, checked.facts.vocab_size)
        for doubt in (limits.small_kv_cache(), tokenizer.end_token_doubt(checked.defaults.source)):
            if doubt is not None:
                console.warn(doubt)
        paragraphs = parse_policy(run.policy).kind.wants_paragraphs
        unknown = UnknownTokens(tokenizer.unknown_id)
        variables = checked.config.default_chat_template_kwargs
        return RequestMaker(tokenizer, checked.defaults, limits, run.seed, paragraphs, unknown, variables)

    def prefix_order(self) -> PrefixOrder | None:
        """Return the order of the requests of an input that is known in advance; None for that of the input."""
        config = self.checked.config
        if config.order == "input" or (config.order == "auto" and self.run.prefix_cache == "off"):
            return None
        return PrefixOrder(self._limits, config.order_window or ROWS_OF_WINDOW)

    def serve(self) -> None:
        """Run microbatches until rank 0 says goodbye, its last message. Call it on every rank except rank 0.

        The leader (first rank) of another replica drives that replica instead.
        """
        if self.coordinate.leads:
            self._lead()
        else:
            self._pipeline.runner.serve(self._pipeline.upstream)

    def _lead(self) -> None:
        """On the leader of another replica, answer the requests that rank 0 sends."""
        (rank0,) = self._pipeline.remotes
        source = RemoteSource(rank0.incoming, self._member.clock, self._trace.offset.offset_s)
        sink = RemoteSink(rank0.outgoing)
        engine = self._engine(sink)
        aborted = True
        while aborted:
            try:
                engine.run(source, sink, source)
                aborted = False
            except AbortedError:
                pass
        engine.close()
        sink.close()

    def _engine(self, listener: RunListener) -> Engine:
        """Return the engine of this leader's pipeline, which reports its progress to the listener."""
        run = self.run
        policy = parse_policy(run.policy)
        return Engine(
            self._limits,
            policy.make(),
            self._pipeline.runner,
            self._pipeline.upstream,
            self._trace.recorder,
            self._member.clock,
            eos_token_ids=self.checked.defaults.eos_token_ids,
            stop_checkers=self.tokenizer.stop_checker,
            listener=listener,
            cost=self._known_cost() if policy.kind.wants_cost else None,
            heads=HeadPlacement(self._known_cost()) if run.moves_head else None,
        )

    def _known_cost(self) -> CostModel:
        """Return the cost model of the stages before they run: from a profile, or estimated from config.json."""
        checked, run = self.checked, self.run
        profile = checked.profile
        if profile is None and checked.config.profile is not None:
            profile = read_profile(checked.config.profile)
        if profile is not None:
            return repartition(profile.cost, run.layers)
        assert checked.model_dir is not None, "stages without a model have a profile"
        return estimated_cost(
            checked.model_dir,
            checked.facts,
            run.layers,
            dtypes=checked.dtypes,
            device=self.device.type,
            page_size=run.page_size,
            kv_cache_dtype=run.kv_cache_dtype,
            shards=run.tensor_parallel_size,
        )

    def describe(self) -> dict[str, Any]:
        """Return the contents of run.json."""
        plane = self._member.plane
        found = {
            "hosts": [plane.hosts[rank] for rank in plane.mesh.ranks],
            "transport": self._start.transport.name,
            "shared_memory_edges": self._pipeline.shared_edges,
            "threads": self._threads,
            **self._memory(),
        }
        checked = self.checked
        model = {
            "weights": checked.config.weights,
            "weights_dtype": checked.dtypes.weights,
            "products": self._loaded.maker.products,
            **({"state_backend": self._loaded.maker.state_backend} if checked.facts.has_states else {}),
            "quantised": checked.facts.quantised,
            "fingerprint": checked.facts.fingerprint,
        }
        return {**dataclasses.asdict(self.run), **found, **software(), **model}

    def finish(self, facts: Mapping[str, Any] | None = None) -> FinishedRun | None:
        """Close this rank's trace, and bring all traces to rank 0.

        Args:
            facts: on rank 0, contents of the report that no trace holds.

        Returns:
            The finished run on rank 0, None on other ranks.

        Raises:
            PeerLostError: no replica is left.
        """
        member, run_dir = self._member, self._start.run_dir
        member.watchdog.dismiss()
        if self._dispatcher is not None:
            self._lost.update(self._dispatcher.lost)
        self._end_trace()
        may_lose = member.mesh.replicas > 1
        collected = gather(member.plane, run_dir, self._present(), sends=self._trace.sends, may_lose=may_lose)
        self._lost.update(collected.lost)
        if self.env.rank != 0:
            return None
        for replica in self._lost:
            run_dir.forget(replica)
        if not collected.traces:
            raise PeerLostError("no replica is left: " + "; ".join(map(str, self._lost.values())))
        return FinishedRun(collected.traces, {**self._report_facts(), **(facts or {})}, run_dir, dict(self._lost))

    def run_so_far(self) -> FinishedRun:
        """On rank 0, return the traces that the ranks have written so far, for a report before the end of the run.

        Raises:
            MissingError: a rank writes its trace on another host, and sends it only at the end.
        """
        mesh, hosts = self._member.mesh, self._member.plane.hosts
        lost = dict(self._dispatcher.lost) if self._dispatcher is not None else {}
        traces = []
        for replica in (one for one in range(mesh.replicas) if one not in lost):
            coordinates = [Coordinate(replica, stage, 0) for stage in range(mesh.stages)]
            traces.append([self._start.run_dir.trace_path(mesh, each) for each in coordinates])
            for path, each in zip(traces[-1], coordinates, strict=True):
                if not path.exists():
                    host = hosts[mesh.rank(*each)]
                    raise MissingError(
                        f"the trace of {mesh.title(mesh.rank(*each))} is on {host} until the run ends; close() returns "
                        f"the report"
                    )
        return FinishedRun(traces, self._report_facts(), self._start.run_dir, lost)

    def _end_trace(self) -> None:
        """Measure this rank's clock offset again, record the end of the run, and close the trace."""
        member, stage, recorder = self._member, self._stage, self._trace.recorder
        sync = sync_clocks(member.plane, member.clock, self._present(), may_lose=member.mesh.replicas > 1)
        offset = sync.offset
        self._lost.update(sync.lost)
        graphs = stage.graphed
        recorder.record(
            TraceEnd(
                at_s=member.clock.now(),
                clock_offset_s=0.0 if self.coordinate.leads else offset.offset_s,
                clock_uncertainty_s=offset.uncertainty_s,
                peak_rss_bytes=_peak_rss_bytes(),
                bytes_read=stage.bytes_read,
                graph_hits=graphs[0] if graphs else None,
                graph_misses=graphs[1] if graphs else None,
            )
        )
        recorder.close()

    def _present(self) -> list[int]:
        """Return the indexes of the replicas that are not lost."""
        return [replica for replica in range(self._member.mesh.replicas) if replica not in self._lost]

    def abandon(self) -> None:
        """End this rank's part after an error: dismiss the watchdog, and close the trace with its events so far."""
        self._member.watchdog.dismiss()
        self._trace.abandon()

    def _report_facts(self) -> dict[str, Any]:
        run, shards = self.run, self._member.mesh.shards
        return {
            "model": run.model,
            "dtype": run.dtype,
            "kv_cache_dtype": run.kv_cache_dtype,
            "attention": run.attention,
            "max_num_seqs": run.max_num_seqs,
            "max_model_len": run.max_model_len,
            "request_rate": run.request_rate,
            **({"tensor_parallel_size": shards} if shards > 1 else {}),
            **self._memory(),
        }

    def _memory(self) -> dict[str, float | None]:
        """Return the memory figures of the report.

        Returns:
            kv_cache_bytes: bytes of the KV cache on the rank that holds most; None if stages are emulated and hold
                nothing.
            max_pages: number of KV pages for which every rank has room.
            state_bytes_per_sequence: bytes of a sequence's states in all layers; 0 if stages are emulated, and
                left out if no layer keeps one.
            state_pages_per_sequence: KV pages that take as much memory as these, on the stage where they are most;
                None if a stage has states and no pages, and left out if no layer keeps a state.
        """
        checked, dtype, held = self.checked, self._loaded.dtype, None
        if checked.profile is None:
            held = kv_cache_bytes(self.run, checked.facts.sharded(self._member.mesh.shards), dtype)
        found: dict[str, float | None] = {"kv_cache_bytes": held, "max_pages": min(self._loaded.num_pages)}
        if checked.facts.has_states:
            found["state_bytes_per_sequence"] = state_bytes(checked.facts.caches, dtype.itemsize)
            found["state_pages_per_sequence"] = state_pages(self.run, checked.facts, dtype)
        return found


def set_up(member: Member, start: AgreedStart) -> Rank:
    """Make this rank: load its layers, and open its edges, the connections to other ranks.

    If a rank has an error in one of the common steps (Agreement), all ranks raise it.
    """
    loaded = load_stage(member, start)
    run = agree_on_run(member, loaded)
    stage, threads = make_stage(member, start, loaded, run)
    tokenizer = load_tokenizer(member)
    trace = open_trace(member, start, loaded, run)
    try:
        pipeline = open_pipeline(member, start, loaded, run, stage, trace)
        member.plane.end_set_up()
    except BaseException:
        trace.abandon()
        raise
    return Rank(member, start, loaded, run, stage, tokenizer, trace, pipeline, threads)


def _peak_rss_bytes() -> int:
    """Return the largest resident memory so far of this process, in bytes; 0 without /proc.

    getrusage is not used, because its peak includes the program that the process ran before an exec.
    """
    with suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
