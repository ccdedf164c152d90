"""Kernels run in Triton's interpreter here, on CPU tensors.

Triton decides by this variable when a kernel is defined, so it has to be set before the first import of one, which is
when pytest collects the modules below. Whoever compiles kernels does so in a process without it.
"""

import os
from importlib.util import find_spec
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

# Where there is none, as on a Mac, nothing in triton/ can be imported; in CI that is an error.
if find_spec("triton") is None and not os.environ.get("CI"):
    collect_ignore_glob = ["triton/test_*.py"]
else:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_and_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 makes integers of arrays of one element in a way that numpy 2.4 no longer allows; 3.7 as here."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_and_index
