"""Kernels run in Triton's interpreter here, on CPU tensors.

Triton decides by this variable when a kernel is defined, so it has to be set before the first import of one, which is
when pytest collects the modules beside this file. Whoever compiles kernels does so in a process without it.
"""

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter  # noqa: E402

_patch = interpreter._patch_lang_tensor


def _patch_and_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 makes integers of arrays of one element in a way that numpy 2.4 no longer allows; 3.7 as here."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_and_index
