"""Replacement of modules of a loaded stage by faster ones. The code of the models is not changed.

On CPU, if our own matrix product runs for their dtype (packed_linear.py, float_linear.py), bfloat16 and float32 modules
become those of cpu_modules.py. These are gated MLPs, RMSNorms, attention with rotary embedding, and the layers made of
them. Then experts (packed_experts.py) and every other linear layer are packed. On CUDA, if our Triton kernels run, the
same modules in any float dtype become those of cuda_modules.py. A module is recognised by its code. If its `forward` is
Llama's own, instruction by instruction, it computes the same as Llama's, whatever its name is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from sarathi_pp.model.fuse import cuda_modules
from sarathi_pp.model.fuse.cpu_modules import Block, GatedMLP, RotaryAttention, RowNorm
from sarathi_pp.model.fuse.float_linear import FloatLinear, has_float_gemm
from sarathi_pp.model.fuse.packed_experts import PackedExperts, can_pack_experts
from sarathi_pp.model.fuse.packed_linear import fits_gemm, has_gemm, packed_class
from sarathi_pp.model.triton_available import has_kernels

Rewrite = Callable[[Any], nn.Module]
# A parent, the name of its child, and the function that makes the new child.
Place = tuple[nn.Module, str, Rewrite]


@dataclass(frozen=True, slots=True)
class _Kit:
    """The new modules for a kind of device and dtypes, and checks for the modules that they can replace.

    Attributes:
        gated_mlp: makes the new module from the old one, as row_norm and attention do.
        takes_products: returns whether the new modules can compute these linear layers.
        takes_norm: returns whether the new RMSNorm can use this weight.
    """

    gated_mlp: Rewrite
    row_norm: type[nn.Module]
    attention: Callable[..., nn.Module]
    takes_products: Callable[..., bool]
    takes_norm: Callable[[Tensor], bool]
    head_step: int  # head_dim must be a multiple of it


def fuse(module: nn.Module, compute: torch.dtype | None = None, *, by_kernels: bool | None = None) -> int:
    """Replace all modules that can be replaced, and return how many there were.

    The model then needs the keyword argument `paged`, a PagedCall. Only one weight at a time is in memory twice. Gate
    and up count as one weight, and so do query, key and value. Weights that two modules share stay as they are, since
    packing would copy them. No module that is fused shares any.
    pack_tied_heads (packed_embedding.py) packs the LM heads that share their weight with an embedding.

    Args:
        compute: float type of the computation. On CPU, weights may have a narrower one. None: that of the weights.
        by_kernels: whether the new modules use our Triton kernels. None: if these run on the device of the weights.
    """
    if by_kernels is None:
        by_kernels = any(has_kernels(parameter.device) for parameter in module.parameters())
    if compute is None:
        compute = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)
    kit = _CUDA if by_kernels else _ON_CPU.get(compute)
    rewrites: list[Callable[[nn.Module], Rewrite | None]] = [
        *([partial(_part, kit)] if kit is not None else []),
        _layer,
    ]
    if not by_kernels:
        rewrites.append(partial(_experts, compute))
        rewrites.append(_packing(module, compute))
    count = 0
    for rewrite in rewrites:
        places = list(_places(module, rewrite))
        for parent, name, make in places:
            setattr(parent, name, make(getattr(parent, name)))
        count += len(places)
    return count


def _places(module: nn.Module, rewrite: Callable[[nn.Module], Rewrite | None]) -> Iterator[Place]:
    """Yield the places of modules that can be replaced, but not of modules inside them.

    A place is a parent and a name, not the module itself. A reference to the module would keep its weights in memory.

    Args:
        rewrite: returns the function that makes the new module, or None if a module stays.
    """
    parents = [module]
    seen = set(parents)
    while parents:
        parent = parents.pop()
        for name, child in parent.named_children():
            make = rewrite(child)
            if make is not None:
                yield parent, name, make
            elif child not in seen:
                parents.append(child)
                seen.add(child)


def _part(kit: _Kit, child: Any) -> Rewrite | None:
    """Return the function that makes the new module for a part of a layer, or None if the part stays."""
    if runs(child, llama.LlamaMLP) and type(child.act_fn) in (nn.SiLU, SiLUActivation):
        fits = kit.takes_products(child.gate_proj, child.up_proj) and kit.takes_products(child.down_proj)
        return kit.gated_mlp if fits else None
    if _is_row_norm(kit, child):
        return kit.row_norm
    # All but Llama's also pass a sliding window to attention. Ours ignores it, since AttentionSpec has the window.
    if any(runs(child, known) for known in (llama.LlamaAttention, MistralAttention, Qwen2Attention)):
        return kit.attention if _fits_one_pass(kit, child) else None
    if runs(child, Qwen3Attention):
        norms = child.q_norm, child.k_norm
        fits = all(_is_row_norm(kit, norm) and norm.weight.numel() == child.head_dim for norm in norms)
        same = norms[0].variance_epsilon == norms[1].variance_epsilon
        return partial(kit.attention, with_norms=True) if fits and same and _fits_one_pass(kit, child) else None
    return None


def _is_row_norm(kit: _Kit, child: Any) -> bool:
    return runs(child, llama.LlamaRMSNorm) and kit.takes_norm(child.weight)


def _layer(child: Any) -> Rewrite | None:
    fits = runs(child, llama.LlamaDecoderLayer) and type(child.post_attention_layernorm) in (
        RowNorm,
        cuda_modules.RowNorm,
    )
    return Block if fits else None


def _experts(compute: torch.dtype, child: Any) -> Rewrite | None:
    return partial(PackedExperts, compute=compute) if can_pack_experts(child, compute) else None


def _packing(module: nn.Module, compute: torch.dtype) -> Callable[[nn.Module], Rewrite | None]:
    owners: dict[int, int] = {}
    kept: set[nn.Module] = set()
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        if reads_weight(owner):  # Hunyuan's router asks its linear layer for the weight's dtype
            kept.update(owner.children())

    def rewrite(child: nn.Module) -> Rewrite | None:
        if type(child) is not nn.Linear or child in kept or owners[id(child.weight)] > 1:
            return None
        return packed_class(child, compute)

    return rewrite


def reads_weight(module: nn.Module) -> bool:
    """Return whether a module's forward reads an attribute named weight, which may be that of a child."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "weight" in code.co_names


def _fits_one_pass(kit: _Kit, attention: Any) -> bool:
    """Return whether the kit's module can replace this attention. Its rotary embedding must be Llama's."""
    inputs, out = (attention.q_proj, attention.k_proj, attention.v_proj), attention.o_proj
    if not kit.takes_products(*inputs) or not kit.takes_products(out) or attention.head_dim % kit.head_step:
        return False
    names = inspect.unwrap(type(attention).forward).__globals__
    return all(_same_code(names[name], getattr(llama, name)) for name in ("apply_rotary_pos_emb", "rotate_half"))


def runs(module: nn.Module, known: type[nn.Module]) -> bool:
    """Return whether a module's forward is that of a known class, instruction by instruction."""
    return _same_code(type(module).forward, known.forward)


def _same_code(ours: Any, theirs: Any) -> bool:
    ours, theirs = inspect.unwrap(ours), inspect.unwrap(theirs)
    names = ("co_code", "co_names", "co_consts")
    return hasattr(ours, "__code__") and all(
        getattr(ours.__code__, name) == getattr(theirs.__code__, name) for name in names
    )


def _all_fit_bf16(*linears: nn.Module) -> bool:
    return all(type(one) is nn.Linear and fits_gemm(one) for one in linears)


def _all_fit_float(*linears: nn.Module) -> bool:
    return all(
        type(one) is nn.Linear and packed_class(one, torch.float32) is FloatLinear and one.out_features % 16 == 0
        for one in linears
    )


def _fills_registers(weight: Tensor, dtype: torch.dtype, has_product: Callable[[], bool]) -> bool:
    return weight.dtype == dtype and weight.is_cpu and weight.numel() % 16 == 0 and has_product()


def _cpu_kit(dtype: torch.dtype, takes_products: Callable[..., bool], has_product: Callable[[], bool]) -> _Kit:
    return _Kit(
        partial(GatedMLP, dtype=dtype),
        RowNorm,
        partial(RotaryAttention, dtype=dtype),
        takes_products,
        lambda weight: _fills_registers(weight, dtype, has_product),
        head_step=32,  # a head must fill whole registers
    )


_ON_CPU = {
    torch.bfloat16: _cpu_kit(torch.bfloat16, _all_fit_bf16, has_gemm),
    torch.float32: _cpu_kit(torch.float32, _all_fit_float, has_float_gemm),
}
_CUDA = _Kit(
    cuda_modules.GatedMLP,
    cuda_modules.RowNorm,
    cuda_modules.RotaryAttention,
    cuda_modules.can_merge,
    lambda weight: weight.dtype in cuda_modules.DTYPES,
    head_step=2,
)
