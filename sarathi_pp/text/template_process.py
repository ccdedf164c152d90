"""A separate process for the programs of a model's author: chat templates and response templates.

    TemplateProcess.ask -> one JSON line -> [child: jinja's sandbox, or regular expressions] -> one JSON line

A sandbox limits the objects that an expression may use, but not its time and memory. `7 ** 500000000` holds the
interpreter's lock until it is done, and `'x' * 10**11` takes all memory of the machine. A regular expression may take
years for a short text. Such expressions cannot all be listed, but a process can be limited and killed. The process
starts with the first question. If it was killed, it starts again with the next one.
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
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

from sarathi_pp.errors import signal_name

# Most characters that are kept of a template's own error text, which may have any length.
_MOST_REASON = 1000

_PR_SET_PDEATHSIG = 1
# Signals that the child ignores and the run handles. A signal may go to all processes of a job. If it ended the child,
# the conversations of this moment would become error lines.
_NOT_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


class TemplateError(Exception):
    """A template that refused, failed or exceeded its limits. The text is the reason."""


class TemplateProcess:
    """A child process that answers one question at a time. It ends with this object, or with the parent process.

    Args:
        limit_s: most CPU seconds per question.
        limit_memory_bytes: most memory, in addition to that of the child at its start.
        limit_bytes: most bytes of an answer's text.
    """

    def __init__(self, limit_s: float, limit_memory_bytes: int, limit_bytes: int) -> None:
        self._limits = (limit_s, limit_memory_bytes, limit_bytes)
        self._process: subprocess.Popen[bytes] | None = None
        # The system kills the child when the thread that started it ends. So a thread of this object starts it, not the
        # thread of a caller.
        self._starter = ThreadPoolExecutor(1, "template")
        self._end: Callable[[], object] = lambda: None

    @property
    def pid(self) -> int | None:
        """Return the number of the child process; None if it has not started."""
        return None if self._process is None else self._process.pid

    def ask(self, question: Mapping[str, object]) -> Any:
        """Return the answer to a question. See `_answer`, which runs in the child.

        Raises:
            TemplateError: the question is not JSON, or the child has failed.
        """
        try:
            request = json.dumps(question).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:  # from Python callers: no input line can hold these
            raise TemplateError(f"the conversation is not JSON: {error}") from error
        try:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(request)
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError as error:
            self._end()
            raise TemplateError(f"its process is gone: {error}") from error
        except BaseException:
            self._end()  # otherwise a late answer would be taken for that of the next question
            raise
        if not answer.endswith(b"\n"):
            raise TemplateError(self._why(process.wait()))
        found = json.loads(answer)
        if "spent" in found:
            self._end()  # after it ran out of memory, the state of the child is not known
        if "error" in found:
            raise TemplateError(found["error"])
        return found["value"]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            # The child has its own session, because Ctrl-C in the terminal must reach only the run.
            self._process = self._starter.submit(_started, map(str, self._limits)).result()
            self._end = weakref.finalize(self, _end, self._process)
        return self._process

    def _why(self, code: int) -> str:
        if code == -signal.SIGPROF:
            return f"it ran for more than {self._limits[0]:g} s"
        return f"its process was killed by {signal_name(-code)}" if code < 0 else f"its process ended with {code}"


def _started(limits: Iterable[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        (sys.executable, "-P", "-m", __name__, *limits),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):  # the process had not read all bytes
            if stream is not None:
                stream.close()


def _serve(questions: BinaryIO, answers: BinaryIO, limit_s: float, limit_memory_bytes: int, limit_bytes: int) -> None:
    """Run the child process: answer one question per line, until they end or the parent has ended.

    The limits are those of TemplateProcess.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in _NOT_OURS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    import transformers.utils.chat_template_utils  # noqa: F401  # before the memory is limited

    _bound_memory(limit_memory_bytes)
    while line := questions.readline():
        # When the time is over, the timer's signal ends this process, even while code holds the interpreter's lock.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            found = _answer(json.loads(line), limit_bytes)
        except MemoryError:
            found = {"error": f"it took more than {limit_memory_bytes >> 20} MiB of memory", "spent": "memory"}
        except Exception as error:  # the template is a program and may raise anything
            found = {"error": str(error)[:_MOST_REASON] or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(found).encode() + b"\n")
        answers.flush()


def _answer(question: dict[str, Any], limit_bytes: int) -> dict[str, Any]:
    if "variables" in question:
        return {"value": _variables(question["variables"])}
    if "render" in question:
        text = _render(**question["render"])
        if len(text) > limit_bytes or len(text.encode("utf-8", "replace")) > limit_bytes:
            return {"error": f"it wrote {len(text)} characters; at most {limit_bytes} bytes are accepted"}
        return {"value": text}
    if "check" in question:
        _check(question["check"])
        return {"value": None}
    return {"value": _parse(**question["parse"])}


def _render(template: str, messages: list[Any], variables: dict[str, Any]) -> str:
    """Return the text of a conversation.

    Args:
        variables: the other arguments of `render_jinja_template`, and variables of the template.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=template, **variables)
    text: str = rendered[0]
    return text


def _variables(template: str) -> list[str]:
    """Return the names that a chat template takes from outside, in ascending order.

    Jinja's own analysis finds them, with transformers' tags. Other names are set by the template, such as parameters of
    its macros, or are functions that transformers gives to every template.
    """
    from jinja2.meta import find_undeclared_variables
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment
    return sorted(find_undeclared_variables(environment.parse(template)))


def _check(template: Any) -> None:
    """Raise an error if a response template cannot be loaded, or the settings of its fields cannot be used."""
    from transformers.utils.chat_parsing.content_parsers import parse_content
    from transformers.utils.chat_parsing.response_templates import load_response_template

    for name, field in load_response_template(template).fields.items():
        # Other kinds read numbers only. They have no more settings than text.
        kind = field.content if field.content in ("json", "xml-inline", "kv-lines") else "text"
        try:
            parse_content("{}", kind, field.content_args)
        except Exception as error:  # the settings may have any form
            raise ValueError(f"Field '{name}': {error}") from error


def _parse(template: dict[str, Any], text: str, prefix: str, tools: list[Any]) -> list[dict[str, Any]]:
    """Return the message of an output, and the message of its prompt alone, as the response template reads them.

    Args:
        text: the output, with its special tokens.
        prefix: the prompt, with its special tokens. It may begin the message of the assistant.
    """
    from transformers.utils.chat_parsing import parse_response
    from transformers.utils.chat_parsing.response_templates import load_response_template

    loaded = load_response_template(template)
    start = loaded.truncate_past_last_anchor(prefix)
    if start == prefix:  # the prompt has no anchor, so it does not begin the message
        start = ""
    message = parse_response(text, loaded, prefix=start, tools=tools)
    try:
        return [message, parse_response("", loaded, prefix=start, tools=tools)]
    except ValueError:  # the prompt begins no field, or one that cannot be read before its end
        return [message, {}]


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
