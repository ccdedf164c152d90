"""A plan: if a model fits, which options to use, and what to expect. Made from the model's files and maybe a profile.

A model fits if every stage has room for its weights, its largest microbatch and the KV pages of one request. That
request has --max-model-len tokens, or those of the workload's longest one. If several ranks hold a stage together,
memory is that of each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from sarathi_pp.checkpoint.facts.layer_cache import state_bytes
from sarathi_pp.checkpoint.facts.support import check_shards
from sarathi_pp.config import RunConfig
from sarathi_pp.core.cost.sizing import saturation
from sarathi_pp.errors import ConfigError
from sarathi_pp.layer_shape import count_kinds
from sarathi_pp.model.memory import in_gib
from sarathi_pp.run.auto_options import profile_mismatch
from sarathi_pp.sim.workload import Workload
from sarathi_pp.tuning.basis import estimated_basis, measured_basis
from sarathi_pp.tuning.fitting import Remedy, find_remedies
from sarathi_pp.tuning.hardware import Device, Hardware, choose_stages
from sarathi_pp.tuning.model_memory import ModelMemory, PlannedModel
from sarathi_pp.tuning.planner import Candidate, Planner
from sarathi_pp.tuning.prediction import Prediction

SCHEMA = "sarathi-pp/plan/1"
# Least share by which more seats must raise the tokens per second for a note.
_WORTHWHILE = 0.03
_THIS_HOST = Hardware()


def make_plan(
    config: RunConfig, workload: Workload, hardware: Hardware = _THIS_HOST, *, use_all_devices: bool = False
) -> dict[str, Any]:
    """Return the plan as one document, also if the model does not fit. Loads no weights and starts no process.

    Args:
        hardware: devices elsewhere; by default, those of this host.
        use_all_devices: use a stage for each described device, or for each group of shards, instead of config.stages.

    Raises:
        ConfigError, PartitionError: the options contradict each other, the model or the workload.
        MissingError, InputError: a file is missing or wrong.
    """
    hardware.require_complete()
    if hardware.is_elsewhere and config.device == "cpu":
        raise ConfigError("--device cpu: --card and --device-memory describe GPUs; leave out one of the options")
    model = PlannedModel.find(config.model)
    check_shards(model.directory, config.tensor_parallel_size)
    devices: list[Device] = []
    if hardware.is_elsewhere:
        config, devices = _use_devices(model, config, hardware, use_all_devices=use_all_devices)
    _require_positions(model, config, workload)
    basis = (measured_basis if config.profile is not None else estimated_basis)(model, config, devices)
    memory = ModelMemory.of(model, config, basis.device, config.max_model_len or workload.max_tokens)
    planner = Planner(memory, basis, workload)
    return _Document(planner, planner.best(), hardware.hosts).to_json()


def _use_devices(
    model: PlannedModel, config: RunConfig, hardware: Hardware, *, use_all_devices: bool
) -> tuple[RunConfig, list[Device]]:
    """Return the run with its number of stages, and all described devices. Raise ConfigError if they are too few."""
    shards = config.tensor_parallel_size
    devices = hardware.list_devices(None if use_all_devices else config.stages * shards)
    if use_all_devices:
        config = replace(config, stages=choose_stages(devices, shards, model.facts.num_layers))
    if (num_ranks := config.stages * shards) > len(devices):
        raise ConfigError(
            f"--stages {config.stages} with --tensor-parallel-size {shards} need {num_ranks} devices, and "
            f"{len(devices)} are described; give fewer stages, or more --devices or --hosts"
        )
    return config, devices


def _require_positions(model: PlannedModel, config: RunConfig, workload: Workload) -> None:
    positions = model.facts.max_model_len(config.max_model_len)
    if workload.max_tokens > positions:
        raise ConfigError(
            f"--workload {workload.spec} has requests of up to {workload.max_tokens} tokens, and {config.model} takes "
            f"{positions}; name a workload with shorter requests"
        )


@dataclass(frozen=True, slots=True)
class _Document:
    """A plan for output, from the candidate that was chosen."""

    planner: Planner
    candidate: Candidate
    num_hosts: int

    @property
    def memory(self) -> ModelMemory:
        return self.planner.memory

    @property
    def config(self) -> RunConfig:
        return self.planner.memory.config

    def to_json(self) -> dict[str, Any]:
        candidate, run, basis = self.candidate, self.candidate.run, self.planner.basis
        cost, workload = candidate.profile.cost, self.planner.workload
        prediction = asdict(self.planner.predict(candidate)) if candidate.fits else dict.fromkeys(_PREDICTED)
        return {
            "schema": SCHEMA,
            "model": run.model,
            "fits": candidate.fits,
            "verdict": self._verdict(),
            "short_bytes": max(0, *candidate.memory.short),
            "options": self._options(),
            "would_fit": [] if candidate.fits else [asdict(remedy) for remedy in self._remedies()],
            "quantised": self.memory.model.facts.quantised,
            "weights": self.config.weights,
            "stages": run.num_stages,
            "tensor_parallel_size": run.tensor_parallel_size,
            "devices": [device.title for device in basis.devices],
            "hosts": self.num_hosts,
            "device": run.device,
            "dtype": run.dtype,
            "kv_cache_dtype": run.kv_cache_dtype,
            "source": basis.source,
            "workload": workload.spec,
            "prompt_to_output": workload.prompt_to_output,
            "chunk_size": run.chunk_size,
            "tile": cost.tile,
            "ridge": cost.ridge,
            "saturation_tokens": saturation(cost),
            "layer_split": [end - first for first, end in run.layers],
            "inflight": run.inflight,
            "max_num_seqs": run.max_num_seqs,
            "page_size": run.page_size,
            "pages": run.num_pages if self._has_pages() else None,
            "longest_request_tokens": self.memory.longest,
            "state_bytes_per_sequence": state_bytes(self.memory.rank_facts.caches, self.memory.dtype.itemsize),
            "floor": self._floor(),
            "per_stage": [self._stage(stage) for stage in range(run.num_stages)],
            **prediction,
            "notes": [*self._notes()],
        }

    def _stage(self, stage: int) -> dict[str, Any]:
        candidate, devices, memory = self.candidate, self.planner.basis.devices, self.candidate.memory
        total, room = memory.totals[stage], None if memory.rooms is None else memory.rooms[stage]
        return {
            "stage": stage,
            "layers": list(candidate.run.layers[stage]),
            "layer_kinds": self._kinds(candidate.run.layers[stage]),
            "device": devices[stage * self.config.tensor_parallel_size].title if devices else candidate.run.device,
            "microbatch_s": candidate.microbatch_s[stage],
            "weights_bytes": memory.weights[stage],
            "stored_bytes": self.memory.weights.stored_bytes(candidate.run.layers[stage]),
            "working_bytes": memory.working[stage],
            "pages": candidate.pages[stage] if self._has_pages(candidate.run.layers[stage]) else None,
            "kv_bytes": memory.kv[stage],
            "least_kv_bytes": memory.least_kv[stage],
            "state_bytes": memory.states[stage],
            "total_bytes": total,
            "room_bytes": room,
            "free_bytes": None if room is None else room - total,
            "short_bytes": max(0, memory.short[stage]),
        }

    def _kinds(self, layers: tuple[int, int]) -> str | None:
        """Return how many layers each kind has, such as "12 linear, 4 attention"; None if all layers are alike."""
        costs = self.candidate.profile.cost.layer_costs
        if len(set(costs)) < 2:
            return None
        return count_kinds(layer.kind for layer in costs[slice(*layers)])

    def _verdict(self) -> str:
        run, memory = self.candidate.run, self.candidate.memory
        if not self.candidate.fits:
            worst = max(range(run.num_stages), key=memory.short.__getitem__)
            short = in_gib(memory.short[worst])
            if memory.rooms is None or memory.totals[worst] <= memory.rooms[worst]:
                return f"does not fit: the KV cache lacks {short} for {self._least_contents(worst)}"
            if self.planner.basis.rooms.separate() is None:
                return f"does not fit: all stages together lack {short} on this host"
            return f"does not fit: stage {worst} lacks {short}"
        num_tokens = run.num_pages * run.page_size
        held = f"{num_tokens:,} tokens" if self._has_pages() else f"the states of {run.max_num_seqs} sequences"
        if memory.rooms is None:
            return f"fits the KV cache of the profile, {held}; room for weights is not checked"
        limit = "" if num_tokens >= run.max_model_len else f", requests of up to {num_tokens:,}"
        return f"fits: a KV cache of {held}{limit}"

    def _least_contents(self, stage: int) -> str:
        """Return what the KV cache of a stage must hold at least."""
        parts = []
        if self.candidate.memory.states[stage]:
            parts.append(f"the states of {self.candidate.run.max_num_seqs} sequences")
        if self._has_pages(self.candidate.run.layers[stage]):
            parts.append(f"a request of {self.memory.longest:,} tokens")
        return " and ".join(parts)

    def _has_pages(self, layers: tuple[int, int] | None = None) -> bool:
        """Return whether some of the layers [first, end) keep KV pages. None: all layers of the model."""
        return self.memory.page_bytes(layers or (0, self.memory.num_layers)) > 0

    def _options(self) -> list[str]:
        """Return the options for `generate`. Those that affect memory are included if they are not the defaults."""
        config, run, default = self.config, self.candidate.run, RunConfig(model="")
        options = ["--stages", str(run.num_stages)]
        if run.tensor_parallel_size > 1:
            options += ["--tensor-parallel-size", str(run.tensor_parallel_size)]
        options += ["--layer-split", ",".join(str(end - first) for first, end in run.layers)]
        options += ["--chunk-size", str(run.chunk_size)]
        if run.num_stages > 1:
            options += ["--inflight", str(run.inflight)]
        options += ["--max-num-seqs", str(run.max_num_seqs)]
        named = "max_model_len", "page_size", "kv_cache_dtype", "gpu_memory_utilization", "dtype", "weights"
        for name in named:
            if (value := getattr(config, name)) != getattr(default, name):
                options += [f"--{name.replace('_', '-')}", str(value)]
        if config.kv_cache_memory_bytes is not None:
            options += ["--kv-cache-memory", f"{config.kv_cache_memory_bytes}B"]
        return options

    def _floor(self) -> list[dict[str, Any]]:
        """Return the least memory of the first, an inner and the last stage, with one layer each."""
        memory, chunk_size = self.memory, self.candidate.chunk_size
        firsts = {"first": 0, "inner": memory.num_layers // 2, "last": memory.num_layers - 1}
        spans = {name: (first, first + 1) for name, first in firsts.items()}
        return [
            {
                "stage": name,
                "weights_bytes": memory.weights.num_bytes(span),
                "working_bytes": memory.working_bytes(span, chunk_size),
                "least_kv_bytes": memory.least_kv_bytes(span),
                "total_bytes": memory.least_bytes(span, chunk_size),
            }
            for name, span in spans.items()
        ]

    def _remedies(self) -> Iterator[Remedy]:
        """Yield changes of one option, or of the hardware, with which the model would fit."""
        stages, page_size = self.candidate.memory, self.memory.page_size
        sizes = map(self.memory.page_bytes, self.candidate.run.layers)
        budgets = zip(stages.budgets, stages.states, sizes, strict=True)
        most = min(((budget - states) // size * page_size for budget, states, size in budgets if size), default=0)
        if self.config.max_model_len is not None and most >= self.planner.workload.max_tokens:
            yield Remedy(("--max-model-len", str(most)), "with these stages")
        if stages.rooms is not None:
            parts = zip(stages.rooms, stages.weights, stages.working, strict=True)
            most_mib = min(room - weights - working for room, weights, working in parts) >> 20
            least_mib = -(-max(stages.least_kv) >> 20)
            if min(stages.budgets) < max(stages.least_kv) and least_mib <= most_mib:
                yield Remedy(("--kv-cache-memory", f"{least_mib}MiB"), "or more")
            elif least_mib <= most_mib < min(stages.budgets) >> 20:
                yield Remedy(("--kv-cache-memory", f"{most_mib}MiB"), "or less")
        yield from self._fewer_sequences()
        if self.config.layer_split is None:
            yield from find_remedies(self.memory, self.planner.basis.rooms, self.candidate.chunk_size)

    def _fewer_sequences(self) -> Iterator[Remedy]:
        """Yield the most sequences with whose states the model fits, if it fits with fewer of them."""
        stages, now = self.candidate.memory, self.candidate.run.max_num_seqs
        pages = [least - states for least, states in zip(stages.least_kv, stages.states, strict=True)]
        room = stages.budgets
        if stages.rooms is not None:
            parts = zip(room, stages.rooms, stages.weights, stages.working, strict=True)
            room = [min(budget, each - weights - working) for budget, each, weights, working in parts]
        left = [one - needed for one, needed in zip(room, pages, strict=True)]
        most = min((one * now // states for one, states in zip(left, stages.states, strict=True) if states), default=0)
        if min(left) >= 0 and 1 <= most < now:
            yield Remedy(("--max-num-seqs", str(most)), "with these stages")

    def _notes(self) -> Iterator[str]:
        config, basis, model = self.config, self.planner.basis, self.memory.model
        yield from model.notes(config, basis.device)
        num_ranks, num_devices = config.stages * config.tensor_parallel_size, len(basis.devices)
        if num_devices > num_ranks:
            yield f"{num_ranks} of {num_devices} devices are used"
        if basis.devices and basis.source == "estimate" and not any(device.known for device in basis.devices):
            yield "times are those of an A100; name another card with --card"
        yield from profile_mismatch(config, self.memory.dtypes.compute)
        yield from self._more_seats()

    def _more_seats(self) -> Iterator[str]:
        """Yield a note if requests that share pages would be faster with twice as many seats.

        Shared pages leave room for more requests at once. Then seats are the limit, and not pages.
        """
        run, workload = self.candidate.run, self.planner.workload
        shares = workload.shares_prefixes and run.prefix_cache != "off"
        if not self.candidate.fits or not shares or run.max_num_seqs >= workload.num_requests:
            return
        more = replace(self.candidate, run=replace(run, max_num_seqs=2 * run.max_num_seqs))
        before, after = (self.planner.predict(one).total_tokens_per_s for one in (self.candidate, more))
        if after > (1 + _WORTHWHILE) * before:
            yield (
                f"requests share KV pages, so more of them fit: --max-num-seqs {more.run.max_num_seqs} gives "
                f"{after / before - 1:.0%} more tokens/s by the prediction"
            )


_PREDICTED = tuple(Prediction.__dataclass_fields__)
