"""Policies by name. `--policy NAME[:key=value,...]` builds one; unknown names and keys are errors."""

from __future__ import annotations

import dataclasses

from sarathi_pp.core.policy.orca import Orca
from sarathi_pp.core.policy.sarathi import Sarathi
from sarathi_pp.core.policy.view import Policy
from sarathi_pp.errors import ConfigError

POLICIES: dict[str, type[Sarathi] | type[Orca]] = {
    "orca": Orca,
    "sarathi": Sarathi,
}

USES_CHUNK_SIZE = frozenset({"sarathi"})


def make_policy(spec: str) -> Policy:
    """The policy that `NAME` or `NAME:key=value,...` names.

    Raises ConfigError naming the unknown name or key, or the value that is no integer, and the choices.
    """
    name, _, text = spec.partition(":")
    if name not in POLICIES:
        raise ConfigError(f"--policy {name!r} is not known; choose one of {', '.join(sorted(POLICIES))}")
    fields = {field.name for field in dataclasses.fields(POLICIES[name])}
    values: dict[str, int] = {}
    for pair in filter(None, text.split(",")):
        key, _, value = pair.partition("=")
        if key not in fields:
            takes = ", ".join(sorted(fields)) or "none"
            raise ConfigError(f"--policy {spec}: {name} has no parameter {key!r}; it takes: {takes}")
        try:
            values[key] = int(value)
        except ValueError:
            raise ConfigError(f"--policy {spec}: {key} is {value!r}; it must be an integer") from None
    return POLICIES[name](**values)
