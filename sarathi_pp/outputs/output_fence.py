"""A fence that lets only the latest start of a run write its output.

File locks are not enough for this: on some file systems, other hosts do not see them.

    start A: writes its token   append   append              append is refused
    start B:                                 writes its token, waits, reads the output, append ...

The token is in a file next to the output, .OUTPUT.epoch. A start reads it again before each append. So a start that was
cut off from the network does not write after a later start has read the output. The file of the token is removed when
the run ends in order.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

from sarathi_pp.errors import PeerLostError
from sarathi_pp.trace.clock import SystemClock

# Seconds to wait after taking the fence, for an append of an earlier start that has just read its own token.
_SETTLE_S = 0.3


class Fence:
    """The right of one start to write an output, as a random token in a file next to the output."""

    def __init__(self, output: str) -> None:
        folder, name = os.path.split(os.path.realpath(output))
        self._output = output
        self._path = os.path.join(folder, f".{name}.epoch")
        self._token = secrets.token_hex(16).encode()

    def take(self) -> bool:
        """Write this start's token, which keeps earlier starts from writing the output.

        Returns:
            False if the token cannot be written. The run then continues without this protection.
        """
        partial = f"{self._path}.{secrets.token_hex(8)}.part"
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(self._token)
            earlier = os.path.exists(self._path)
            os.replace(partial, self._path)
        except OSError:
            with suppress(OSError):
                os.unlink(partial)
            return False
        if earlier:
            SystemClock().sleep(_SETTLE_S)
        return True

    def check(self) -> None:
        """Check that no later start has taken the output over.

        Raises:
            PeerLostError: another start has taken it over.
            OSError: the token cannot be read.
        """
        try:
            with open(self._path, "rb", buffering=0) as file:
                found = file.read()
        except FileNotFoundError:
            found = b""
        if found != self._token:
            raise PeerLostError(
                f"--output {self._output} was taken over by a later start of this run, so this start has ended"
            )

    def drop(self) -> None:
        """Remove the file of the token, if the token is still that of this start."""
        with suppress(OSError, PeerLostError):
            self.check()
            os.unlink(self._path)
