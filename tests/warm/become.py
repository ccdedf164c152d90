"""A forked process becomes the command for which it was forked, as if Python had been started with it."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import io
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn, TextIO

import torch

from tests.warm.command import Command, Host, Program

_NEW_NETWORK, _NEW_NAME, _NEW_MOUNTS = 0x40000000, 0x04000000, 0x00020000  # linux/sched.h
_BIND, _RECURSIVE, _SLAVE = 0x1000, 0x4000, 0x80000  # linux/mount.h

# As Python opened and set them when this process started.
_PATH = tuple(sys.path)
_STDIN, _STDOUT, _STDERR = sys.stdin, sys.stdout, sys.stderr
# Streams of the launcher that was forked. They must stay open here: closing them would print their buffers twice.
_streams_of_parent: list[TextIO] = []


def become(command: Command) -> NoReturn:
    """Run the command to its end, in the child of a fork.

    Limits, CPUs and the mask of new files' rights stay those of the process that was forked.

    Args:
        command: its descriptors have their numbers in this process.
    """
    code = 1
    gc.freeze()  # the parent's garbage would close files by numbers that others use here
    try:
        _forget_parent(command)
        if command.new_session:
            os.setsid()
        if command.host is not None:
            _move_to(command.host)
        _take_descriptors(command.descriptors)
        try:
            os.chdir(command.folder)
        except OSError as error:
            os.write(command.started, f"OSError:{error.errno:x}:noexec".encode())  # in the form that `subprocess` reads
            os._exit(255)
        os.environ.clear()
        os.environ.update(command.variables)
        tempfile.tempdir = None
        _show_in_proc(command)
        _open_streams(unbuffered=command.program.unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
        os.close(command.started)
        code = _run(command.program)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    except BaseException:
        traceback.print_exc()
        code = code or 1
    finally:
        os._exit(code)


def _forget_parent(command: Command) -> None:
    """Remove everything that exec would end: handlers of signals, and actions of the parent at its own end."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        kept = signal.SIG_IGN if number in command.ignored else signal.SIG_DFL
        if signal.getsignal(number) not in (kept, None):
            signal.signal(number, kept)
    if signal.SIGINT not in command.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, command.blocked)
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.detach()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


def _move_to(host: Host) -> None:
    """Enter namespaces for network, host name and mounts, as `Hosts.on` does, but without /sys."""
    with open(f"/var/run/netns/{host.namespace}") as network:
        _call("setns", network.fileno(), _NEW_NETWORK)
    _call("unshare", _NEW_NAME | _NEW_MOUNTS)
    _call("mount", b"none", b"/", None, _RECURSIVE | _SLAVE, None)
    socket.sethostname(host.name)
    _call("mount", os.fsencode(host.table), b"/etc/hosts", None, _BIND, None)


def _call(name: str, *arguments: int | bytes | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _take_descriptors(descriptors: Mapping[int, int]) -> None:
    """Leave these files open, under the numbers that the command knows, and no others."""
    beyond = max(descriptors) + 1
    kept = {number: fcntl.fcntl(here, fcntl.F_DUPFD_CLOEXEC, beyond) for number, here in descriptors.items()}
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in kept.values():
            with suppress(OSError):  # the descriptor of the listing itself
                os.close(number)
    for number, duplicate in kept.items():
        os.dup2(duplicate, number)
        os.close(duplicate)


def _show_in_proc(command: Command) -> None:
    """Write the words and variables where /proc reads them, in this process's memory: tests find processes by them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from the third on, as proc(5) counts
    words = (sys.executable, *command.program.words)
    variables = [f"{name}={value}" for name, value in command.variables.items()]
    for texts, begin, end in ((words, *map(int, fields[45:47])), (variables, *map(int, fields[47:49]))):
        block = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - begin - 1]
        ctypes.memmove(begin, block.ljust(end - begin, b"\0"), end - begin)


def _open_streams(*, unbuffered: bool) -> None:
    """Open streams like those that Python opened at the start."""
    _streams_of_parent.extend((sys.stdin, sys.stdout, sys.stderr))
    for number, like in enumerate((_STDIN, _STDOUT, _STDERR)):
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        raw.name = like.name  # type: ignore[misc]
        buffer = (raw if unbuffered else io.BufferedWriter(raw)) if number else io.BufferedReader(raw)
        lines = not unbuffered and (number == 2 or raw.isatty())
        stream = io.TextIOWrapper(buffer, like.encoding, like.errors, None, lines, unbuffered)  # type: ignore[arg-type]
        setattr(sys, like.name.strip("<>"), stream)
        setattr(sys, f"__{like.name.strip('<>')}__", stream)


def _run(program: Program) -> int:
    """Return its exit code, or the negative number of a signal that is to end it."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdigit() else len(os.sched_getaffinity(0)))
    folders = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:] = [*(folder for folder in folders if folder not in _PATH), *_PATH]
    hooks = [hook for folder in folders if (hook := Path(folder, "sitecustomize.py")).exists()]
    if hooks:
        runpy.run_path(str(hooks[0]))
    if program.folder_first and program.code is None:
        sys.path.insert(0, os.getcwd() if program.script is None else str(Path(program.script).resolve().parent))
    if program.module is not None and not hasattr(sys.modules.get(program.module), "__path__"):
        sys.modules.pop(program.module, None)  # the program runs as another module, named __main__
    sys.argv = [program.script or "", *program.arguments]
    try:
        if program.code is not None:
            sys.path.insert(0, "")
            sys.argv[0] = "-c"
            sys.modules["__main__"] = ModuleType("__main__")
            exec(program.code, vars(sys.modules["__main__"]))
        elif program.module is not None:
            runpy.run_module(program.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(program.script), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
