"""Policies from outside this package: `package.module:Class`, or the name of an entry point.

A distribution registers a name in its pyproject.toml:

    [project.entry-points."sarathi_pp.policies"]
    shortest-first = "my_package.policies:ShortestFirst"
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from contextlib import suppress
from types import ModuleType

from sarathi_pp.core.policy.view import Policy
from sarathi_pp.errors import ConfigError

GROUP = "sarathi_pp.policies"
_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"


def installed_policies() -> dict[str, dict[str, str]]:
    """Return module:Class by distribution, by name, of all entry points in GROUP."""
    from importlib.metadata import entry_points  # slow to import, and reads a file of every distribution

    found: dict[str, dict[str, str]] = {}
    for point in entry_points(group=GROUP):
        owner = point.dist.name if point.dist is not None else "?"
        found.setdefault(point.name, {})[owner] = f"{point.module}:{point.attr}"
    return found


def choose_installed(name: str, registered: dict[str, str]) -> str:
    """Return the one module:Class of a name. Raises ConfigError if distributions registered different ones."""
    if len({*registered.values()}) > 1:
        owners = " and ".join(f"{path} of {owner}" for owner, path in sorted(registered.items()))
        raise ConfigError(f"--policy {name}: the name stands for {owners}; give the one you mean as module:Class")
    return next(iter(registered.values()))


def search_current_directory() -> None:
    """Let imports find modules in the current directory too, as `python -m` does.

    It comes last, so that no file there hides an installed package. The console script and the workers (`python -P`)
    leave it out.
    """
    with suppress(OSError):
        if (here := os.getcwd()) not in sys.path:
            sys.path.append(here)


def load_class(path: str, name: str) -> type[Policy]:
    """Return the class that module:Class names.

    Args:
        name: what the user gave, for errors.

    Raises:
        ConfigError: it cannot be imported, is no policy, lacks a method, or needs arguments to be made.
    """
    if re.fullmatch(f"{_DOTTED}:{_DOTTED}", path) is None:
        raise ConfigError(f"--policy {name}: {path} names no class; give package.module:Class, as Python imports it")
    module, _, attribute = path.partition(":")
    found: object = _import(module, name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"--policy {name}: {module} has no {attribute}; its policies are: {_policies_in(module)}")
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"--policy {name}: {path} is no policy; derive the class from sarathi_pp.core.policy.Policy")
    if found.__abstractmethods__:
        missing = " and ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"--policy {name}: {path} lacks {missing}; a policy defines pick and max_tokens")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ConfigError(f"--policy {name}: {path} is {error}; give each field of a policy a default") from None
    return found


def _import(module: str, name: str) -> ModuleType:
    if module == "__main__":
        raise ConfigError(
            f"--policy {name}: the other processes of a run cannot import __main__; put the class into its own module"
        )
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(module, name, error) from error
        raise ConfigError(
            f"--policy {name}: there is no module {error.name}; install it, add its folder to PYTHONPATH, or start in "
            f"that folder"
        ) from None
    except Exception as error:
        raise _failed(module, name, error) from error


def _failed(module: str, name: str, error: Exception) -> ConfigError:
    what = f"{type(error).__name__}: {error}"
    return ConfigError(f"--policy {name}: importing {module} failed with {what}; see python -c 'import {module}'")


def _policies_in(module: str) -> str:
    """Return the names of the policies that a module defines, for an error message."""
    kinds = vars(sys.modules[module]).values()
    names = {kind.__name__ for kind in kinds if isinstance(kind, type) and issubclass(kind, Policy)}
    return ", ".join(sorted(names - {Policy.__name__})) or "none"
