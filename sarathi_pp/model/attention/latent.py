"""Multi-head latent attention (MLA), DeepSeek-V2, arXiv 2405.04434, section 2.1: pages hold one vector per token.

Its first channels are a latent, from which each head's key and value are projected (`kv_b_proj`). Its last ones are the
part of the key with the rotary embedding, which all heads share.

    hidden -> latent and rotary part -> LatentCache.update: one page entry per token, for all heads

The projections are absorbed into the queries and the outputs (section 2.1.3), so the keys and values of the heads are
never made:

    q . (W_k c)       = (W_k^T q) . c           W_k^T q and the rotary part of q: a query of the latent's width
    sum_j w_j W_v c_j = W_v (sum_j w_j c_j)     attention's output is a latent, and W_v makes the head's output of it

So latent attention is attention with one KV head, whose values are the first channels of its keys. Rows of prompts and
decodes are computed in the same way. In float32, the bits of a row then do not depend on how a prompt was cut.

With H heads, a row costs H * (2 * latent + rotary) products per key, instead of H * (key + value channels). In return,
no key has to be expanded, which takes latent * (key + value channels) * H. With DeepSeek's sizes, absorbing is cheaper
for chunks of up to 170 rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from sarathi_pp.model.attention.adapter import PagedCall
from sarathi_pp.model.fuse.head_linear import head_linear

# The `attn_implementation` of models with latent attention. As for `PAGED`, transformers makes no mask.
LATENT = "sarathi_pp_latent"


class LatentCache:
    """The cache object that transformers' layers hand their latents to. It writes them to the pages.

    transformers would project what `update` returns to keys and values. They are not needed, so it returns one row. (No
    row would do, but transformers could not reshape it.)
    """

    is_compileable = False

    def __init__(self, paged: PagedCall) -> None:
        self._paged = paged

    def update(self, latent: Tensor, rotary: Tensor, layer: int, *unused: object) -> tuple[Tensor, Tensor]:
        """Write the latents of the microbatch's rows.

        Args:
            latent: (1, 1, T, latent channels).
            rotary: (1, 1, T, rotary channels), after the rotary embedding.
            layer: index of the layer in the whole model, from 0.
        """
        rows = torch.cat((latent, rotary), -1)[0].transpose(0, 1)
        self._paged.kv.write_latent(layer, rows, self._paged.inputs)
        return latent[:, :, :1], rotary[:, :, :1]


class LatentProducts(nn.Module):
    """A replacement for `kv_b_proj`: the same weight, absorbed into queries and outputs.

    Args:
        attention: transformers' attention module. `kv_b_proj` projects latents to the keys and values of all heads.
        compute: float type of the computation.
    """

    def __init__(self, attention: Any, compute: torch.dtype) -> None:
        super().__init__()
        self._key_dim, value_dim = attention.qk_nope_head_dim, attention.v_head_dim
        weight = attention.kv_b_proj.weight.detach().view(-1, self._key_dim + value_dim, attention.kv_lora_rank)
        self.out_features = weight.shape[0] * weight.shape[1]
        self.of_queries = head_linear(weight[:, : self._key_dim].mT.contiguous(), compute)
        self.of_outputs = head_linear(weight[:, self._key_dim :].contiguous(), compute)

    def forward(self, latent: Tensor) -> Tensor:
        """Return zeros for the one row that LatentCache returns. Nothing reads them."""
        assert latent.shape[-2] == 1, f"latents {tuple(latent.shape)} would be expanded"
        return latent.new_zeros(*latent.shape[:-1], self.out_features)

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries for the latents, (T, H, latent + rotary channels).

        Args:
            query: (T, H, D), whose last channels are the rotary part.
        """
        return torch.cat((self.of_queries(query[..., : self._key_dim]), query[..., self._key_dim :]), -1)


def absorb_latents(layers: nn.Module, compute: torch.dtype) -> None:
    """Replace the `kv_b_proj` of all layers. Call it after the weights are loaded, before linear layers are packed."""
    for module in layers.modules():
        if hasattr(module, "kv_b_proj"):
            module.kv_b_proj = LatentProducts(module, compute)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedCall,
    scaling: float,
    **unused: object,
) -> tuple[Tensor, None]:
    """Return the attention output (1, T, H, value channels). The latents are in their pages.

    transformers calls this as its attention function.

    Args:
        query: (1, H, T, D), whose last channels are the rotary part.
    """
    assert attention_mask is None, "a mask was made; it would be T x T"
    products: LatentProducts = module.kv_b_proj
    asked = products.absorb(query[0].transpose(0, 1))
    out = paged.attend(module.layer_idx, asked, scaling=scaling)
    return products.of_outputs(out)[None], None


AttentionInterface.register(LATENT, _attention)
