"""Attention over the paged KV of a whole microbatch; the backend is chosen once, by name, at start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from sarathi_pp.errors import ConfigError
from sarathi_pp.model.attention.sdpa import SdpaAttention
from sarathi_pp.model.inputs import StageInputs
from sarathi_pp.model.kv import KVShard


class AttentionBackend(Protocol):
    """Causal attention of T query rows over pages that already hold the rows' own keys and values.

    page_multiple: the page size must be a multiple of it. device_types: where it runs.
    """

    @property
    def name(self) -> str: ...
    @property
    def device_types(self) -> tuple[str, ...]: ...
    @property
    def page_multiple(self) -> int: ...
    @property
    def default_page_size(self) -> int: ...

    def __call__(
        self,
        query: Tensor,
        kv: KVShard,
        layer: int,
        inputs: StageInputs,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """(T, H, D) queries, rotated, give the (T, H, D) attention output in the queries' dtype.

        The row at position i sees the keys j of its own sequence with j <= i, and with a sliding window only
        i - sliding_window < j. softcap: scores become softcap * tanh(score / softcap). sinks: (H,), one more
        logit per head that takes part in the softmax's denominator and carries no value.
        """
        ...


def _numba() -> AttentionBackend:
    # Here, not above: it is an optional package, and a slow import.
    from sarathi_pp.model.attention.numba import NumbaAttention

    return NumbaAttention()


def _triton() -> AttentionBackend:
    # Here, not above: torch has it in its builds for CUDA alone, and it is a slow import.
    from sarathi_pp.model.attention.triton import TritonAttention

    return TritonAttention()


# The order in which `auto` tries them.
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"numba": _numba, "triton": _triton, "sdpa": SdpaAttention}
# Package of its own that a backend needs, and the extra that installs it.
EXTRAS = {"numba": ("numba", "cpu"), "triton": ("triton", "gpu")}

_log = logging.getLogger(__name__)


def choose_backend(name: str, device: torch.device, page_size: int | None) -> AttentionBackend:
    """The backend called `name`; `auto` takes the first of BACKENDS that is installed and runs on the device.

    page_size: None leaves it to the backend's default_page_size. Raises ConfigError for an unknown name, a
    package that is missing, a device that the backend does not run on, or a page size that it cannot take. Logs one
    line: the backend, and why none before it.
    """
    choices = ", ".join(["auto", *BACKENDS])
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"--attention is {name!r}; it must be one of {choices}")
    if name != "auto" and not _installed(name):
        package, extra = EXTRAS[name]
        raise ConfigError(f"--attention {name} needs the package {package}; try  pip install 'sarathi-pp[{extra}]'")
    passed_over: list[str] = []
    tried: list[AttentionBackend] = []
    for known in [name] if name != "auto" else BACKENDS:
        if not _installed(known):
            passed_over.append(f"{known} needs the package {EXTRAS[known][0]}")
            continue
        # Made only when its turn comes: those behind the one that runs are not imported.
        backend = BACKENDS[known]()
        if device.type in backend.device_types:
            break
        tried.append(backend)
        passed_over.append(f"{known} runs on {' or '.join(backend.device_types)}")
    else:
        raise ConfigError(
            f"--attention {name} does not run on device {device.type!r}; try one of {choices} on {_where(tried)}"
        )
    if page_size is not None and page_size % backend.page_multiple:
        raise ConfigError(
            f"--page-size is {page_size}; --attention {backend.name} needs a multiple of "
            f"{backend.page_multiple} (auto: {backend.default_page_size})"
        )
    _log.info(
        "attention %s for %s on %s (%s)", backend.name, name, device, "; ".join(passed_over) or "the first choice"
    )
    return backend


def _installed(name: str) -> bool:
    return name not in EXTRAS or find_spec(EXTRAS[name][0]) is not None


def _where(backends: list[AttentionBackend]) -> str:
    return " or ".join(sorted({device for backend in backends for device in backend.device_types}))
