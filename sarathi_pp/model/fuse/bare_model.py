"""A base model and an LM head without transformers' extra steps for generation, training and inspection.

    token ids or activations -> embedding -> cosines and sines of all positions -> the stage's layers -> norm -> LM head

transformers' forward prepares unused masks and caches, copies its list of layers and calls every one of them, also
those of other stages. Between two microbatches, the processor's caches are full of weights, so Python code is slow.
These steps are a good part of its time.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel
from transformers.models.mistral.modeling_mistral import MistralForCausalLM, MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from sarathi_pp.model.attention.adapter import PagedCall
from sarathi_pp.model.fuse.compiled_layers import CompiledLayers
from sarathi_pp.model.fuse.packed_embedding import PackedEmbedding
from sarathi_pp.model.fuse.rewrite import runs
from sarathi_pp.model.fuse.rotary_cache import RotaryCache
from sarathi_pp.model.missing_layer import MissingLayer
from sarathi_pp.model.narrow_weights import WideEmbedding

_EMBEDDINGS = (nn.Embedding, WideEmbedding, PackedEmbedding, MissingLayer)
# The forwards of Qwen2 and Mistral differ from Llama's in the masks they make. Qwen3's is the same as Qwen2's.
_KNOWN = (LlamaModel, MistralModel, Qwen2Model)
# These forwards are the same except for the examples in their docstrings, which count as code.
_WITH_BARE_LM_HEADS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


class _Output(NamedTuple):
    """The output of a base model, with the attributes that a `...ForCausalLM` of transformers reads.

    Attributes:
        last_hidden_state: (1, T, hidden_size).
    """

    last_hidden_state: Tensor
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None


class BareModel(nn.Module):
    """A replacement for transformers' base model: the same operations on tensors, and no other steps.

    It takes the modules of the base model, under the same names.
    """

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.embed_tokens, self.layers = base.embed_tokens, base.layers
        self.norm, self.rotary_emb = base.norm, base.rotary_emb
        # These are the layers that are called. So replace layers before, not after.
        self._layers = tuple(layer for layer in base.layers if not isinstance(layer, MissingLayer))
        compiled = len(self._layers) == 1 and isinstance(self._layers[0], CompiledLayers)
        cached = compiled and RotaryCache.fits(base.rotary_emb)
        self._rotary_cache = RotaryCache(base.rotary_emb) if cached else None

    def forward(
        self,
        *,
        position_ids: Tensor,
        paged: PagedCall | None = None,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **call: Any,
    ) -> _Output:
        """Run the stage's modules, and return the hidden states after the norm.

        Args:
            position_ids: (1, T) int64.
            paged: None only if the stage has no layers.
            input_ids: (1, T) int64 token ids if the stage embeds; otherwise None.
            inputs_embeds: (1, T, hidden_size) activations if the stage does not embed; otherwise None.
        """
        if input_ids is not None:
            hidden = self._embed(input_ids)
        else:
            assert inputs_embeds is not None
            hidden = inputs_embeds
        if self._layers:
            assert paged is not None
            # A `...ForCausalLM` passes the first two, but StageModel does not.
            arguments = {
                "attention_mask": None,
                "past_key_values": None,
                **call,
                "position_ids": position_ids,
                "paged": paged,
                "position_embeddings": self._cosines_and_sines(hidden, position_ids, paged),
            }
            for layer in self._layers:
                hidden = layer(hidden, **arguments)
        return _Output(self.norm(hidden))

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Return the rows of (1, T) token ids. Unscaled weights are read without the steps of nn.Embedding."""
        embedding = self.embed_tokens
        if type(embedding) is PackedEmbedding:
            return embedding(token_ids)  # type: ignore[no-any-return]
        rows: Tensor = embedding.weight.index_select(0, token_ids[0])[None]
        return rows.float() if type(embedding) is WideEmbedding else rows

    def _cosines_and_sines(self, hidden: Tensor, position_ids: Tensor, paged: PagedCall) -> Any:
        """Return the rotary embeddings of all rows: what `rotary_emb` returns, usually cosines and sines."""
        if self._rotary_cache is None:
            return self.rotary_emb(hidden, position_ids=position_ids)
        inputs = paged.inputs
        return self._rotary_cache.of(inputs.position_ids, max(span.end for span in inputs.spans), hidden)


def _is(module: nn.Module, known: type[nn.Module]) -> bool:
    """Return whether a module's forward has the code of a known class, and its global names mean the same objects."""
    if not runs(module, known):
        return False
    ours, theirs = inspect.unwrap(type(module).forward), inspect.unwrap(known.forward)
    names = [name for name in theirs.__code__.co_names if name in theirs.__globals__]
    return all(ours.__globals__.get(name) is theirs.__globals__[name] for name in names)


def use_bare_model(module: nn.Module, name: str) -> bool:
    """Replace a model's base model by a BareModel, if its forward is a known one. Return whether this was done.

    Call it after missing layers and all other rewrites are in place.

    Args:
        name: path of the base model in `module`.
    """
    base: Any = module.get_submodule(name)
    if not any(_is(base, known) for known in _KNOWN) or type(base.embed_tokens) not in _EMBEDDINGS:
        return False
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, BareModel(base))
    return True


def bare_lm_head(module: nn.Module, name: str) -> nn.Module | None:
    """Return a model's LM head, if its output is what the model returns; otherwise None.

    Args:
        name: path of the LM head in `module`.
    """
    return module.get_submodule(name) if any(_is(module, known) for known in _WITH_BARE_LM_HEADS) else None
