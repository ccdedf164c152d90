"""The process that has imported the commands' modules and forks commands: `python -P -m tests.warm.server DESCRIPTOR`.

It runs nothing itself. So it has one thread, and no state but its modules and the tables of libraries. The server of a
process that starts xdist's workers forks these too, each with a server of its own.
DESCRIPTOR: number of the socket for requests.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from sarathi_pp.distributed.environment import let_threads_sleep
from tests.warm.command import Command, is_rank
from tests.warm.start import MAX_DESCRIPTORS, SERVER_VARIABLE, begin_forking

# Modules that one `generate` or `profile` on a CPU has imported at its end, alone or under torchrun.
_MODULES = (
    "sarathi_pp.api",
    "sarathi_pp.cli.generate",
    "sarathi_pp.cli.profile",
    "sarathi_pp.model.attention.numba",
    "sarathi_pp.run.batch",
    "sarathi_pp.run.llm_worker",
    "sarathi_pp.run.torchrun_agent",
    "sarathi_pp.stages.model_stage",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
)
# The same on a GPU.
_GPU_MODULES = ("triton", "tests.mockgpu.install")
_MAX_REQUEST = 1 << 20


def _prepare() -> None:
    """Import the modules, and do now what libraries do at their first use."""
    let_threads_sleep()
    more = _GPU_MODULES if "TRITON_INTERPRET" in os.environ else ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as in pyproject.toml: a worker finds the modules imported
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch|transformers")
        for module in (*_MODULES, *more, "tests.warm.become"):
            importlib.import_module(module)

    from numba.core.registry import cpu_target
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    cpu_target.target_context.refresh()
    get_checkpoint_conversion_mapping("llama")
    gc.collect()
    gc.freeze()  # pages that a fork's collector visits would be copied


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end it
    _prepare()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has the thread that forks alone, and the locks of all"
    asked = socket.socket(fileno=int(sys.argv[1]))
    asked.send(b"ready")
    _serve(asked)


def _serve(asked: socket.socket) -> None:
    """Fork commands for the process of the tests, this one's parent, until it closes the socket."""
    tests = os.getppid()
    while True:
        request, given, _, _ = socket.recv_fds(asked, _MAX_REQUEST, MAX_DESCRIPTORS + 1)
        if not request:
            return
        *descriptors, answer = given
        command: Command = pickle.loads(request)
        command = replace(command, descriptors=dict(zip(command.descriptors, descriptors, strict=True)))
        try:
            os.write(answer, str(_fork(command, tests)).encode())
        except (OSError, ValueError):
            traceback.print_exc()  # an empty answer means that there is no process
        for descriptor in given:
            os.close(descriptor)


def _fork(command: Command, tests: int) -> int:
    """Return the number of a process that runs the command. Raise OSError or ValueError if there is no room.

    Its parent is the process of the tests, which adopts orphans at this time: a process that then ends forks it.
    """
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                os.close(writer)
                while os.getppid() == parent:
                    time.sleep(0.0005)
                assert os.getppid() == tests, "another process has adopted this one"
                _become(command)
            os.write(writer, str(pid).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.waitpid(between, 0)
    os.close(writer)
    with open(reader) as answer:
        return int(answer.read())


def _become(command: Command) -> NoReturn:
    from tests.warm.become import become  # it imports torch: _prepare comes first

    if command.program.is_worker:
        asking, pid = _fork_server(1 + max(command.descriptors))
        variables = {**command.variables, SERVER_VARIABLE: f"{asking} {pid}"}
        command = replace(command, variables=variables, descriptors={**command.descriptors, asking: asking})
    elif not is_rank(command.variables):
        begin_forking(command)
    become(command)


def _fork_server(first: int) -> tuple[int, int]:
    """Fork a server for this process; return the number of the socket for requests and of the server's process.

    Args:
        first: smallest allowed number of the socket.
    """
    asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        _serve_alone(asked)
    asked.close()
    number = fcntl.fcntl(asking.fileno(), fcntl.F_DUPFD_CLOEXEC, first)
    asking.close()
    return number, pid


def _serve_alone(asked: socket.socket) -> NoReturn:
    """Serve in the child of a fork, to its end."""
    try:
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number != asked.fileno():
                with suppress(OSError):  # the descriptor of the listing itself
                    os.close(number)
        _serve(asked)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
