"""A check whether the Triton kernels of sarathi_pp_kernels run on a device."""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch

from sarathi_pp.errors import StoppedError

# The lowest compute capability. Below it, tensor cores have no bfloat16, and no kernel here was ever compiled for less.
_LEAST_CAPABILITY = (8, 0)

_log = logging.getLogger(__name__)


def has_kernels(device: torch.device) -> bool:
    return why_no_kernels(device) is None


@cache
def why_no_kernels(device: torch.device) -> str | None:
    """Return why our Triton kernels do not run on a device, or None if they do.

    The reason continues a sentence that begins with "triton", such as "is not installed". Without the kernels, torch's
    own operations do the work.

    Triton comes with torch's builds for CUDA, but it compiles on the machine that runs it. So one kernel is compiled
    and run here. Otherwise a missing C compiler or missing headers would end a run at its first microbatch.
    """
    if device.type != "cuda":
        return "runs on cuda"
    if find_spec("triton") is None:
        return "is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"needs compute capability 8.0, and this device has {capability[0]}.{capability[1]}"
    try:
        _try_one(device)
    except StoppedError:
        raise
    except Exception as error:  # any error of compiler or driver: torch's operations still work
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        _log.warning("Triton cannot compile kernels here (%s); torch's own operations are used and are slower", reason)
        return f"cannot compile kernels here: {reason}"
    return None


def _try_one(device: torch.device) -> None:
    from sarathi_pp_kernels.triton.gate import silu_multiply  # triton is optional

    silu_multiply(torch.zeros(1, 2, device=device))
    torch.cuda.synchronize(device)
