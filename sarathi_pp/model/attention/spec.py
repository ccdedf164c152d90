"""The settings of a layer's attention that are the same for every microbatch: scaling, window, soft cap, sinks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """The settings of one layer's attention. It is always causal: position i sees keys j <= i of its own sequence.

    Args:
        scaling: factor on the products of queries and keys, which gives the scores.
        sliding_window: number of keys that a row sees, its own included (i - sliding_window < j); None for all.
        softcap: bound on the scores, which become softcap * tanh(score / softcap); None for no bound.
        sinks: (num_heads,), one more logit per head, which counts only in the softmax's denominator; None for none.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionSpecs:
    """The AttentionSpec of each layer of a model, made when the layer first calls attention.

    Its values are the arguments of that call. The attributes of the layer's module would not do: OPT has
    `self.scaling`, but scales queries itself and passes 1.0 to attention.

    Args:
        windows: sliding window of each layer of the whole model, in tokens; None for a layer without one.
    """

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.windows = windows
        self._specs: dict[int, AttentionSpec] = {}

    def of(self, layer: int, scaling: float, softcap: float | None, sinks: Tensor | None) -> AttentionSpec:
        """Return a layer's AttentionSpec. The first call makes it, and later calls must give the same values.

        Args:
            layer: index of the layer in the whole model, from 0.
            scaling: see AttentionSpec. So are softcap and sinks.
        """
        spec = self._specs.get(layer)
        if spec is None:
            spec = self._specs[layer] = AttentionSpec(scaling, self.windows[layer], softcap, sinks)
        assert spec.scaling == scaling and spec.softcap == softcap and spec.sinks is sinks, f"layer {layer} has changed"
        return spec
