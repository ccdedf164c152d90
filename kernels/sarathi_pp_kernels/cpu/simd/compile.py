"""Compilation of kernels that use SIMD."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np

from sarathi_pp_kernels.cpu.simd.cache import KernelCache

# Sums may be reordered, so that loops use SIMD. "fast" would allow more, such as to drop a NaN. But a NaN must stay, so
# that a broken sequence is noticed.
_SETTINGS = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz", "arcp"}}
_FOLDER = Path(__file__).parent
_PACKAGE = __name__.partition(".")[0]
# Settings of numba that change machine code. Its code generator names processor and features.
_OF_NUMBA = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype)


def compiled(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator as `numba.njit` does. Its kernels let other threads run, and keep their machine code in files.

    If no folder for the files can be written, a kernel is compiled at each start. The function's name gets a digest of
    all that decides its code. So two kernels never share a file or, in one process, a symbol.

    Args:
        options: options of `numba.njit`, in addition to _SETTINGS.
    """
    settings = {**_SETTINGS, **options}

    def decorate(function: Any) -> Any:
        identity = identity_of(function, settings)
        if identity is None:
            return numba.njit(**settings)(function)
        named = _renamed(function, f"{function.__name__}_{identity.hex()[:16]}")
        kernel = numba.njit(**settings)(named)
        try:
            kernel._cache = KernelCache(named, identity)
        except RuntimeError:  # no such folder: compile at each start
            pass
        return kernel

    return decorate


def inlined(function: Any) -> Any:
    """Return a function that kernels can call. Its code becomes a part of theirs."""
    return numba.njit(**_SETTINGS, inline="always")(function)


def identity_of(function: Any, settings: dict[str, Any]) -> bytes | None:
    """Return a digest of all that decides a kernel's machine code, except its signature and the processor.

    It covers the source of simd/, of the function's module, and of each module of this package from which that module
    has names. It covers the constants of that module and the values that the function closes over, and versions and
    settings of the compiler. It is None if two different values that the function closes over could have the same text.
    """
    closed_over = _closed_over(function)
    told = {name: _told(value, function) for name, value in closed_over.items()}
    if None in told.values():
        return None
    known = {name: value for name, value in function.__globals__.items() if not name.startswith("__")}
    constants = sorted((name, repr(value)) for name, value in known.items() if _is_plain(value))
    modules = {_module_of(value) for value in (*known.values(), *closed_over.values())}
    files = {Path(file) for module in modules if (file := _source(module)) is not None}
    files |= {*_FOLDER.glob("*.py"), Path(function.__code__.co_filename)}
    options = sorted((name, sorted(value) if isinstance(value, set) else value) for name, value in settings.items())
    numba_options = [(name, str(getattr(numba.config, name, None))) for name in _OF_NUMBA]
    text = repr(
        (function.__module__, function.__qualname__, sorted(told.items()), constants, options)
        + (sys.version, numba.__version__, llvmlite.__version__, numba_options)
    )
    try:
        return sha256(b"".join([text.encode(), *map(_digest_of, sorted(files))])).digest()
    except OSError:  # a function without a file
        return None


def _closed_over(function: Any) -> dict[str, Any]:
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def _told(value: Any, kernel: Any) -> str | None:
    """Return a text that tells a value from all others that a kernel may close over; None if there is none.

    The text of a function inside a function has its name and all that it closes over. The function must be of the
    kernel's module, because the identity covers the constants of that module.
    """
    if _is_plain(value):
        return repr(value)
    if (name := _of_module(value)) is not None:
        return name
    inner = getattr(value, "py_func", value)
    if not isinstance(inner, FunctionType) or inner.__module__ != kernel.__module__ or inner.__defaults__:
        return None
    told = {name: _told(one, kernel) for name, one in _closed_over(inner).items()}
    return None if None in told.values() else repr((inner.__qualname__, sorted(told.items())))


def _module_of(value: object) -> str:
    return value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", None))


def _of_module(value: object) -> str | None:
    """Return the full name of a function that is defined in a module; None if it was defined inside a function."""
    name = getattr(value, "__qualname__", None)
    return f"{_module_of(value)}.{name}" if isinstance(name, str) and "<locals>" not in name else None


def _source(module: str) -> str | None:
    """Return the file of a module of this package; None for another module."""
    return getattr(sys.modules.get(module), "__file__", None) if module.partition(".")[0] == _PACKAGE else None


@cache
def _digest_of(file: Path) -> bytes:
    return sha256(file.name.encode() + b"\0" + file.read_bytes()).digest()


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _renamed(function: Any, name: str) -> Any:
    code = function.__code__.replace(co_name=name, co_qualname=name)
    named = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    named.__qualname__, named.__module__, named.__doc__ = name, function.__module__, function.__doc__
    return named
