"""Count the KV pages that each stage can hold, and fill in the open options of a run from that count.

This happens before any request runs. A stage's KV pages together are its KV shard: its part of the KV cache. If layers
keep states, the shard has a state slot for each sequence that may run at once too, and these come first:

    budget    [ states of max_num_seqs sequences | page | page | page | ... ]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from sarathi_pp.checkpoint.facts.layer_cache import state_bytes
from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.config import PrefixCacheMode, ResolvedRun, RunConfig
from sarathi_pp.core.pages import most_idle_pages
from sarathi_pp.core.policy import Limits, parse_policy
from sarathi_pp.errors import CapacityError
from sarathi_pp.model.kv import KVShard, page_bytes, page_dtype
from sarathi_pp.model.memory import in_gib, is_out_of_memory
from sarathi_pp.process.host import MemoryPool, host_id, memory_pools

# Default of --max-num-seqs, per stage.
_SEQS_PER_STAGE = 64
# Most bytes of states per stage with the default of --max-num-seqs.
_MOST_STATE_BYTES = 2 << 30
# On a CPU, the default size of the KV cache is this share of the free memory, at most _CPU_MOST_BYTES. The other
# memory is left to other programs.
_CPU_SHARE = 0.4
_CPU_MOST_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one rank's device: a device of this host, or one that the user describes.

    Attributes:
        kind: cpu or cuda.
        pools: memory pools, such as the host's memory or the limit of a cgroup. The rank's weights and KV pages must
            fit into each of them.
        total_bytes: memory of a GPU, used or free; 0 for a CPU.
    """

    kind: str
    pools: tuple[MemoryPool, ...]
    total_bytes: int = 0

    @classmethod
    def of(cls, device: torch.device) -> DeviceMemory:
        """Read the memory that is free now on a device of this host."""
        if device.type != "cuda":
            return cls(device.type, memory_pools())
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        free, total = torch.cuda.mem_get_info(device)
        return cls(device.type, (MemoryPool(f"{host_id()} {gpu}", f"the memory of GPU {gpu}", int(free)),), int(total))

    def kept_bytes(self, config: RunConfig) -> int:
        """Return the bytes that a run leaves free on a GPU; 0 on a CPU, or if the user sets the KV cache's size."""
        if self.kind != "cuda" or config.kv_cache_memory_bytes is not None:
            return 0
        return math.ceil(self.total_bytes * (1 - config.gpu_memory_utilization))


def pools_of(device: torch.device) -> tuple[MemoryPool, ...]:
    """Return the memory pools from which a stage on this device takes its weights and its KV shard."""
    return DeviceMemory.of(device).pools


def kv_budget_bytes(config: RunConfig, memory: DeviceMemory, sharers: Mapping[str, int], working_bytes: int = 0) -> int:
    """Return the bytes that a stage may use for its KV shard, after its weights are loaded.

    Args:
        memory: the device's memory after all ranks have loaded their weights.
        sharers: number of ranks that draw on each of this device's pools, by the pool's id. A pool that is missing
            here is used by one rank.
        working_bytes: memory that a stage on a GPU needs besides weights and KV pages. See working_memory.py.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if memory.kind == "cuda":
        (pool,) = memory.pools
        return max(0, (pool.free_bytes - memory.kept_bytes(config)) // sharers.get(pool.id, 1) - working_bytes)
    budgets = (int(pool.free_bytes * _CPU_SHARE) // sharers.get(pool.id, 1) for pool in memory.pools)
    return min(_CPU_MOST_BYTES, *budgets)


def room_bytes(device: torch.device) -> int:
    """Return the bytes that are free now on a device: those of its tightest pool.

    Other ranks may draw on the same pools. The result is not divided among them, because each needs a different part.
    """
    return min(pool.free_bytes for pool in pools_of(device))


def make_shard(
    run: ResolvedRun,
    facts: ModelFacts,
    layers: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    spare: bool = False,
) -> KVShard:
    """Allocate the stage's KV shard.

    On a CPU, memory is taken only when pages and slots are written, so allocating more than there is may not fail. So
    this function compares the needed bytes with the free ones. On a GPU, allocating too much fails at once.

    Args:
        layers: the stage's layers [first, end).
        spare: see KVShard.

    Raises:
        CapacityError: there is no room for the shard.
    """
    needed, room = shard_bytes(run, facts, layers, dtype), room_bytes(device)
    try:
        if needed <= room or device.type != "cpu":
            slots = _num_slots(facts, run.max_num_seqs)
            return KVShard(
                layers,
                run.num_pages,
                run.page_size,
                facts.caches,
                dtype,
                device,
                pages=page_dtype(run.kv_cache_dtype, dtype),
                num_slots=slots,
                spare=spare,
            )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    states = f"the states of {run.max_num_seqs} sequences and " if facts.has_states else ""
    raise CapacityError(
        f"layers [{layers[0]}, {layers[1]}) need {in_gib(needed)} for {states}{run.num_pages} KV pages of "
        f"{run.page_size} tokens, and {in_gib(room)} are available\n  try  --kv-cache-memory {max(room >> 20, 1)}MiB "
        f"or less, more --stages, or a smaller --max-num-seqs or --max-model-len"
    )


def count_pages(
    budget_bytes: int,
    facts: ModelFacts,
    layers: tuple[int, int],
    limits: Limits,
    dtype: torch.dtype,
    kv_cache_dtype: str = "auto",
) -> int:
    """Return the number of KV pages of the layers [first, end) that fit the budget, next to their states.

    Args:
        limits: those of the run before pages are counted (`resolve_limits`). If no layer has pages, the result is
            their number of pages, the most that a run can use.
        dtype: float type of the computation.
        kv_cache_dtype: see RunConfig.

    Raises:
        CapacityError: the states do not fit, or not even one page fits.
    """
    caches, page_size = facts.caches[slice(*layers)], limits.page_size
    one = page_bytes(caches, page_size, page_dtype(kv_cache_dtype, dtype))
    states = limits.num_slots * state_bytes(caches, dtype.itemsize)
    if states and budget_bytes < one + states:
        page = f" and {one} for one KV page of {page_size} tokens" if one else ""
        raise CapacityError(
            f"layers [{layers[0]}, {layers[1]}) need {states} bytes for the states of {limits.num_slots} "
            f"sequences{page}, and {budget_bytes} are available.\n  try  --max-num-seqs "
            f"{max((budget_bytes - one) * limits.num_slots // states, 1)} or less, or a larger --kv-cache-memory"
        )
    if not one:
        return limits.num_pages
    if budget_bytes < one:
        raise CapacityError(
            f"layers [{layers[0]}, {layers[1]}) need {one} bytes for one KV page of {page_size} tokens, and "
            f"{budget_bytes} are available.\n  try  a larger --kv-cache-memory, more --stages, or a smaller --page-size"
        )
    return (budget_bytes - states) // one


def shard_bytes(run: ResolvedRun, facts: ModelFacts, layers: tuple[int, int], dtype: torch.dtype) -> int:
    """Return the bytes of the KV shard of a stage with the layers [first, end): all its pages and states."""
    states = stage_state_bytes(facts, layers, run.max_num_seqs, dtype)
    stored = page_dtype(run.kv_cache_dtype, dtype)
    return run.num_pages * page_bytes(facts.caches[slice(*layers)], run.page_size, stored) + states


def stage_state_bytes(facts: ModelFacts, layers: tuple[int, int], num_seqs: int, dtype: torch.dtype) -> int:
    """Return the bytes of the states that the layers [first, end) keep; 0 if they keep none.

    Args:
        num_seqs: number of sequences that may run at once.
        dtype: float type of the computation.
    """
    return num_seqs * state_bytes(facts.caches[slice(*layers)], dtype.itemsize)


def state_pages(run: ResolvedRun, facts: ModelFacts, dtype: torch.dtype) -> float | None:
    """Return the KV pages that take as much memory as one sequence's states, on the stage where they are most.

    None if a stage has states and no KV pages, since pages say nothing about the memory that is left there.
    """
    stages = [facts.caches[slice(*layers)] for layers in run.layers]
    pages = [page_bytes(caches, run.page_size, page_dtype(run.kv_cache_dtype, dtype)) for caches in stages]
    states = [state_bytes(caches, dtype.itemsize) for caches in stages]
    of_pages = [(each, size) for each, size in zip(states, pages, strict=True) if each or size]
    if not all(size for _, size in of_pages):
        return None
    return max(each / size for each, size in of_pages)


def kv_cache_bytes(run: ResolvedRun, facts: ModelFacts, dtype: torch.dtype) -> int:
    """Return the bytes of the largest KV shard of a stage."""
    return max(shard_bytes(run, facts, layers, dtype) for layers in run.layers)


def resolve(
    config: RunConfig,
    facts: ModelFacts,
    layers: tuple[tuple[int, int], ...],
    pages: Sequence[int],
    *,
    page_size: int,
    dtype: str,
    device: str,
    attention: str,
    moves_head: bool = False,
    equal_decodes: bool = False,
    draws_ahead: bool = False,
) -> ResolvedRun:
    """Return the resolved run: the user's options, with a value for each option that was left open.

    The result depends on the arguments alone, so it is the same on every rank.

    Args:
        layers: [first, end) of each stage.
        pages: number of KV pages that each stage can hold. The run uses the smallest.
        moves_head: see ResolvedRun.
        equal_decodes: see StageMaker, of all stages.
        draws_ahead: the same.

    Raises:
        ConfigError: --max-model-len is larger than the number of positions that the model supports.
    """
    limits = resolve_limits(config, facts, len(layers), pages, page_size, equal_decodes=equal_decodes)
    return ResolvedRun(
        model=config.model,
        policy=config.policy,
        layers=layers,
        chunk_size=limits.chunk_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        max_microbatch_tokens=parse_policy(config.policy).max_tokens(limits),
        page_size=page_size,
        num_pages=limits.num_pages,
        inflight=limits.inflight,
        dtype=dtype,
        kv_cache_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        device=device,
        attention=attention,
        seed=config.seed,
        peer_timeout_s=config.peer_timeout_s,
        request_rate=config.request_rate if math.isfinite(config.request_rate) else None,
        replicas=config.replicas,
        tensor_parallel_size=config.tensor_parallel_size,
        moves_head=moves_head,
        prefix_cache=limits.prefix_cache,
        # Not if the user has chosen the number of microbatches in flight. The ranks of a sharded stage do not draw.
        issues_ahead=draws_ahead and config.inflight is None and len(layers) == config.tensor_parallel_size == 1,
    )


def resolve_limits(
    config: RunConfig,
    facts: ModelFacts,
    num_stages: int,
    pages: Sequence[int],
    page_size: int,
    *,
    equal_decodes: bool = False,
) -> Limits:
    """Return the limits that scheduling needs, before the run is resolved. Raise the same errors as `resolve`.

    Args:
        pages: number of KV pages that each stage can hold. Empty if they are not counted yet. Then the result has
            pages for all sequences that may run at once. The later run has at most as many pages, so its microbatches
            are not larger than these limits allow.
        equal_decodes: see StageMaker, of all stages.
    """
    policy = parse_policy(config.policy)
    max_model_len = facts.max_model_len(config.max_model_len)
    max_num_seqs = config.max_num_seqs or _default_seqs(facts, num_stages)
    useful = max_num_seqs * -(-max_model_len // page_size)
    num_pages = min(*pages, useful) if pages else useful
    return Limits(
        num_stages=num_stages,
        # Every computed token needs a place in a page, so no microbatch has more tokens than all pages have places.
        chunk_size=min(config.chunk_size or policy.kind.default_chunk_size, num_pages * page_size),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        inflight=config.inflight or policy.inflight(num_stages),
        prefix_cache=_prefix_cache(config, facts, equal_decodes=equal_decodes),
        num_slots=_num_slots(facts, max_num_seqs),
    )


def _default_seqs(facts: ModelFacts, num_stages: int) -> int:
    """Return the default of --max-num-seqs. States of that many sequences take _MOST_STATE_BYTES per stage at most."""
    default, each = _SEQS_PER_STAGE * num_stages, state_bytes(facts.caches, 4)
    return min(default, max(_MOST_STATE_BYTES * num_stages // each, 1)) if each else default


def _num_slots(facts: ModelFacts, max_num_seqs: int) -> int:
    """Return the number of state slots: one for each sequence that may run at once, if layers keep states."""
    return max_num_seqs if facts.has_states else 0


def _prefix_cache(config: RunConfig, facts: ModelFacts, *, equal_decodes: bool) -> PrefixCacheMode:
    """Return the mode of the prefix cache. "auto" shares no page in which decodes may have written other bits."""
    asked = facts.prefix_cache(config.prefix_cache)
    if asked != "auto":
        return cast(PrefixCacheMode, asked)
    return "all" if equal_decodes else "prompts"


def limits_of(run: ResolvedRun, facts: ModelFacts) -> Limits:
    """Return the limits that scheduling needs, taken from a resolved run of the model with these facts."""
    return Limits(
        num_stages=run.num_stages,
        chunk_size=run.chunk_size,
        max_num_seqs=run.max_num_seqs,
        max_model_len=run.max_model_len,
        page_size=run.page_size,
        num_pages=run.num_pages,
        inflight=run.inflight,
        longrope_after=facts.longrope_after,
        prefix_cache=run.prefix_cache,
        most_idle_pages=most_idle_pages(run.device, run.num_pages),
        num_slots=_num_slots(facts, run.max_num_seqs),
        issues_ahead=run.issues_ahead,
    )
