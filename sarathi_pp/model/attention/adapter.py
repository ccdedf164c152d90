"""The link between transformers' attention layers and our paged attention.

StageModel passes a PagedCall to the model as the keyword argument `paged`. transformers hands it on to every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from sarathi_pp.model.attention import AttentionBackend
from sarathi_pp.model.attention.spec import AttentionSpecs
from sarathi_pp.model.inputs import StageInputs
from sarathi_pp.model.kv import KVShard

# The `attn_implementation` that a model must have. transformers knows no mask for this name, so it makes none: a mask
# would be T x T.
PAGED = "sarathi_pp_paged"


@dataclass(frozen=True, slots=True)
class PagedCall:
    """Everything that attention needs to compute one microbatch on a stage.

    Attributes:
        specs: the settings of each layer's attention.
        steps: (1,) int64, layers computed so far. Each layer adds 1.
    """

    backend: AttentionBackend
    kv: KVShard
    inputs: StageInputs
    specs: AttentionSpecs
    steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))

    def attend(
        self, layer: int, query: Tensor, *, scaling: float, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Return a layer's (T, H, D) attention output. The keys and values of the rows are already in their pages.

        Args:
            layer: index of the layer in the whole model, from 0.
            query: (T, H, D), after the rotary embedding.
            scaling: see AttentionSpec. So are softcap and sinks.
        """
        self.steps[0] += 1
        spec = self.specs.of(layer, scaling, softcap, sinks)
        return self.backend(query, self.kv, layer, self.inputs, spec)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedCall,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Write keys and values to their pages, and return the attention output (1, T, H, D).

    transformers calls this as its attention function. Of the arguments in `unused`, two could matter: dropout,
    which is off here, and sliding_window, which `AttentionSpecs.windows` already holds.

    Args:
        query: (1, H, T, D), rotated.
        key: (1, Hkv, T, D), rotated.
        value: (1, Hkv, T, D).
    """
    assert attention_mask is None, "a mask was made; it would be T x T"
    layer = module.layer_idx
    paged.kv.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), paged.inputs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = paged.attend(layer, query[0].transpose(0, 1), scaling=scale, softcap=softcap, sinks=s_aux)
    return out[None], None


AttentionInterface.register(PAGED, _attention)
