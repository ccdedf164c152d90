"""The end of a rank's process, by a signal, by its watchdog or in order, and its exit code.

The code is written to the run directory before any message is shown, because a message may have to wait for its reader.
One cause has one message: a rank that only notices the end of another rank shows none.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sarathi_pp.config import RunConfig
from sarathi_pp.distributed.environment import RankEnvironment, heeded_mark, mesh_of, stopped_mark
from sarathi_pp.distributed.failure_cause import is_echo, report_cause
from sarathi_pp.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, PeerLostError, SarathiError, StoppedError
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.outputs.sink import OutputClosedError
from sarathi_pp.process.console import Console
from sarathi_pp.process.signals import Signals, ignore_signals
from sarathi_pp.process.watchdog import Watchdog
from sarathi_pp.wire.channel import COMMUNICATING


class Ending:
    """The facts that decide how a rank ends, and the actions at its end. The watchdog of the process calls `leave`.

    Args:
        console: shows errors to the user.
        scratch: a folder that holds the run directory and is removed at the end. No exit code is written there. None if
            the run directory is kept.
        how_to_resume: advice that is added to the message of a run that was stopped.
        speaks: False for a worker of a Python program. The worker then shows and records no error, because the program
            gets every error too.

    Attributes:
        code: the exit code if no error ends the process.
        run_dir: the run directory, to which the exit code is written. On ranks other than 0, None until rank 0 has
            named it.
        title: name of this rank in messages.
    """

    def __init__(
        self,
        env: RankEnvironment,
        config: RunConfig,
        console: Console,
        run_dir: RunDirectory | None = None,
        *,
        scratch: Path | None = None,
        how_to_resume: str | None = None,
        speaks: bool = True,
    ) -> None:
        self.env = env
        self.code = EXIT_OK
        self.run_dir = run_dir
        self.title = mesh_of(config).title(env.rank)
        self._replicas = config.replicas
        self._console = console
        self._scratch = scratch
        self._how_to_resume = how_to_resume
        self._speaks = speaks
        self.watchdog = Watchdog(self)
        launched = env.store is not None and env.rank > 0
        self.signals = Signals(self.title, self.watchdog, launched=launched, hurried=env.under_torchrun)

    def leave(self, error: SarathiError) -> None:
        """Record and show the error that ends this process. The watchdog calls this, and then ends the process."""
        if not self._speaks:
            return
        self.judge(error)
        text, spoken = self._last_words(error), is_echo(error, self.env)
        report_cause(self.env)
        self.note(error.exit_code)
        if not spoken:
            self.say(text)

    def judge(self, error: SarathiError) -> None:
        """Set the error's exit code to 2 if the previous start failed in the same way before its first microbatch.

        Batch systems restart a job that ends with 75, and another restart would not help.
        """
        if self._speaks and error.at_start and self.run_dir is not None and self.run_dir.fails_again():
            error.exit_code = ConfigError.exit_code
            error.args = (f"{error}. The previous start ended in the same way, so another one will not help",)

    def note(self, code: int) -> None:
        """Write the exit code to the run directory, if this rank may decide it. Remove a temporary run directory."""
        if not self._speaks:
            return
        if self._scratch is not None:
            # It is removed here, because a rank that fails does not return to its caller.
            shutil.rmtree(self._scratch, ignore_errors=True)
            return
        # If one of several replicas ends, the run goes on, and only rank 0 knows its exit code. Any rank may write 75,
        # because that never replaces another code.
        others = code == PeerLostError.exit_code or (code and self._replicas == 1)
        if self.run_dir is not None and (others or self.env.rank == 0):
            self.run_dir.write_exit_code(code)

    def say(self, text: str) -> None:
        """Show a message to the user. If a signal ends the run, only rank 0 shows one."""
        if self.env.rank != 0:
            launched = self.env.store is not None and stopped_mark(self.env.store).exists()
            if launched or (self.signals.has_run and self.signals.asked() is not None):
                return
        self._console.error(text)

    def _last_words(self, error: SarathiError) -> str:
        """Return the message of an error.

        If a signal ends the run on rank 0, add how to resume, and make the file that keeps the other ranks silent.
        """
        text = f"{type(error).__name__}: {error}"
        if self.env.rank or not self.signals.has_run or not isinstance(error, StoppedError):
            return text
        if self.env.store is not None:
            stopped_mark(self.env.store).touch()
        return text if self._how_to_resume is None else f"{text}; {self._how_to_resume}"


@contextmanager
def handle_signals(ending: Ending) -> Iterator[None]:
    """Inside the block, let signals, lost ranks and the end of the launcher end this process through `ending`."""
    env, signals, watchdog = ending.env, ending.signals, ending.watchdog
    if env.launcher is not None:
        watchdog.follow_parent(env.launcher, Path(env.store).parent if env.store is not None else None)
    try:
        with signals.heeded():
            if env.store is not None and env.rank == 0:
                heeded_mark(env.store).touch()
            yield
    finally:
        watchdog.close()
        if env.store is not None and signals.asked() is not None:
            stopped_mark(env.store).touch()


@contextmanager
def exit_code(ending: Ending) -> Iterator[None]:
    """Write the exit code after the block: `ending.code`, or the code of an error in the block.

    The error is shown, unless another rank shows it. With several ranks, the process ends here after an error or the
    loss of a replica. Then communication threads are still inside gloo, and the interpreter would abort while it shuts
    down. After the block, signals are ignored, so that none changes the exit code that was written.
    """
    env, message = ending.env, ""
    try:
        try:
            yield
        finally:
            ignore_signals()
        ending.note(ending.code)
        if _communicates():
            _leave(ending.code)
        return
    except KeyboardInterrupt:
        ending.code = EXIT_INTERRUPTED
    except OutputClosedError as error:
        ending.code = error.exit_code  # the program that read our output has ended, and needs no message
    except SarathiError as error:
        ending.judge(error)
        ending.code = error.exit_code
        spoken = is_echo(error, env) or (env.rank != 0 and error.agreed)
        message = "" if spoken else f"{type(error).__name__}: {error}"
    except Exception:
        ending.code = SarathiError.exit_code
        message = (f"{ending.title} failed:\n" if env.world_size > 1 else "") + traceback.format_exc()
    try:
        report_cause(env)
        ending.note(ending.code)
        if message:
            ending.say(message)
    finally:
        if env.world_size > 1:
            _leave(ending.code)


def _communicates() -> bool:
    """Return whether a thread of this process may still be inside a transfer."""
    return any(thread.name.startswith(COMMUNICATING) for thread in threading.enumerate())


def _leave(code: int) -> None:
    """End the process at once, without the shutdown of the interpreter."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
