"""Chat templates, rendered in a separate process: each template is a program by the model's author.

    encode_chat -> Renderer -> one JSON line -> [child: jinja's sandbox] -> one JSON line -> text

A sandbox limits the objects that an expression may use, but not its time and memory. `7 ** 500000000` holds the
interpreter's lock until it is done, and `'x' * 10**11` takes all memory of the machine. Such expressions cannot all be
listed, but a process can be limited and killed. The process starts with the first conversation. If it was killed, it
starts again with the next one.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import BinaryIO

from sarathi_pp.errors import RowError, signal_name

# Limits of one conversation: bytes of its text, seconds of CPU time, bytes of memory.
MAX_RENDERED_BYTES = 16 * 2**20
MAX_RENDER_S = 10.0
# This is in addition to the memory that the child has before the first conversation. A conversation of 16 MiB fits into
# it several times.
MAX_RENDER_MEMORY_BYTES = 512 * 2**20

# Most characters that are kept of a template's own error text, which may have any length.
_MOST_REASON = 1000

_PR_SET_PDEATHSIG = 1
# Signals that the child ignores and the run handles. A signal may go to all processes of a job. If it ended the child,
# the conversations of this moment would become error lines.
_NOT_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)

Message = Mapping[str, object]


class Renderer:
    """A child process that renders one conversation at a time. It ends with this object, or with the parent process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        # The system kills the child when the thread that started it ends. So a thread of this object starts it, not the
        # thread of a caller.
        self._starter = ThreadPoolExecutor(1, "template")
        self._end: Callable[[], object] = lambda: None

    def render(self, template: str, messages: Sequence[Message], special_tokens: Mapping[str, object]) -> str:
        """Return the text of a conversation, with the opening of the model's answer at its end.

        Args:
            template: source of the Jinja template.
            special_tokens: text of each special token by name, such as `bos_token`. The template may use them.

        Raises:
            RowError: `chat_template_error`. The template refused or failed, computed for more than MAX_RENDER_S, took
                more than MAX_RENDER_MEMORY_BYTES or wrote more than MAX_RENDERED_BYTES.
        """
        asked = {
            "template": template,
            # Keys with None are left out, as in transformers, because templates only ask whether a key is present.
            "messages": [{key: value for key, value in one.items() if value is not None} for one in messages],
            "special_tokens": special_tokens,
        }
        try:
            request = json.dumps(asked).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:  # from Python callers: no input line can hold these
            raise _failed(f"the messages are not JSON: {error}") from error
        try:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(request)
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError as error:
            self._end()
            raise _failed(f"its process is gone: {error}") from error
        except BaseException:
            self._end()  # otherwise a late answer would be taken for that of the next conversation
            raise
        if not answer.endswith(b"\n"):
            raise _failed(_why(process.wait()))
        found = json.loads(answer)
        if "spent" in found:
            self._end()  # after it ran out of memory, the state of the child is not known
        if "error" in found:
            raise _failed(found["error"])
        text: str = found["text"]
        return text

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            # The child has its own session, because Ctrl-C in the terminal must reach only the run.
            limits = map(str, (MAX_RENDER_S, MAX_RENDER_MEMORY_BYTES, MAX_RENDERED_BYTES))
            self._process = self._starter.submit(_started, limits).result()
            self._end = weakref.finalize(self, _end, self._process)
        return self._process


def _started(limits: Iterable[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        (sys.executable, "-P", "-m", __name__, *limits),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _failed(reason: str) -> RowError:
    return RowError("chat_template_error", f"the chat template failed: {reason}")


def _why(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it ran for more than {MAX_RENDER_S:g} s"
    return f"its process was killed by {signal_name(-code)}" if code < 0 else f"its process ended with {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):  # the process had not read all bytes
            if stream is not None:
                stream.close()


def _serve(requests: BinaryIO, answers: BinaryIO, limit_s: float, limit_memory_bytes: int, limit_bytes: int) -> None:
    """Run the child process: render one conversation per line of `requests`, until they end or the parent has ended.

    Args:
        limit_s: most CPU seconds per conversation.
        limit_memory_bytes: most memory, in addition to that of the child at its start.
        limit_bytes: most bytes of a rendered text.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in _NOT_OURS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    from transformers.utils.chat_template_utils import render_jinja_template

    def answer(line: bytes) -> dict[str, str]:
        asked = json.loads(line)
        rendered, _ = render_jinja_template(
            [asked["messages"]],
            chat_template=asked["template"],
            add_generation_prompt=True,
            **asked["special_tokens"],
        )
        text: str = rendered[0]
        if len(text) > limit_bytes or len(text.encode("utf-8", "replace")) > limit_bytes:
            return {"error": f"it wrote {len(text)} characters; at most {limit_bytes} bytes are accepted"}
        return {"text": text}

    _bound_memory(limit_memory_bytes)
    while line := requests.readline():
        # When the time is over, the timer's signal ends this process, even while code holds the interpreter's lock.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            found = answer(line)
        except MemoryError:
            found = {"error": f"it took more than {limit_memory_bytes >> 20} MiB of memory", "spent": "memory"}
        except Exception as error:  # the template is a program and may raise anything
            found = {"error": str(error)[:_MOST_REASON] or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(found).encode() + b"\n")
        answers.flush()


def _bound_memory(more_bytes: int) -> None:
    """Limit the memory of this process to more_bytes above what it has now."""
    kind = resource.RLIMIT_AS
    try:
        with open("/proc/self/statm", "rb") as sizes:
            most = int(sizes.read().split()[0]) * resource.getpagesize() + more_bytes
    except OSError:  # without /proc, only the resident memory is known, and another limit is set with it
        kind = resource.RLIMIT_DATA
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + more_bytes
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a library is no answer
    _serve(sys.stdin.buffer, channel, float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
