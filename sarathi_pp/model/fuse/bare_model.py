"""A base model, and a head, without what transformers does around them for generation, training and inspection.

    token ids or activations -> embedding -> cosines and sines of all positions -> the stage's layers -> norm -> head

Its own forward makes room for masks and caches that nobody asks for, copies its list of layers and calls every one of
them, those of other stages included: between two microbatches, with the caches full of weights, a good part of what
Python takes.
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
from sarathi_pp.model.fuse.rewrite import runs
from sarathi_pp.model.fuse.rotary_cache import RotaryCache
from sarathi_pp.model.missing_layer import MissingLayer

# Those of Qwen2 and Mistral differ from Llama's in the masks they make; Qwen3's is Qwen2's.
_KNOWN = (LlamaModel, MistralModel, Qwen2Model)
# The same but for their examples, which count as their code.
_WITH_BARE_HEADS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


class _Output(NamedTuple):
    """What a `...ForCausalLM` reads of it. last_hidden_state: (1, T, hidden_size)."""

    last_hidden_state: Tensor
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None


class Body(nn.Module):
    """The same operations on the same tensors. Keeps the names of the modules, by which others find them."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.embed_tokens, self.layers = base.embed_tokens, base.layers
        self.norm, self.rotary_emb = base.norm, base.rotary_emb
        # As they are now: what takes a layer's place later is not called.
        self._held = tuple(layer for layer in base.layers if not isinstance(layer, MissingLayer))
        compiled = len(self._held) == 1 and isinstance(self._held[0], CompiledLayers)
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
        """input_ids, position_ids: (1, T) int64. inputs_embeds: (1, T, hidden_size), in the place of input_ids. paged:
        where there are layers.
        """
        if input_ids is not None:
            hidden = self.embed_tokens.weight.index_select(0, input_ids[0])[None]
        else:
            assert inputs_embeds is not None
            hidden = inputs_embeds
        if self._held:
            assert paged is not None
            # Layers expect these, which a `...ForCausalLM` passes on and others who call do not.
            asked = {
                "attention_mask": None,
                "past_key_values": None,
                **call,
                "position_ids": position_ids,
                "paged": paged,
                "position_embeddings": self._rotate(hidden, position_ids, paged),
            }
            for layer in self._held:
                hidden = layer(hidden, **asked)
        return _Output(self.norm(hidden))

    def _rotate(self, hidden: Tensor, position_ids: Tensor, paged: PagedCall) -> tuple[Tensor, Tensor]:
        if self._rotary_cache is None:
            cos, sin = self.rotary_emb(hidden, position_ids=position_ids)
            return cos, sin
        inputs = paged.inputs
        return self._rotary_cache.of(inputs.position_ids, max(span.end for span in inputs.spans), hidden)


def _is(module: nn.Module, known: type[nn.Module]) -> bool:
    """Whether the forward is that one and means the same: what it names outside of itself is the same too."""
    if not runs(module, known):
        return False
    ours, theirs = inspect.unwrap(type(module).forward), inspect.unwrap(known.forward)
    names = [name for name in theirs.__code__.co_names if name in theirs.__globals__]
    return all(ours.__globals__.get(name) is theirs.__globals__[name] for name in names)


def embody(module: nn.Module, name: str) -> bool:
    """Puts a body in the place of the submodule of that name, if its forward is a known one; whether it did.

    Call it after missing layers and all other rewrites are in place.
    """
    base: Any = module.get_submodule(name)
    if not any(_is(base, known) for known in _KNOWN) or type(base.embed_tokens) not in (nn.Embedding, MissingLayer):
        return False
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, Body(base))
    return True


def bare_head(module: nn.Module, name: str) -> nn.Module | None:
    """The submodule of that name, if its output is all that the model makes of the base model's; else None."""
    return module.get_submodule(name) if any(_is(module, known) for known in _WITH_BARE_HEADS) else None
