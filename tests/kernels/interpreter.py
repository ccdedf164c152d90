"""Triton's interpreter, made quicker and right with any numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor, _patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
_cast = interpreter.InterpreterBuilder.cast_impl
# The patches of the current launch, by the modules whose functions asked for them.
_scopes: dict[int, Any] = {}


class _LaunchScope:
    def restore(self) -> None:
        """Restore the patched modules; the interpreter calls this when a launch has ended."""
        while _scopes:
            _scopes.popitem()[1].restore()


def _patch_once(function: Any) -> _LaunchScope:
    """Patch triton.language in the function's module, once per launch.

    The interpreter asks for it again each time that a kernel calls a function.
    """
    module = id(function.__globals__)
    if module not in _scopes:
        _scopes[module] = _patch_language(function)
    return _LaunchScope()


def _patch_and_index(tensor: Any, scope: Any) -> None:
    """Patch integers of one-element arrays as Triton 3.7 does. Those of 3.6 fail with numpy 2.4."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _cast_rounded(self: Any, source: Any, target: Any) -> Any:
    """Round float32 to the nearest bfloat16, ties to even, as devices do. The interpreter truncates."""
    if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
        return _cast(self, source, target)
    bits = np.ascontiguousarray(source.data).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    rounded = np.where(np.isnan(source.data), np.uint32(0x7FC0), rounded)
    return interpreter.TensorHandle(rounded.astype(np.uint16).reshape(source.data.shape), target.scalar)


def improve() -> None:
    """Patch the interpreter, once or repeatedly. TRITON_INTERPRET must be set before triton is imported."""
    interpreter._patch_lang, interpreter._patch_lang_tensor = _patch_once, _patch_and_index
    interpreter.InterpreterBuilder.cast_impl = _cast_rounded
