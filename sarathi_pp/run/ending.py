"""How the process of a rank ends: by a signal, by its watchdog or in order, and with which exit code.

The code is noted in the run directory before anything is said, since a message may have to wait for whoever reads it.
One cause has one message: a rank that only notices how another one ended is silent.
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
    """What is known of a rank's end before it comes, and what is done then. The watchdog of the process calls `leave`.

    Attributes:
        code: the exit code if all goes well.
        run_dir: where the code is noted. None on other ranks than 0 until rank 0 has named it.
        title: this rank in messages.
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
        """
        Args:
            scratch: a folder that holds the run directory and is removed at the end; no code is noted in it.
            how_to_resume: ends the message of a run that was stopped.
            speaks: False for a worker of a Python program, which has every error too, and reports and notes it.
        """
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
        """Note and say why this process ends, which its watchdog ends next."""
        if not self._speaks:
            return
        self.judge(error)
        text, spoken = self._last_words(error), is_echo(error, self.env)
        report_cause(self.env)
        self.note(error.exit_code)
        if not spoken:
            self.say(text)

    def judge(self, error: SarathiError) -> None:
        """Give an error the code 2 if the start before failed at the same place: schedulers start a 75 again."""
        if self._speaks and error.at_start and self.run_dir is not None and self.run_dir.fails_again():
            error.exit_code = ConfigError.exit_code
            error.args = (f"{error}. The start before ended like this too, so another one will not help",)

    def note(self, code: int) -> None:
        """Write the code down, unless another rank knows better."""
        if not self._speaks:
            return
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)  # here, because a rank that fails does not return
            return
        # Of several replicas one may end in any way and the run in another, which rank 0 knows; 75 replaces no code.
        others = code == PeerLostError.exit_code or (code and self._replicas == 1)
        if self.run_dir is not None and (others or self.env.rank == 0):
            self.run_dir.write_exit_code(code)

    def say(self, text: str) -> None:
        """Say it to the user, unless rank 0 does, because a signal ends the run."""
        if self.env.rank != 0:
            launched = self.env.store is not None and stopped_mark(self.env.store).exists()
            if launched or (self.signals.has_run and self.signals.asked() is not None):
                return
        self._console.error(text)

    def _last_words(self, error: SarathiError) -> str:
        text = f"{type(error).__name__}: {error}"
        if self.env.rank or not self.signals.has_run or not isinstance(error, StoppedError):
            return text
        if self.env.store is not None:
            stopped_mark(self.env.store).touch()
        return text if self._how_to_resume is None else f"{text}; {self._how_to_resume}"


@contextmanager
def handle_signals(ending: Ending) -> Iterator[None]:
    """While inside, signals and lost peers end this process as `ending` says, and so does its launcher's end."""
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
    """Let the process end with `ending.code`, or with the code of what is raised inside, which is said once.

    A rank among others that ends by an error does not come back from here, nor one that has lost a replica: its
    communication threads are still inside gloo, and an interpreter that is torn down under them aborts. Behind the
    body signals are ignored: the exit code is the one that was noted.
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
        ending.code = error.exit_code  # whoever read our output has left, and needs no message
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
    return any(thread.name.startswith(COMMUNICATING) for thread in threading.enumerate())


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
