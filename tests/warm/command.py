"""A command that a test starts: a Python program with its files, folder and variables, as `subprocess` describes it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from examples.benchmarks.hosts import Hosts

# Read once, when Python starts or a library is imported: a process that has done both must have had the same.
_READ_AT_START = (
    *("PYTHON", "LD_", "LC_", "LANG", "HOME", "XDG_", "OMP_", "GOMP_", "MKL_", "KMP_", "OPENBLAS_"),
    *("NUMBA_", "TORCH_", "PYTORCH_", "TRITON_", "HF_", "TRANSFORMERS_"),
)
# But sys.path and torch.set_num_threads can follow the first two, and torchrun sets the third for every rank.
_CAN_FOLLOW = {"PYTHONPATH", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
_PYTHON_OPTIONS = {"-P", "-u"}
# With -c: a worker of xdist, as execnet starts it. Other tests pass code to see its imports.
_WORKER = "import sys;exec(eval(sys.stdin.readline()))"
# It asks to be killed when the thread that started it ends, and a fork's parent is always the main thread.
_ENDS_WITH_A_THREAD = "sarathi_pp.text.template_process"
PYTHON = sys.executable  # tests replace it
_TORCHRUN = str(Path(PYTHON).with_name("torchrun"))
_HOST_0 = Hosts(("namespace",), "switch", Path("table")).on(0)


class ForkExec(NamedTuple):
    """The arguments that `subprocess` passes to `_posixsubprocess.fork_exec`, from Python 3.11 on."""

    words: Sequence[Any]
    executables: Sequence[bytes]
    close_fds: bool
    fds_to_keep: Sequence[int]
    folder: Any
    environment: Sequence[bytes] | None
    input_reader: int
    input_writer: int
    output_reader: int
    output_writer: int
    error_reader: int
    error_writer: int
    failure_reader: int
    failure_writer: int
    restore_signals: bool
    new_session: bool
    process_group: int
    group: int | None
    groups: Sequence[int] | None
    user: int | None
    umask: int
    run_first: Any


@dataclass(frozen=True, slots=True)
class Program:
    """A module (`-m`), a script, or the code of a worker of xdist (`-c`), with its arguments.

    Attributes:
        words: All words on Python's command line.
        folder_first: sys.path starts with the program's folder, as it does without -P.
    """

    module: str | None
    script: str | None
    code: str | None
    arguments: Sequence[str]
    words: Sequence[str]
    folder_first: bool
    unbuffered: bool

    @property
    def is_worker(self) -> bool:
        return self.code is not None


@dataclass(frozen=True, slots=True)
class Host:
    """A host of examples/benchmarks/hosts.py. table: the file that is its /etc/hosts."""

    namespace: str
    name: str
    table: str


@dataclass(frozen=True, slots=True)
class Command:
    """A program and the state with which it is started.

    Attributes:
        variables: All of its environment.
        descriptors: The numbers of its open files, each with the number of that file in this process.
        host: The host on which it runs; None for this machine.
        started: The descriptor that is closed when the program runs.
        ignored: Signals.
        blocked: Signals.
    """

    program: Program
    host: Host | None
    folder: str
    variables: Mapping[str, str]
    descriptors: Mapping[int, int]
    started: int
    new_session: bool
    ignored: frozenset[int]
    blocked: frozenset[int]


def parse_command(asked: ForkExec) -> Command | None:
    """Return the command that `subprocess` is to start; None if it is no program of this Python, or needs more."""
    host, words = _parse_host([os.fsdecode(word) for word in asked.words])
    program = _parse_program(words)
    more = (asked.group, asked.groups, asked.user, asked.run_first) != (None,) * 4
    if program is None or program.module == _ENDS_WITH_A_THREAD:
        return None
    if more or not asked.close_fds or asked.process_group != -1 or asked.umask >= 0:
        return None
    variables = dict(os.environ)
    if asked.environment is not None:
        pairs = (os.fsdecode(pair).partition("=") for pair in asked.environment)
        variables = {name: value for name, _, value in pairs}
    standard = enumerate((asked.input_reader, asked.output_writer, asked.error_writer))
    descriptors = {number: number if here == -1 else here for number, here in standard}
    descriptors |= {number: number for number in asked.fds_to_keep}  # the failure_writer is one of them
    folder = os.getcwd() if asked.folder is None else os.fsdecode(asked.folder)
    ignored = frozenset(number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN)
    blocked = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    new_session = bool(asked.new_session)
    return Command(program, host, folder, variables, descriptors, asked.failure_writer, new_session, ignored, blocked)


def is_rank(variables: Mapping[str, str]) -> bool:
    """Check if a launcher, ours or torchrun, starts a program with these variables.

    A pod may set RANK for any program.
    """
    return bool(variables.get("RANK")) and not variables.keys().isdisjoint(
        ("SARATHI_PP_LAUNCHER", "TORCHELASTIC_RUN_ID")
    )


def has_gpus(variables: Mapping[str, str]) -> bool:
    """Check if a Python program with these variables has simulated GPUs; see tests/mockgpu/site."""
    return "MOCK_GPUS" in variables


def read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a running process cannot change, with those that a program sets when it starts."""
    chosen = (name for name in variables if name.startswith(_READ_AT_START) and name not in _CAN_FOLLOW)
    simulated = {"TRITON_INTERPRET": "1"} if has_gpus(variables) else {}
    return {"OMP_WAIT_POLICY": "passive", **{name: variables[name] for name in chosen}, **simulated}


def _parse_host(words: Sequence[str]) -> tuple[Host | None, Sequence[str]]:
    """Return the host on which a command line runs and the other words of the line; see Hosts.on."""
    size = len(_HOST_0)
    namespace, name, table = _HOST_0.index("namespace"), size - 2, size - 1
    fixed = [index for index in range(size) if index not in (namespace, name, table)]
    if len(words) <= size or any(words[index] != _HOST_0[index] for index in fixed):
        return None, words
    return Host(words[namespace], words[name], words[table]), words[size:]


def _parse_program(words: Sequence[str]) -> Program | None:
    if words[0] == _TORCHRUN:
        words = (PYTHON, "-P", "-m", "torch.distributed.run", *words[1:])
    if words[0] != PYTHON:
        return None
    rest, options = list(words[1:]), set()
    while rest and rest[0] in _PYTHON_OPTIONS:
        options.add(rest.pop(0))
    module = script = code = None
    if rest == ["-c", _WORKER]:
        code, rest = _WORKER, []
    elif len(rest) > 1 and rest[0] == "-m":
        module, rest = rest[1], rest[2:]
    elif rest and not rest[0].startswith("-"):
        script, rest = rest[0], rest[1:]
    else:
        return None
    return Program(module, script, code, rest, words[1:], "-P" not in options, "-u" in options)
