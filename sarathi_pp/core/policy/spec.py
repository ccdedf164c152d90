"""The text that names a policy, parsed once.

sarathi                                a policy of this package, or one that an installed package registers
sarathi:even=1                         with parameters: key=value, separated by commas
package.module:Class                   a class that can be imported
package.module:Class:key=value         with parameters
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sarathi_pp.core.policy.parameter import parameters_of, read_parameter
from sarathi_pp.core.policy.registry import find_class, is_built_in
from sarathi_pp.core.policy.view import Limits, Policy, class_name, max_tokens_of
from sarathi_pp.errors import ConfigError, PolicyError, StoppedError


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The name of a policy with checked parameters. `str` returns the text from which it was parsed.

    Args:
        kind: the policy's class. Its class attributes declare what the policy needs.
        parameters: the parameters as in the text, each "key=value".

    Raises:
        ConfigError: a key is given twice, or a key or value is not legal. The message gives the choices.
    """

    name: str
    kind: type[Policy]
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._values()

    def __str__(self) -> str:
        return f"{self.name}:{','.join(self.parameters)}" if self.parameters else self.name

    def make(self) -> Policy:
        """Return a new policy object. A policy may keep state, so each coordinator needs its own.

        Raises:
            PolicyError: the constructor of the policy failed.
        """
        try:
            return self.kind(**self._values())
        except StoppedError:
            raise
        except Exception as error:
            raise PolicyError(f"--policy {self}: making it failed with {type(error).__name__}: {error}") from error

    def max_tokens(self, limits: Limits) -> int:
        """Return the most tokens of one microbatch under these limits. Raises PolicyError if the policy fails."""
        return max_tokens_of(self.make(), limits)

    @property
    def source(self) -> str:
        """Text that must be equal on all ranks: the policy's name, or for a user's class its name and file digest."""
        if is_built_in(self.name):
            return self.name
        with suppress(OSError, TypeError):
            digest = hashlib.sha256(Path(inspect.getfile(self.kind)).read_bytes()).hexdigest()[:12]
            return f"{class_name(self.kind)} in a file with SHA-256 {digest}..."
        return class_name(self.kind)

    def inflight(self, num_stages: int) -> int:
        """Return the most microbatches in flight, unless the user or a profile sets another number."""
        return num_stages + (self.kind.spare_microbatches if num_stages > 1 else 0)

    @property
    def keeps_tbt_slo(self) -> bool:
        """Return whether the policy can keep a bound on the time between tokens."""
        return "tbt_slo" in parameters_of(self.kind)

    def with_tbt_slo(self, seconds: float) -> PolicySpec:
        """Return the policy with a bound on the time between tokens. Raises ConfigError if it cannot keep one."""
        if not self.keeps_tbt_slo:
            raise ConfigError(
                f"--tbt-slo {seconds:g}: {self.name} keeps no bound on the time between tokens; balanced does"
            )
        return dataclasses.replace(self, parameters=(*self.parameters, f"tbt_slo={seconds!r}"))

    def _values(self) -> dict[str, float]:
        fields = parameters_of(self.kind)
        values: dict[str, float] = {}
        for pair in self.parameters:
            key, _, value = pair.partition("=")
            if key not in fields:
                takes = ", ".join(sorted(fields)) or "none"
                raise ConfigError(f"--policy {self}: {self.name} has no parameter {key!r}; it takes: {takes}")
            if key in values:
                raise ConfigError(f"--policy {self}: {key} is given twice")
            try:
                values[key] = read_parameter(fields[key], value)
            except ValueError as error:
                raise ConfigError(f"--policy {self}: {key} is {value!r}; it must be {error}") from None
        return values


@cache
def parse_policy(text: str) -> PolicySpec:
    """Return the policy that the text names. Raises ConfigError like PolicySpec and `find_class`.

    The first call for a text checks it. Later calls return the same value, so a configuration can hold just the text.
    """
    name, _, parameters = text.partition(":")
    if not is_built_in(name):
        attribute, _, rest = parameters.partition(":")
        if attribute and "=" not in attribute:
            name, parameters = f"{name}:{attribute}", rest
    return PolicySpec(name, find_class(name), tuple(filter(None, parameters.split(","))))


def with_tbt_slo(text: str, seconds: float) -> str:
    """Return the text of the policy with a bound on the time between tokens. Raises ConfigError if it cannot keep one.

    If the policy is not found, return the text unchanged. This function runs while options are read. A rank that ended
    now could not tell the other ranks why. The check of the configuration refuses the policy later.
    """
    try:
        policy = parse_policy(text)
    except ConfigError:
        return text
    return str(policy.with_tbt_slo(seconds))


def parse_recorded(text: str) -> PolicySpec | None:
    """Return the policy that a trace or a report names, or None if it is not one of this package.

    A trace is data, from any source. So no module is imported because a trace names it.
    """
    if not is_built_in(text.partition(":")[0]):
        return None
    try:
        return parse_policy(text)
    except ConfigError:
        return None
