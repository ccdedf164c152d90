"""Attention over the paged KV of a whole microbatch. The backend is chosen once, by name, at the start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sarathi_pp.errors import ConfigError
from sarathi_pp.model.attention.sdpa import SdpaAttention
from sarathi_pp.model.attention.spec import AttentionSpec
from sarathi_pp.model.inputs import StageInputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.triton_available import why_no_kernels


class AttentionBackend(Protocol):
    """Causal attention of T query rows (tokens) over pages that already hold the rows' own keys and values.

    Attributes:
        name: the value of --attention that chooses it.
        page_multiple: tokens; the page size must be a multiple of it.
        default_page_size: tokens per page, if the user gives no page size.
    """

    @property
    def name(self) -> str: ...
    @property
    def page_multiple(self) -> int: ...
    @property
    def default_page_size(self) -> int: ...

    def __call__(self, query: Tensor, kv: KVShard, layer: int, inputs: StageInputs, spec: AttentionSpec) -> Tensor:
        """Return the (T, H, value_dim) attention output of a layer, in the queries' dtype.

        Args:
            query: (T, H, D), H heads of D channels, after the rotary embedding.
            layer: index of the layer in the whole model, from 0.
        """
        ...


class CapturableAttention(AttentionBackend, Protocol):
    """Attention that launches the same kernels at the same addresses for every microbatch, as a CUDA graph needs it."""

    def load(self, inputs: StageInputs) -> None:
        """Prepare the next microbatch. Call it before the graph is replayed."""
        ...


@runtime_checkable
class CapturableBackend(Protocol):
    """A backend that a CUDA graph can capture."""

    def for_capture(
        self, num_tokens: int, num_seqs: int, longest: int, kv: KVShard, num_heads: int, windows: Iterable[int | None]
    ) -> CapturableAttention:
        """Return attention for microbatches of up to num_tokens and num_seqs, each sequence of up to `longest` tokens.

        Args:
            windows: sliding windows of the layers, in tokens; None for a layer without one.
        """
        ...


@dataclass(frozen=True, slots=True)
class Needs:
    """The features of a model that an attention backend must support, besides causality and windows.

    Attributes:
        softcap: any layer bounds its attention scores by a soft cap.
        sinks: any layer has attention sinks: one more logit per head in the softmax, without a key or a value.
        latent: keys are latents, whose first channels are the values (MLA).
        float8_pages: keys and values are stored in FP8.
    """

    dtype: torch.dtype
    head_dim: int
    softcap: bool
    sinks: bool
    latent: bool = False
    float8_pages: bool = False


_NO_LATENTS = "does not support latent attention, which this model has"


@dataclass(frozen=True, slots=True)
class _Known:
    """A backend that can be chosen by name.

    Attributes:
        make: makes the backend. It imports what the backend needs, which may be an optional package and slow.
        package: package that the backend needs; None if it needs none.
        extra: the extra of sarathi-pp that installs the package.
        works: returns why the backend does not work on a device, or None if it does.
        takes: returns why the backend does not support a model, or None if it does.
    """

    make: Callable[[], AttentionBackend]
    device_types: tuple[str, ...]
    package: str | None = None
    extra: str | None = None
    works: Callable[[torch.device], str | None] = lambda device: None
    takes: Callable[[Needs], str | None] = lambda needs: None


def _numba() -> AttentionBackend:
    from sarathi_pp.model.attention.numba import NumbaAttention

    return NumbaAttention()


def _triton() -> AttentionBackend:
    from sarathi_pp.model.attention.triton import TritonAttention

    return TritonAttention()


def _flash() -> AttentionBackend:
    from sarathi_pp.model.attention.flash import FlashAttention

    return FlashAttention()


def _varlen() -> AttentionBackend:
    from sarathi_pp.model.attention.flash import VarlenAttention

    return VarlenAttention()


def _flash_takes(needs: Needs) -> str | None:
    if needs.float8_pages:
        return "reads no keys and values in FP8 (--kv-cache-dtype fp8)"
    if needs.latent:
        return _NO_LATENTS
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not {str(needs.dtype).removeprefix('torch.')}"
    if needs.head_dim > 256 or needs.head_dim % 8:
        return f"takes heads of up to 256 channels in steps of 8, not of {needs.head_dim}"
    return None


def _triton_takes(needs: Needs) -> str | None:
    return _NO_LATENTS if needs.latent else None


def _varlen_takes(needs: Needs) -> str | None:
    if needs.softcap or needs.sinks:
        return f"supports no {'soft cap of scores' if needs.softcap else 'attention sinks'}, which this model has"
    return _flash_takes(needs)


def _flash_works(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= (8, 0) else "needs compute capability 8.0 or more"


def _varlen_works(device: torch.device) -> str | None:
    major, minor = torch.__version__.split(".")[:2]
    if (int(major), int(minor)) < (2, 12):
        return f"reads pages since torch 2.12; this is {torch.__version__}"
    return _flash_works(device)


# The backends by name, in the order in which `auto` tries them.
BACKENDS: dict[str, _Known] = {
    "numba": _Known(_numba, ("cpu",), "numba", "cpu"),
    "triton": _Known(_triton, ("cuda",), "triton", "gpu", works=why_no_kernels, takes=_triton_takes),
    "flash": _Known(_flash, ("cuda",), "flash_attn", "flash", works=_flash_works, takes=_flash_takes),
    "varlen": _Known(_varlen, ("cuda",), works=_varlen_works, takes=_varlen_takes),
    "sdpa": _Known(SdpaAttention, ("cpu", "cuda")),
}

_log = logging.getLogger(__name__)


def choose_backend(
    name: str, device: torch.device, page_size: int | None, needs: Needs | None = None
) -> AttentionBackend:
    """Return the backend called `name`. Log one line: the backend, and why no earlier one of BACKENDS was chosen.

    `auto` chooses the first of BACKENDS that is installed, runs on the device and supports the model.

    Args:
        page_size: tokens per page; None for the backend's default_page_size.
        needs: features that the model needs; None without a model.

    Raises:
        ConfigError: the name is unknown, or the backend cannot run the model here. The message names the remedy.
    """
    choices = ", ".join(["auto", *BACKENDS])
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"--attention is {name!r}; it must be one of {choices}")
    passed_over: list[str] = []
    for known in [name] if name != "auto" else BACKENDS:
        reason = why_not(known, device, needs)
        if reason is None:
            break
        passed_over.append(f"{known} {reason}")
    else:
        remedy = f"try another of {choices}" if name != "auto" else "try --device cpu"
        raise ConfigError(f"--attention {'; '.join(passed_over)}; {remedy}")
    backend = BACKENDS[known].make()
    if page_size is not None and page_size % backend.page_multiple:
        raise ConfigError(
            f"--page-size is {page_size}; --attention {backend.name} needs a multiple of "
            f"{backend.page_multiple} (auto: {backend.default_page_size})"
        )
    _log.info(
        "attention %s for %s on %s (%s)", backend.name, name, device, "; ".join(passed_over) or "the first choice"
    )
    return backend


def why_not(name: str, device: torch.device, needs: Needs | None) -> str | None:
    """Return why the backend called `name` cannot run the model on the device, or None if it can.

    The cheapest checks come first, and nothing is imported for a backend that does not run.

    Args:
        needs: features that the model needs; None without a model.
    """
    known = BACKENDS[name]
    if device.type not in known.device_types:
        return f"runs on {' or '.join(known.device_types)}, not on {device.type}"
    if known.package is not None and find_spec(known.package) is None:
        return f"needs the package {known.package} (pip install 'sarathi-pp[{known.extra}]')"
    return known.works(device) or (known.takes(needs) if needs is not None else None)
