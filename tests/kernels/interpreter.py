"""Triton's interpreter, made quicker and right with any numpy."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch_tensor, _patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
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


def improve() -> None:
    """Patch the interpreter, once or repeatedly. TRITON_INTERPRET must be set before triton is imported."""
    interpreter._patch_lang, interpreter._patch_lang_tensor = _patch_once, _patch_and_index
