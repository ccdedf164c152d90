"""One stage's part of a transformers model, which computes microbatches. loader.py loads it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from sarathi_pp.model.attention import AttentionBackend
from sarathi_pp.model.attention.adapter import PagedCall
from sarathi_pp.model.attention.latent import LatentCache
from sarathi_pp.model.attention.spec import AttentionSpecs
from sarathi_pp.model.batch_invariant import batch_invariant_mode
from sarathi_pp.model.inputs import StageInputs
from sarathi_pp.model.kv import KVShard


class StageModel:
    """One stage: the layers [first, end) of a model of `num_layers`. The first stage embeds, the last has the LM head.

    Attributes:
        module: the transformers model with missing layers, after the rewrites.
        specs: the settings of each layer's attention, made in the layer's first call.
        bytes_read: bytes of tensor data that loading read.
        num_bytes: bytes of the weights in memory.
        steps: (1,) int64, layers computed so far. Another thread may read it while a microbatch is computed.

    Args:
        windows: for each layer of the model, the number of tokens that a row sees, its own included; None for all.
        bare_lm_head: LM head that can be called without the model around it (bare_model.py); None if there is none.
        place: dtype and device of the computation; None for those of the module's parameters.
        latent: the layers have latent attention.
    """

    def __init__(
        self,
        module: Any,
        layers: tuple[int, int],
        num_layers: int,
        windows: tuple[int | None, ...],
        backend: AttentionBackend,
        bytes_read: int,
        num_bytes: int = 0,
        bare_lm_head: nn.Module | None = None,
        place: tuple[torch.dtype, torch.device] | None = None,
        *,
        latent: bool = False,
    ) -> None:
        self._latent = latent
        self.module = module
        # If all weights are packed, as in the last layers of an OLMo, the module has no parameter to ask.
        self._place: tuple[torch.dtype, torch.device] = place or (module.dtype, module.device)
        self._base = module.base_model
        self._bare_lm_head = bare_lm_head
        self.num_bytes = num_bytes
        self.layers = layers
        self.num_layers = num_layers
        self.specs = AttentionSpecs(windows)
        self.backend = backend
        self.bytes_read = bytes_read
        self.steps = np.zeros(1, np.int64)
        self._batch_invariant = batch_invariant_mode(*self._place)

    @property
    def embed(self) -> bool:
        return self.layers[0] == 0

    @property
    def has_lm_head(self) -> bool:
        return self.layers[1] == self.num_layers

    @torch.inference_mode()
    def forward(self, x: Tensor, inputs: StageInputs, kv: KVShard, backend: AttentionBackend | None = None) -> Tensor:
        """Run one microbatch of T rows (tokens), write its keys and values into `kv` and return its output.

        In float32 on CPU, with numba's attention, the result of a row depends only on its own sequence, to the last
        bit.

        Args:
            x: token ids (T,) int64 if the stage embeds, otherwise hidden states (T, hidden_size).
            backend: attention backend for this call; None for the stage's own.

        Returns:
            Logits (n, vocab_size) of `inputs.logit_rows` if the stage has the LM head, and n may be 0. Otherwise hidden
            states (T, hidden_size). Both have the model's dtype.
        """
        call = self._call(x, inputs, kv, backend)
        with self._batch_invariant:
            if self.has_lm_head and self._bare_lm_head is not None:
                rows = self._drawn(self._base(**call).last_hidden_state[0], inputs)
                return cast(Tensor, self._bare_lm_head(rows[None])[0])
            if self.has_lm_head:
                # 0 means all rows and needs no index.
                kept = 0 if inputs.all_logits else inputs.logit_rows
                return cast(Tensor, self.module(**call, logits_to_keep=kept).logits[0])
            return cast(Tensor, self._base(**call).last_hidden_state[0])

    @torch.inference_mode()
    def forward_rows(
        self, x: Tensor, inputs: StageInputs, kv: KVShard, backend: AttentionBackend | None = None
    ) -> Tensor:
        """Run the last stage without its LM head, and return the (n, size) inputs for an LMHead. See `forward`."""
        with self._batch_invariant:
            return self._drawn(self._base(**self._call(x, inputs, kv, backend)).last_hidden_state[0], inputs)

    def rows_head(self) -> LMHead:
        """Return the LM head for rows of `forward_rows`. It shares the weights, and gives the bits of `forward`."""
        module = self.module if self._bare_lm_head is not None else _without_base(self.module)
        return LMHead(module, 0, *self._place, 0, self._bare_lm_head)

    def _drawn(self, rows: Tensor, inputs: StageInputs) -> Tensor:
        return rows if inputs.all_logits else rows.index_select(0, inputs.logit_rows)

    def _call(
        self, x: Tensor, inputs: StageInputs, kv: KVShard, backend: AttentionBackend | None = None
    ) -> dict[str, Any]:
        paged = PagedCall(backend or self.backend, kv, inputs, self.specs, self.steps)
        call = {
            "input_ids" if self.embed else "inputs_embeds": x[None],
            "position_ids": inputs.position_ids[None],
            "use_cache": False,
            "paged": paged,
        }
        return call | {"past_key_values": LatentCache(paged)} if self._latent else call


@dataclass
class _Output(MoeModelOutputWithPast):  # type: ignore[misc]
    """The output of a base model, with the attributes that models with experts and models like GPT-2 read."""

    cross_attentions: None = None


class _Rows(nn.Module):
    """A stand-in for a base model, which returns the rows that it gets."""

    def forward(self, *args: object, inputs_embeds: Tensor, **kwargs: object) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


def _without_base(module: Any) -> Any:
    """Return a copy of a model whose base model returns its input. All other modules are those of the model."""
    base = module.base_model
    rows = _Rows()
    if hasattr(base, "decoder"):
        rows.add_module("decoder", rows)  # OPT calls the decoder of its base model
    found = copy.copy(module)
    found._modules = {name: rows if one is base else one for name, one in module._modules.items()}
    return found


class LMHead:
    """The LM head of a model, without layers.

    Args:
        size: number of channels of its inputs. See StageModel for the other arguments.
    """

    def __init__(
        self,
        module: Any,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        bytes_read: int,
        bare_lm_head: nn.Module | None = None,
    ) -> None:
        self.module = module
        self._bare_lm_head = bare_lm_head
        self.size = size
        self.bytes_read = bytes_read
        self._batch_invariant = batch_invariant_mode(dtype, device)

    @torch.inference_mode()
    def forward(self, rows: Tensor) -> Tensor:
        """Return the (n, vocab_size) logits of (n, size) rows, with the same bits as the last stage gives."""
        with self._batch_invariant:
            if self._bare_lm_head is not None:
                return cast(Tensor, self._bare_lm_head(rows[None])[0])
            positions = torch.arange(rows.shape[0], device=rows.device)
            found = self.module(inputs_embeds=rows[None], position_ids=positions[None], use_cache=False)
        return cast(Tensor, found.logits[0])
