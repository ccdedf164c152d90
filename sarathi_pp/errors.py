"""All errors of the runtime, as one tree. Each class has its exit code.

    SarathiError                     70
    +-- ConfigError                   2   an option, or a combination of options, that cannot work
    |   +-- OptionError               2   a value that an option does not take
    |   +-- UnsupportedModelError     2   an architecture or feature that is not proven exact
    |   +-- PartitionError            2   layers and stages that do not fit each other
    |   +-- CapacityError             2   memory that cannot hold what was asked
    +-- InputError                   65   a file that is there and cannot be used
    +-- MissingError                 66   a file, shard or tensor that is not there
    +-- ProtocolError                70   a wire message that is not what its header says
    +-- PolicyError                  70   a policy that breaks the rules of scheduling
    +-- OutputError                  74   output that cannot be written
    +-- PeerLostError                75   a stage died or fell silent; the run can be resumed
    |   +-- StalledError             75   a stage does not leave one layer; 2 if the start before it ended the same way
    +-- MemoryLostError              75   no memory for a microbatch during the run; 2 as for StalledError
    +-- StoppedError                 75   a signal ended the run; it can be resumed (130 where it was Ctrl-C)
    +-- UnsafeError                  77   refused for safety: pickled weights, remote code, paths that escape
    RowError                              one input line that gets an error line; the run continues (exit 3)

A message says what is wrong, with the value, the limit and what to do.
"""

from __future__ import annotations

import signal

EXIT_OK = 0
EXIT_ROWS_FAILED = 3
EXIT_INTERRUPTED = 130


class SarathiError(Exception):
    """An error whose message is meant for the user. It is shown without a traceback.

    Attributes:
        exit_code: exit code of the command that ends with this error.
        agreed: every rank raises this same error, so only rank 0 shows it.
        at_start: the error ended a stage before its first microbatch was done. If a second start ends in the same way,
            a third one will not help.
    """

    exit_code = 70
    agreed = False
    at_start = False


class ConfigError(SarathiError, ValueError):
    exit_code = 2


class OptionError(ConfigError):
    """A value that an argument of the Python API does not take, nor the command's option for it.

    Args:
        name: the argument of the Python API.
        option: the command's option for it.
        value: the value that was given.
        allowed: the legal values, in words.
    """

    def __init__(self, name: str, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{name}={value!r}: it must be {allowed}")
        self.name = name
        self.for_command = f"{option} is {value!r}; it must be {allowed}"
        self._given = name, option, value, allowed

    def renamed(self, name: str) -> OptionError:
        """Return the error with another name of the argument."""
        _, option, value, allowed = self._given
        return OptionError(name, option, value, allowed)

    def __reduce__(self) -> tuple[type[OptionError], tuple[str, str, object, str]]:
        """Let a pool of processes pass it on."""
        return type(self), self._given


class UnsupportedModelError(ConfigError):
    pass


class PartitionError(ConfigError):
    pass


class CapacityError(ConfigError):
    pass


class InputError(SarathiError, ValueError):
    exit_code = 65


class MissingError(SarathiError, FileNotFoundError):
    exit_code = 66


class ProtocolError(SarathiError):
    exit_code = 70


class PolicyError(SarathiError):
    exit_code = 70


class OutputError(SarathiError, OSError):
    exit_code = 74


class PeerLostError(SarathiError, ConnectionError):
    exit_code = 75


class StalledError(PeerLostError):
    """A stage whose process runs but does not leave one layer. at_start: see SarathiError."""

    def __init__(self, message: str, *, at_start: bool = False) -> None:
        super().__init__(message)
        self.at_start = at_start


class MemoryLostError(SarathiError):
    exit_code = 75

    def __init__(self, message: str, *, at_start: bool = False) -> None:
        super().__init__(message)
        self.at_start = at_start


def signal_name(number: int) -> str:
    """Return a signal's name, or its number for a real-time signal, which has no name in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class StoppedError(SarathiError):
    exit_code = 75

    @classmethod
    def by(cls, number: int, where: str) -> StoppedError:
        error = cls(f"{where} was stopped by {signal_name(number)}")
        if number == signal.SIGINT:
            error.exit_code = EXIT_INTERRUPTED
        return error


class UnsafeError(SarathiError, PermissionError):
    exit_code = 77


def error_class(name: str) -> type[SarathiError]:
    """Return the class of this name. SarathiError if the tree has no such class."""
    kinds: list[type[SarathiError]] = [SarathiError]
    for kind in kinds:
        if kind.__name__ == name:
            return ConfigError if kind is OptionError else kind  # OptionError is made from other values than its text
        kinds += kind.__subclasses__()
    return SarathiError


class RowError(ValueError):
    """One request that cannot run.

    Args:
        code: stable name of the reason, for programs.
        message: the reason, for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
