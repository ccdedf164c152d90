"""The memory that a check needs, and the parts into which it cuts the model because of that.

all prompts     |--------|--|-----|---|---------------|--|-|     tokens
groups          |-----------|---------|---------------|----|     computed one after the other
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sarathi_pp.checkpoint.facts.layer_cache import state_bytes, token_values
from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.errors import CapacityError
from sarathi_pp.model.loader import stage_bytes
from sarathi_pp.model.memory import in_gib
from sarathi_pp.model.weights import HeldTypes
from sarathi_pp.process.host import memory_pools

# Most tokens of the prompts that are computed as one group, unless one prompt has more.
_GROUP_TOKENS = 1024
# Share of the available memory that transformers' whole model and all stages may take.
_ROOM = 0.7
_FLOAT_BYTES = 4
# Tensors of attention scores that transformers has in memory at a time: scores, masked scores, softmax, a copy.
_SCORES = 4

Layers = tuple[int, int]


def split_groups(lengths: Sequence[int]) -> list[range]:
    """Return the prompts of each group, by index. A group has at most 1024 tokens, or one prompt.

    Args:
        lengths: number of tokens per prompt.
    """
    groups, start, num_tokens = [], 0, 0
    for index, length in enumerate(lengths):
        if index > start and num_tokens + length > _GROUP_TOKENS:
            groups.append(range(start, index))
            start, num_tokens = index, 0
        num_tokens += length
    return [*groups, range(start, len(lengths))]


@dataclass(frozen=True, slots=True)
class CheckMemory:
    """The bytes that a check needs in float32.

    Attributes:
        stages: (first, end) per stage.
        model_bytes: weights of the whole model.
        stage_bytes: weights of each stage.
        available_bytes: memory that this process may take.
    """

    facts: ModelFacts
    stages: Sequence[Layers]
    model_bytes: int
    stage_bytes: Sequence[int]
    available_bytes: int

    @classmethod
    def of(cls, directory: Path, facts: ModelFacts, stages: Sequence[Layers]) -> CheckMemory:
        """Read the sizes of a model's tensors, and the memory that is available now."""
        theirs, ours = HeldTypes(torch.float32, torch.float32, as_stored=False), HeldTypes.on("cpu", torch.float32)
        whole = stage_bytes(directory, (0, facts.num_layers), theirs)
        each = [stage_bytes(directory, layers, ours) for layers in stages]
        return cls(facts, stages, whole, each, min(pool.free_bytes for pool in memory_pools()))

    @property
    def num_weights(self) -> int:
        return self.model_bytes // _FLOAT_BYTES

    def parts(self, lengths: Sequence[int]) -> Sequence[Layers]:
        """Return the layers that transformers computes at once: those of the whole model if they fit, or of a stage.

        Args:
            lengths: number of tokens per prompt.

        Raises:
            CapacityError: a stage does not fit. The message names what takes the memory.
        """
        if self.fits_whole(lengths):
            return [(0, self.facts.num_layers)]
        kept = _FLOAT_BYTES * sum(lengths) * self.facts.hidden_size if len(self.stages) > 1 else 0
        for index, (layers, weights) in enumerate(zip(self.stages, self.stage_bytes, strict=True)):
            parts = 2 * weights, self._working_bytes(layers, lengths), kept
            if sum(parts) > self.available_bytes:
                raise self._too_large(index, parts, lengths)
        return self.stages

    def fits_whole(self, lengths: Sequence[int]) -> bool:
        """Return whether transformers' whole model, all stages and the largest group fit into memory together."""
        working = max(self._working_bytes(layers, lengths) for layers in self.stages)
        needed = self.model_bytes + sum(self.stage_bytes) + working
        return needed <= _ROOM * self.available_bytes

    def _working_bytes(self, layers: Layers, lengths: Sequence[int]) -> int:
        """Return the bytes for the activations and the KV cache of a stage, in the largest group."""
        facts, (first, end) = self.facts, layers
        row = (end - first + 1) * facts.hidden_size + token_values(facts.caches[first:end])
        state = state_bytes(facts.caches[first:end], _FLOAT_BYTES) // _FLOAT_BYTES
        logits = facts.vocab_size if end == facts.num_layers else 0
        most = 0
        for group in split_groups(lengths):
            num_tokens, longest = sum(lengths[i] for i in group), max(lengths[i] for i in group)
            scores = _SCORES * facts.num_heads * longest**2
            most = max(most, num_tokens * (row + logits) + longest * logits + scores + len(group) * state)
        return _FLOAT_BYTES * most

    def _too_large(self, index: int, parts: tuple[int, int, int], lengths: Sequence[int]) -> CapacityError:
        first, end = self.stages[index]
        weights, working, kept = map(in_gib, parts)
        more = "more --stages" if len(self.stages) < self.facts.num_layers else "a machine with more memory"
        remedies = more, "shorter prompts", "fewer prompts"
        return CapacityError(
            f"stage {index} (layers {first} to {end - 1}) needs {in_gib(sum(parts))} of memory, and "
            f"{in_gib(self.available_bytes)} are available. It needs {weights} for its weights in float32, for "
            f"transformers and again for the stage, {working} to compute the longest prompt of {max(lengths):,} "
            f"tokens, and {kept} to keep the activations of all {sum(lengths):,} tokens between stages."
            f"\n  try  {remedies[parts.index(max(parts))]}"
        )
