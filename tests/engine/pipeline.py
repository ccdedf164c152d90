"""A whole pipeline in one process: the runtime's own stages, runners and engine, one thread per stage.

Only the wire is replaced, by the in-process channel, whose frames pass through the same codec.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

import torch

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.config import PrefixCacheMode
from sarathi_pp.core.cost.model import CostModel
from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.core.partition import partition
from sarathi_pp.core.plan import TokenLogprobs
from sarathi_pp.core.policy import make_policy
from sarathi_pp.core.policy.view import Limits
from sarathi_pp.core.prompt_logprobs import PromptLogprobs
from sarathi_pp.core.request import Request
from sarathi_pp.drawing.grammar import GrammarThread
from sarathi_pp.engine.engine import Engine
from sarathi_pp.inputs.row import Row
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.kv import KVShard, page_dtype
from sarathi_pp.model.loader import load_lm_head, load_stage
from sarathi_pp.model.stage_model import LMHead
from sarathi_pp.model.tensor_parallel import TensorShard
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.stages.model_stage import ModelStage
from sarathi_pp.stages.runner import StageRunner
from sarathi_pp.stages.tokenizer_files import TokenizerFiles
from sarathi_pp.trace.clock import Clock, SystemClock
from sarathi_pp.trace.timer import HostTimer, Timer
from sarathi_pp.wire.channel import NoSender, QueueChannel
from tests.engine.thread_group import shard_groups
from tests.machine import patient

CPU = torch.device("cpu")


@cache
def stage_models(
    directory: Path,
    num_stages: int,
    dtype: torch.dtype = torch.float32,
    layer_split: tuple[int, ...] | None = None,
):
    facts = check_model(directory)
    return facts, [  # one backend per stage: it owns scratch memory, and stages run at the same time
        load_stage(directory, layers, facts.num_layers, dtype, CPU, choose_backend("auto", CPU, None))
        for layers in partition(facts.num_layers, num_stages, layer_split)
    ]


@cache
def sharded_models(directory: Path, num_stages: int):
    """Return the models of two shards of each stage, by shard, and the group of each, by stage."""
    facts = check_model(directory)
    groups, chains = [shard_groups() for _ in range(num_stages)], []
    for shard in range(2):
        chain = []
        for group, layers in zip(groups, partition(facts.num_layers, num_stages, None), strict=True):
            attention, part = choose_backend("auto", CPU, None), TensorShard(shard, 2, group[shard].all_reduce)
            chain.append(load_stage(directory, layers, facts.num_layers, torch.float32, CPU, attention, shard=part))
        chains.append(chain)
    return chains, groups


@cache
def head_of(directory: Path, dtype: torch.dtype) -> LMHead:
    return load_lm_head(directory, dtype, CPU)


class InTurn:
    """A HeadPlacement that ignores times."""

    def __init__(self):
        self._last = False

    def choose(self, microbatch):
        if microbatch.num_drawn:
            self._last = not self._last
        return microbatch.num_drawn > 0 and not self._last and not microbatch.scores

    def observe(self, microbatch, times, head_s):
        pass

    def restart(self, inflight):
        pass


class ListRecorder:
    """Recorder that keeps events in memory."""

    def __init__(self, events=None):
        self.events = [] if events is None else events

    def record(self, event):
        self.events.append(event() if callable(event) else event)

    def close(self):
        pass


class ListSource:
    """Rows that arrive a few at a time: `per_take` at each look, all at once by default."""

    def __init__(self, rows, per_take=None):
        self._rows = list(rows)
        self._per_take = per_take

    @property
    def exhausted(self):
        return not self._rows

    def take(self, limit):
        count = min(limit, self._per_take or limit)
        taken, self._rows = self._rows[:count], self._rows[count:]
        return taken

    def wait(self, timeout_s):
        pass

    def close(self):
        pass


@dataclass
class ListSink:
    completions: dict = field(default_factory=dict)
    errors: dict = field(default_factory=dict)

    def finish(self, row, completion, metrics):
        assert row.id not in self.completions
        self.completions[row.id] = completion

    def fail(self, row, error):
        self.errors[row.id] = error

    def close(self):
        pass


@dataclass
class Outcome:
    tokens: list[tuple[int, ...]]
    reasons: list[str]
    logprobs: list[tuple[TokenLogprobs, ...] | None]
    prompt_logprobs: list[PromptLogprobs | None]
    cached_tokens: list[int]
    num_preemptions: int
    events: list[list]


def run_pipeline(
    directory: Path,
    prompts,
    *,
    stages: int,
    policy: str = "sarathi",
    chunk_size: int = 16,
    max_new_tokens: int = 8,
    max_num_seqs: int = 24,
    num_pages: int = 512,
    page_size: int = 4,
    max_model_len: int = 512,
    eos_token_ids=(),
    per_take: int | None = None,
    sampling: list[SamplingParams] | None = None,
    rules: Sequence[DrawRules | None] | None = None,
    paragraph_ends: list[tuple[int, ...]] | None = None,
    dtype: torch.dtype = torch.float32,
    layer_split: tuple[int, ...] | None = None,
    inflight: int | None = None,
    new_timer: Callable[[Clock], Timer] = HostTimer,
    cost: CostModel | None = None,
    moves_head: bool = True,
    two_shards: bool = False,
    ahead: bool = False,
    prefix_cache: PrefixCacheMode = "off",
    kv_cache_dtype: str = "auto",
) -> Outcome:
    """Run a pipeline.

    Args:
        moves_head: the first stage computes every other head instead of the last stage.
        ahead: decodes are issued before their tokens are known. It takes one stage.
        two_shards: each stage is two tensor shards, in float32. No head moves.
    """
    facts, models = stage_models(directory, stages, dtype, layer_split)
    inflight = inflight or stages
    clock = SystemClock()
    sizes = stages, chunk_size, max_num_seqs, max_model_len, page_size, num_pages, inflight
    num_slots = max_num_seqs if facts.has_states else 0
    limits = Limits(*sizes, facts.longrope_after, prefix_cache, num_slots=num_slots, issues_ahead=ahead)
    recorders = [ListRecorder() for _ in range(stages)]
    moves_head = moves_head and stages > 1 and not two_shards
    facts = facts.sharded(2 if two_shards else 1)
    chains, groups = sharded_models(directory, stages) if two_shards else ([models], [[None]] * stages)
    edges = [[QueueChannel(clock, inflight + 1) for _ in chain] for chain in chains]
    headers = [QueueChannel(clock, inflight + 1) for _ in chains[1:]]  # from the leader to its other shards
    runners = {}
    for (shard, chain), index in product(enumerate(chains), range(stages)):
        layers, pages = chain[index].layers, page_dtype(kv_cache_dtype, dtype)
        kv = KVShard(layers, num_pages, page_size, facts.caches, dtype, CPU, pages=pages, num_slots=num_slots)
        head = head_of(directory, dtype) if moves_head and index == 0 else None
        grammars = GrammarThread(TokenizerFiles(directory))
        stage = ModelStage(chain[index], kv, facts.hidden_size, dtype, CPU, head, grammars=grammars, ahead=ahead)
        way_out = NoSender() if shard and index == stages - 1 else edges[shard][index]
        recorder, others = ListRecorder() if shard else recorders[index], () if shard or index else headers
        runners[shard, index] = StageRunner(
            stage,
            way_out,
            recorder,
            clock,
            new_timer(clock),
            shards=others,
            shard_group=groups[index][shard],
            keeps_states=facts.has_states,
        )
    errors: list[BaseException] = []

    def serve(shard: int, index: int) -> None:
        try:
            runners[shard, index].serve(edges[shard][index - 1] if index else headers[shard - 1])
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=serve, args=place, daemon=True) for place in runners if place != (0, 0)]
    for thread in threads:
        thread.start()
    engine = Engine(
        limits,
        make_policy(policy),
        runners[0, 0],
        edges[0][-1],
        recorders[0],
        clock,
        eos_token_ids=eos_token_ids,
        stop_checkers=lambda stop: None,
        cost=cost,
        heads=InTurn() if moves_head else None,
    )
    params = sampling or [SamplingParams(max_new_tokens=max_new_tokens, seed=0)] * len(prompts)
    ends = paragraph_ends or [()] * len(prompts)
    rows = [
        Row(
            index + 1,
            index,
            "own",
            Request(index, tuple(prompt), params[index], clock.now(), ends[index], rules[index] if rules else None),
        )
        for index, prompt in enumerate(prompts)
    ]
    sink = ListSink()
    engine.run(ListSource(rows, per_take), sink)
    engine.close()
    for thread in threads:
        thread.join(patient(10))
        assert not thread.is_alive(), f"{thread.name} did not end with the goodbye"
    assert not errors and not sink.errors, (errors, sink.errors)
    coordinator = engine._coordinator
    assert coordinator.pool.num_free == num_pages and coordinator._slots.num_free == num_slots
    ordered = [sink.completions[index] for index in range(len(prompts))]
    return Outcome(
        [completion.token_ids for completion in ordered],
        [completion.finish_reason for completion in ordered],
        [completion.logprobs for completion in ordered],
        [completion.prompt_logprobs for completion in ordered],
        [completion.cached_tokens for completion in ordered],
        coordinator.num_preemptions,
        [recorder.events for recorder in recorders],
    )
