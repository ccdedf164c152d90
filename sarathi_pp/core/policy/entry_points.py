"""Names of policies that installed distributions (Python packages) register.

A distribution registers a policy in its pyproject.toml:

    [project.entry-points."sarathi_pp.policies"]
    shortest-first = "my_package.policies:ShortestFirst"
"""

from __future__ import annotations

from sarathi_pp.errors import ConfigError

GROUP = "sarathi_pp.policies"


def installed_policies() -> dict[str, dict[str, str]]:
    """Return the policies that distributions register: name of the policy -> distribution -> module:Class."""
    from importlib.metadata import entry_points  # slow to import, and reads a file of every distribution

    registered: dict[str, dict[str, str]] = {}
    for point in entry_points(group=GROUP):
        owner = point.dist.name if point.dist is not None else "?"
        registered.setdefault(point.name, {})[owner] = f"{point.module}:{point.attr}"
    return registered


def choose_installed(name: str, registered: dict[str, str]) -> str:
    """Return the module:Class of a policy's name. Raises ConfigError if distributions register different ones for it.

    Args:
        registered: module:Class by distribution.
    """
    if len({*registered.values()}) > 1:
        owners = " and ".join(f"{path} of {owner}" for owner, path in sorted(registered.items()))
        raise ConfigError(
            f"--policy {name}: several policies have this name: {owners}; give the right one as module:Class"
        )
    return next(iter(registered.values()))
