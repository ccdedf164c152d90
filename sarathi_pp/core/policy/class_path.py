"""Load the class of a policy from `package.module:Class`, and check that it keeps the rules of policies.

A module that is not installed may be in the current directory. The console script and the workers (`python -P`) leave
that directory out of Python's search, so it is added as a last resort. No file there hides an installed module.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import ClassVar, get_origin, get_type_hints

from sarathi_pp.core.policy.view import Policy
from sarathi_pp.errors import ConfigError, StoppedError

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
# Names of the attributes that declare a policy's needs, and the least legal numbers.
_ATTRIBUTES = [name for name, hint in get_type_hints(Policy).items() if get_origin(hint) is ClassVar]
_LEAST = {"default_chunk_size": 1, "spare_microbatches": 0}


class _Importing(threading.local):
    """The modules that this thread is importing for a policy."""

    def __init__(self) -> None:
        self.modules: list[str] = []


_importing = _Importing()


def module_being_imported() -> str | None:
    """Return the module that this thread is importing to load a policy; None if it is importing none.

    A program may name a policy in its own file. Loading the policy then imports that file a second time. If the file
    starts a run at its top level, this import would start another run, and so on without end.
    """
    return _importing.modules[-1] if _importing.modules else None


def load_class(path: str, name: str) -> type[Policy]:
    """Return the class that module:Class names.

    Args:
        path: module:Class.
        name: the user's text, for errors.

    Raises:
        ConfigError: the class cannot be imported, is no policy, lacks a method or needs arguments. Or one of the class
            attributes that declare its needs has an illegal value.
    """
    if re.fullmatch(f"{_DOTTED}:{_DOTTED}", path) is None:
        raise ConfigError(f"--policy {name}: {path} names no class; give package.module:Class, as Python imports it")
    module, _, attribute = path.partition(":")
    kind: object = _import(module, name)
    for part in attribute.split("."):
        if not hasattr(kind, part):
            raise ConfigError(f"--policy {name}: {module} has no {attribute}; its policies are: {_policies_in(module)}")
        kind = getattr(kind, part)
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise ConfigError(f"--policy {name}: {path} is no policy; derive the class from sarathi_pp.core.policy.Policy")
    if kind.__abstractmethods__:
        missing = " and ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"--policy {name}: {path} lacks {missing}; a policy defines pick and max_tokens")
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise ConfigError(f"--policy {name}: {path} is {error}; give each field of a policy a default") from None
    _check_attributes(kind, f"--policy {name}: {path}")
    return kind


def _check_attributes(kind: type[Policy], where: str) -> None:
    """Check the class attributes that declare a policy's needs. Errors start with `where`."""
    fields: list[str] = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    for attribute in _ATTRIBUTES:
        expected = type(getattr(Policy, attribute))
        value = getattr(kind, attribute)
        if attribute in fields:
            raise ConfigError(
                f"{where}.{attribute} is a field of a dataclass; it must be a class variable: "
                f"write {attribute}: ClassVar[{expected.__name__}]"
            )
        if type(value) is not expected or value < _LEAST.get(attribute, value):
            least = f" and at least {_LEAST[attribute]}" if attribute in _LEAST else ""
            raise ConfigError(f"{where}.{attribute} is {value!r}; it must be of type {expected.__name__}{least}")


def _import(module: str, name: str) -> ModuleType:
    if module == "__main__":
        raise ConfigError(
            f"--policy {name}: the other processes of a run cannot import __main__; put the class into its own module"
        )
    _importing.modules.append(module)
    try:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module.partition(".")[0]:
                raise
        with _in_current_directory():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _import_error(module, name, error) from error
        raise ConfigError(
            f"--policy {name}: there is no module {error.name}; install it, add its folder to PYTHONPATH, or start in "
            f"that folder"
        ) from None
    except SystemExit as error:
        raise ConfigError(
            f"--policy {name}: {module} ends the program when it is imported; put what it runs below "
            f'if __name__ == "__main__":'
        ) from error
    except StoppedError:  # a signal came meanwhile
        raise
    except Exception as error:
        raise _import_error(module, name, error) from error
    finally:
        _importing.modules.pop()


@contextmanager
def _in_current_directory() -> Iterator[None]:
    """Let imports also search the current directory, after all other places.

    If the import in the `with` block succeeds, later imports search it too, since a policy may import modules later.
    """
    try:
        here = os.getcwd()
    except OSError:  # the directory was removed
        here = ""
    searched = not here or here in sys.path
    if not searched:
        sys.path.append(here)
    try:
        yield
    except BaseException:
        if not searched:
            sys.path.remove(here)
        raise


def _import_error(module: str, name: str, error: Exception) -> ConfigError:
    what = f"{type(error).__name__}: {error}"
    return ConfigError(f"--policy {name}: importing {module} failed with {what}; see python -c 'import {module}'")


def _policies_in(module: str) -> str:
    """Return the names of the policies that a module defines, for an error message."""
    kinds = vars(sys.modules[module]).values()
    names = {kind.__name__ for kind in kinds if isinstance(kind, type) and issubclass(kind, Policy)}
    return ", ".join(sorted(names - {Policy.__name__})) or "none"
