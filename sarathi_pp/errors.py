"""All errors of the runtime, as one tree. Each class has its exit code.

    SarathiError                     70
    +-- ConfigError                   2   an option, or a combination of options, that cannot work
    |   +-- OptionError               2   a value that an option does not take
    |   +-- UnsupportedModelError     2   an architecture or feature that is not proven exact
    |   +-- PartitionError            2   layers and stages that do not fit each other
    |   +-- CapacityError             2   memory that is too small for the requested run
    +-- InputError                   65   a file that exists and cannot be used
    +-- MissingError                 66   a file, shard or tensor that does not exist
    +-- ProtocolError                70   a wire message that does not match its header
    +-- PolicyError                  70   a policy that breaks the rules of scheduling
    +-- OutputError                  74   output that cannot be written
    +-- PeerLostError                75   a stage died or stopped answering. The run can be resumed
    |   +-- StalledError             75   a stage hangs in one layer. 2 if the previous start ended the same way
    +-- MemoryLostError              75   no memory for a microbatch during the run. 2 as for StalledError
    +-- StoppedError                 75   a signal ended the run, which can be resumed (130 for Ctrl-C)
    +-- UnsafeError                  77   refused for safety: pickled weights, remote code, paths that escape
    RowError                              one input line that gets an error line. The run continues (exit 3)

A message states the problem with the value, the limit and the remedy.
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
    """A value that an argument of the Python API and its option of the command do not accept.

    Args:
        name: the argument of the Python API.
        option: the option of the command.
        value: the value that was given.
        allowed: the legal values, in words.
    """

    def __init__(self, name: str, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{name}={value!r}: it must be {allowed}")
        self.name = name
        self.for_command = f"{option} is {value!r}; it must be {allowed}"
        self._given = name, option, value, allowed

    def renamed(self, name: str) -> OptionError:
        """Return the same error under another name of the argument, such as an alias that the user wrote."""
        _, option, value, allowed = self._given
        return OptionError(name, option, value, allowed)

    def __reduce__(self) -> tuple[type[OptionError], tuple[str, str, object, str]]:
        """Return the parts from which another process makes this error again (for pickle)."""
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
    """A stage whose process runs but hangs in one layer.

    Args:
        at_start: see SarathiError.
    """

    def __init__(self, message: str, *, at_start: bool = False) -> None:
        super().__init__(message)
        self.at_start = at_start


class MemoryLostError(SarathiError):
    exit_code = 75

    def __init__(self, message: str, *, at_start: bool = False) -> None:
        super().__init__(message)
        self.at_start = at_start


def signal_name(number: int) -> str:
    """Return the name of a signal. A real-time signal has no name in Python, so return its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class StoppedError(SarathiError):
    exit_code = 75

    @classmethod
    def by(cls, number: int, where: str) -> StoppedError:
        """Return the error for a signal.

        Args:
            number: number of the signal. Ctrl-C (SIGINT) changes the exit code to 130.
            where: the part of the program that was stopped, such as "the run". It begins the message.
        """
        error = cls(f"{where} was stopped by {signal_name(number)}")
        if number == signal.SIGINT:
            error.exit_code = EXIT_INTERRUPTED
        return error


class UnsafeError(SarathiError, PermissionError):
    exit_code = 77


def error_class(name: str) -> type[SarathiError]:
    """Return the error class with this name, such as `InputError`.

    Return SarathiError for an unknown name. Return ConfigError for `OptionError`, which needs more than a message.
    """
    kinds: list[type[SarathiError]] = [SarathiError]
    for kind in kinds:
        if kind.__name__ == name:
            return ConfigError if kind is OptionError else kind
        kinds += kind.__subclasses__()
    return SarathiError


class RowError(ValueError):
    """The error of one input line or prompt that cannot run. The other ones still run.

    Args:
        code: stable name of the reason, for programs, such as `empty_prompt`.
        message: the reason, for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
