"""The rule of a layer's attention: everything besides the pages and rows of one microbatch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """One layer's attention. Causality is implied: the row at position i sees keys j <= i of its own sequence.

    Args:
        scaling: factor of the scores.
        sliding_window: number of keys that a row sees, its own included (i - sliding_window < j); None for all.
        softcap: scores become softcap * tanh(score / softcap); None for none.
        sinks: (num_heads,), one more logit per head, in the softmax's denominator alone; None for none.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionSpecs:
    """The specs of a model's layers, each made in the layer's first call and returned in every later one.

    They come from calls, since not every model computes with its modules' attributes: OPT scales queries by
    `self.scaling` itself and passes 1.0.

    Args:
        windows: sliding window of each layer, by global index.
    """

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.windows = windows
        self._specs: dict[int, AttentionSpec] = {}

    def of(self, layer: int, scaling: float, softcap: float | None, sinks: Tensor | None) -> AttentionSpec:
        """Return a layer's spec. The model passes the last three arguments to attention in every call."""
        spec = self._specs.get(layer)
        if spec is None:
            spec = self._specs[layer] = AttentionSpec(scaling, self.windows[layer], softcap, sinks)
        assert spec.scaling == scaling and spec.softcap == softcap and spec.sinks is sinks, f"layer {layer} has changed"
        return spec
