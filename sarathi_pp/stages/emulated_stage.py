"""A stage that sleeps for the time that a profile predicts, instead of computing (`--emulate`).

The coordinator, the processes and their messages are real, and the messages have their true size. But there is no
model. So a pipeline can run with more stages than there are cores, or as fast as on another machine. The output tokens
are random ids. They depend only on the request's seed and the token's position.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from sarathi_pp.checkpoint.facts.layer_cache import LayerCache, PagedCache, StateCache
from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.config import ResolvedRun, RunConfig
from sarathi_pp.core.cost.model import CostModel, Load
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.cost.repartition import repartition
from sarathi_pp.core.plan import MicroBatch, SampledToken
from sarathi_pp.drawing.sampling import uniform
from sarathi_pp.errors import ConfigError
from sarathi_pp.stages.stage import Compute, StageOutput
from sarathi_pp.trace.clock import Clock
from sarathi_pp.wire.channel import Receiver
from sarathi_pp.wire.delay import DelayedReceiver

# A prompt may hold any id below _LEGAL_IDS, since no embedding is looked up. Drawn ids are below _DRAWN_IDS.
_LEGAL_IDS = 2**31 - 1
_DRAWN_IDS = 32_000
# Layers that take less are slept together.
_SHORTEST_SLEEP_S = 0.05


def emulated_facts(profile: Profile, page_size: int | None) -> ModelFacts:
    """Return the facts of the profile's model that planning and messages need. It has no end-of-sequence token.

    Args:
        page_size: tokens per KV page; None takes the profile's.
    """
    return ModelFacts(
        model_type="emulated",
        architecture=profile.model,
        num_layers=profile.num_layers,
        hidden_size=profile.hidden_size,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=_LEGAL_IDS,
        max_position_embeddings=profile.pages * (page_size or profile.page_size),
        dtype=profile.dtype,
        tie_word_embeddings=False,
        fingerprint=hashlib.sha256(json.dumps(profile.to_json(), sort_keys=True).encode()).hexdigest(),
        own_caches=_caches(profile.cost),
    )


def _caches(cost: CostModel) -> tuple[LayerCache, ...]:
    """Return the caches of the layers if some keep a state per sequence; otherwise an empty tuple.

    A profile has no sizes of states, so these are 0. A run needs to know only that there are states.
    """
    if not cost.keeps_states:
        return ()
    return tuple(StateCache((0, 0)) if layer.keeps_state else PagedCache(1, 1, 1) for layer in cost.layer_costs)


class EmulatedStage:
    """A stage that sleeps for the modelled time of each microbatch. See the interface Stage.

    Sleeping uses no CPU, so `counts_cpu` is False: CPU times of this stage have no meaning.
    """

    counts_cpu = False
    bytes_read = 0
    graphed = None
    threads = None

    def __init__(
        self, profile: Profile, run: ResolvedRun, layers: tuple[int, int], dtype: torch.dtype, clock: Clock
    ) -> None:
        self._cost = repartition(profile.cost, run.layers)
        self._stage = run.layers.index(layers)
        self._head = layers[1] == profile.num_layers
        self._num_layers = layers[1] - layers[0]
        self.steps = 0
        self._hidden_size = profile.hidden_size
        self._dtype = dtype
        self._clock = clock

    def prepare(self, microbatch: MicroBatch) -> Compute:
        load = Load.of(microbatch)
        seconds = self._cost.seconds(self._stage, load)
        if self._head and microbatch.head_on_first:
            seconds -= self._cost.head_seconds(load)
        return self._sleeping(seconds, lambda: self._output(microbatch))

    def prepare_head(self, microbatch: MicroBatch) -> Compute:
        return self._sleeping(self._cost.head_seconds(Load.of(microbatch)), lambda: _drawn(microbatch))

    def _sleeping(self, seconds: float, output_of: Callable[[], StageOutput]) -> Compute:
        def compute(hidden: Tensor | None) -> StageOutput:
            begin_s = self._clock.now()
            output = output_of()
            for layer in range(1, self._num_layers + 1):
                share = layer / self._num_layers  # exactly 1 for all layers
                left_s = begin_s + seconds * share - self._clock.now()
                # Waking up takes time, so several short layers share one sleep.
                if left_s >= _SHORTEST_SLEEP_S or layer == self._num_layers:
                    self._clock.sleep(max(0.0, left_s))
                self.steps += 1
            return output

        return compute

    def drop_graphs(self) -> None:
        """Do nothing: an emulated stage has no graphs."""

    def warm_up(self, num_tokens: int, num_keys: int) -> None:
        """Do nothing: nothing is compiled or allocated on first use."""

    def prepare_grammars(self) -> None:
        """Do nothing: the tokens of an emulated stage match no grammar."""

    def _output(self, microbatch: MicroBatch) -> StageOutput:
        if not self._head:
            return StageOutput(hidden=self._rows(microbatch.num_tokens))
        return StageOutput(rows=self._rows(microbatch.num_drawn)) if microbatch.head_on_first else _drawn(microbatch)

    def _rows(self, count: int) -> Tensor:
        return torch.zeros(count, self._hidden_size, dtype=self._dtype)


def _drawn(microbatch: MicroBatch) -> StageOutput:
    return StageOutput(
        tokens=tuple(
            SampledToken(
                chunk.sequence, chunk.epoch, int(_DRAWN_IDS * uniform(chunk.sampling.seed, chunk.sampling.position))
            )
            for chunk in microbatch.chunks
            if chunk.sampling is not None
        )
    )


class EmulatedStages:
    """A maker of stages that sleep for the times of a profile. See the interface StageMaker."""

    attention = "emulated"
    products = "emulated"
    state_backend = "emulated"
    device_name = "emulated"
    equal_decodes = True
    draws_ahead = False

    def __init__(self, config: RunConfig, profile: Profile, clock: Clock, *, moves_head: bool) -> None:
        self.has_head = moves_head
        self.captures = False
        self.reading = ""
        self.page_size = config.page_size or profile.page_size
        self._profile = profile
        self._clock = clock

    def weight_bytes(self, layers: tuple[int, int]) -> int:
        return 0

    def load(self, layers: tuple[int, int], room_bytes: int) -> None:
        """Do nothing: there is nothing to load."""

    def count_pages(self, layers: tuple[int, int], sharers: Mapping[str, int]) -> int:
        return self._profile.pages

    def shard_bytes(self, run: ResolvedRun, layers: tuple[int, int]) -> int:
        return 0

    def make(self, run: ResolvedRun, layers: tuple[int, int], dtype: torch.dtype) -> EmulatedStage:
        return EmulatedStage(self._profile, run, layers, dtype, self._clock)


def over_link(
    upstream: Receiver[Tensor], profile: Profile | None, stage: int, num_stages: int, clock: Clock
) -> Receiver[Tensor]:
    """Return the receiver of a stage's messages. If stages are emulated, it adds the latency of the profile.

    Args:
        upstream: the receiving end of the edge into the stage.
        profile: gives the latency that each edge adds; None without --emulate.
        stage: index of the stage, from 0. Stage 0 receives from the last stage.
    """
    if profile is None:
        return upstream
    added_s = profile.edge_links(num_stages)[stage - 1].added_latency_s
    return DelayedReceiver(upstream, added_s, clock) if added_s else upstream


def with_profile(config: RunConfig, profile: Profile) -> RunConfig:
    """Return the options with what the profile sets.

    It sets the model and --kv-cache-dtype, and --max-num-seqs and --layer-split if these are open. Its layer split is
    taken only if it has as many stages as the run.

    Raises:
        ConfigError: an option needs a model or its device, or the profile's links are for another number of stages.
    """
    asked = {
        "--attention": config.attention != "auto",
        "--kv-cache-memory": config.kv_cache_memory_bytes is not None,
        "--kv-cache-dtype": config.kv_cache_dtype != "auto",
        "--device": config.device == "cuda",
        "--weights": config.weights != "dtype",
        "--enforce-eager": config.enforce_eager,
        "--tensor-parallel-size": config.tensor_parallel_size > 1,
        "--gpu-memory-utilization": config.gpu_memory_utilization != RunConfig(model="").gpu_memory_utilization,
    }
    if any(asked.values()):
        named = " and ".join(option for option, given in asked.items() if given)
        raise ConfigError(
            f"--emulate runs no model, so {named} cannot be honoured; leave {named} out. The profile sets the number "
            f"of KV pages"
        )
    if config.stages != len(profile.cost.stages) and any(link.added_latency_s for link in profile.links):
        raise ConfigError(
            f"the profile adds latency to the edges of {len(profile.cost.stages)} stages, but there are "
            f'{config.stages}; use the same number of stages, or remove the key "links" from the profile'
        )
    own = tuple(end - first for first, end in (stage.layers for stage in profile.cost.stages))
    return replace(
        config,
        model=profile.model,
        kv_cache_dtype=profile.kv_cache_dtype,
        max_num_seqs=config.max_num_seqs or profile.max_num_seqs,
        layer_split=config.layer_split or (own if len(own) == config.stages else None),
    )
