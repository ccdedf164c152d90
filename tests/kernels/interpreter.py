"""Triton's interpreter, made quicker and right with any numpy."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch_tensor, _patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
# What the launch that runs now has patched, by the modules whose functions asked for it.
_scopes: dict[int, Any] = {}


class _LaunchScope:
    def restore(self) -> None:
        """Called by the interpreter when a launch has ended."""
        while _scopes:
            _scopes.popitem()[1].restore()


def _patch_once(function: Any) -> _LaunchScope:
    """Patch what the function's module sees of triton.language, once in a launch.

    The interpreter asks for it again each time that a kernel calls a function.
    """
    module = id(function.__globals__)
    if module not in _scopes:
        _scopes[module] = _patch_language(function)
    return _LaunchScope()


def _patch_and_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 makes integers of arrays of one element in a way that numpy 2.4 no longer allows; 3.7 as here."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def improve() -> None:
    """Once or more often, in a process where TRITON_INTERPRET was set before triton was imported."""
    interpreter._patch_lang, interpreter._patch_lang_tensor = _patch_once, _patch_and_index
