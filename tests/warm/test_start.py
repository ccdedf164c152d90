"""A program cannot tell from its environment if it was started cold or warm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.commands.processes import environment, torchrun
from tests.machine import patient
from tests.warm import start

PROBE = """
import json, os, signal, sys, tempfile

told = {
    "words": sys.argv,
    "name": __name__,
    "folder": os.getcwd(),
    "variables": dict(os.environ),
    "scratch": tempfile.gettempdir(),
    "path": sys.path,
    "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(),
    "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "files": len([number for number in range(200) if os.path.exists(f"/proc/self/fd/{number}")]),
    "threads": len(os.listdir("/proc/self/task")),
    "limits": [os.umask(0o22), sorted(os.sched_getaffinity(0))],
    "streams": [[s.name, s.encoding, s.errors, s.line_buffering, s.isatty()] for s in (sys.stdout, sys.stderr)],
    "input": sys.stdin.read(),
    "shown": [open(f"/proc/self/{name}").read().split(chr(0)) for name in ("cmdline", "environ")],
    "warm": "torch" in sys.modules,
}
if "GIVEN" in os.environ:
    told["given"] = os.read(int(os.environ["GIVEN"]), 100).decode()
print(json.dumps(told))
print("said", file=sys.stderr)
"""


@pytest.fixture(autouse=True, scope="module")
def warm() -> Iterator[None]:
    """Start commands warm, even if the suite's commands start cold."""
    with pytest.MonkeyPatch.context() as patch:
        if subprocess._fork_exec is start.start_cold:
            patch.setattr(subprocess, "_fork_exec", start.start_cold)
            start.begin()
        yield


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "program.py"


# Variables that differ between any two starts of torchrun.
_OF_ONE_START = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "GIVEN")


def told_by(command: Sequence[str], folder: Path, *, pipe: bool, new_session: bool) -> dict[str, Any]:
    """Return the output of the program above without values that differ each time."""
    reader, writer = os.pipe()
    os.write(writer, b"of this test")
    os.close(writer)
    variables = {**environment(), "TMPDIR": str(folder)} | ({"GIVEN": str(reader)} if pipe else {})
    done = subprocess.run(
        command, env=variables, cwd=folder, input="some words", pass_fds=[reader] if pipe else [],
        start_new_session=new_session, capture_output=True, text=True, timeout=patient(60), check=True,
    )  # fmt: skip
    os.close(reader)
    told: dict[str, Any] = json.loads(done.stdout)
    told["said"] = done.stderr
    for name in _OF_ONE_START:
        told["variables"].pop(name, None)
    (interpreter, *words), shown = (list(filter(None, texts)) for texts in told.pop("shown"))
    # The script torchrun names its interpreter, and a warm start names that of pytest: python3 or python.
    found = os.path.dirname(interpreter), os.path.realpath(interpreter)
    told["shown"] = found, words, sorted(text for text in shown if not text.startswith(_OF_ONE_START))
    return told


@pytest.mark.parametrize("options", [(), ("-P",), ("-P", "-u")], ids=" ".join)
@pytest.mark.parametrize("new_session", [False, True])
def test_what_a_program_is_given(options, new_session, program, monkeypatch):
    program.write_text(PROBE)
    command = (sys.executable, *options, str(program), "with", "words")
    told = told_by(command, program.parent, pipe=True, new_session=new_session)
    assert told.pop("warm") and told["parent"] == os.getpid()
    monkeypatch.setattr(subprocess, "_fork_exec", start.start_cold)
    cold = told_by(command, program.parent, pipe=True, new_session=new_session)
    assert not cold.pop("warm")
    assert {name: told[name] for name in told if told[name] != cold[name]} == {}


STARTS = """
import subprocess, sys, threading
threads = [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(int(sys.argv[1]))]
for thread in threads:
    thread.start()
sys.exit(subprocess.run(sys.argv[2:]).returncode)
"""


@pytest.mark.parametrize("by_script", [False, True])
def test_what_a_launcher_gives_its_rank(by_script, program, monkeypatch):
    program.write_text(PROBE)
    command = (*torchrun(1, program), "with", "words")
    if by_script:
        script = program.with_name("script.py")
        script.write_text(STARTS)
        command = (sys.executable, str(script), "0", *command)
    told = told_by(command, program.parent, pipe=False, new_session=False)
    monkeypatch.setattr(subprocess, "_fork_exec", start.start_cold)
    cold = told_by(command, program.parent, pipe=False, new_session=False)
    assert told.pop("warm") and not cold.pop("warm") and told.pop("parent") != cold.pop("parent")
    assert {name: told[name] for name in told if told[name] != cold[name]} == {}


def test_what_a_script_with_threads_starts_begins_cold(program, tmp_path):
    """A fork has only the thread that forks, and the locks of all threads."""
    program.write_text(STARTS)
    probe = tmp_path / "probe.py"
    probe.write_text("import sys; print('torch' in sys.modules)")
    for threads, expected in (("0", "True\n"), ("1", "False\n")):
        command = [sys.executable, str(program), threads, *torchrun(1, probe)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        assert done.stdout == expected


ENDINGS = {
    "as it should": "print('done')",
    "with a code": "import sys; sys.exit(300)",
    "with words": "import sys; sys.exit('no such file')",
    "with an error": "1 / 0",
    "at once": "import os; print('lost'); os._exit(3)",
    "with what was to be done at exit": "import atexit; atexit.register(print, 'at exit')",
    "with a thread": "import threading; threading.Timer(0.1, print, ['late']).start()",
    "by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "by Ctrl-C": "import os, signal; print('begun'); os.kill(os.getpid(), signal.SIGINT)",
    "by an abort": "import os; os.abort()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_how_a_program_ends(ending, program, monkeypatch):
    def ended(expected: str) -> tuple[int, str, str]:
        """Run a command to its end. expected: its kind of start."""
        command = [sys.executable, "-P", str(program), expected]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=patient(60), check=False
        )
        return done.returncode, done.stdout, done.stderr.splitlines()[-1] if done.stderr else ""

    program.write_text(f"import sys\nassert ('torch' in sys.modules) == (sys.argv[1] == 'warm')\n{ENDINGS[ending]}\n")
    warm = ended("warm")
    monkeypatch.setattr(subprocess, "_fork_exec", start.start_cold)
    assert warm == ended("cold")


def test_a_program_with_another_variable_of_those_that_are_read_at_the_start_begins_cold(program):
    program.write_text("import os, sys; print('torch' in sys.modules, os.environ.get('HF_HOME'))")
    for more, expected in (({}, "True None\n"), ({"HF_HOME": "/nowhere"}, "False /nowhere\n")):
        variables = {name: value for name, value in environment().items() if name != "HF_HOME"} | more
        done = subprocess.run([sys.executable, str(program)], env=variables, capture_output=True, text=True, check=True)
        assert done.stdout == expected


def test_what_libraries_set_when_this_process_imports_them_is_no_reason_to_begin_cold(program):
    """Torch's compiler and `let_threads_sleep` set such variables."""
    import sarathi_pp.cli.generate
    import sarathi_pp.stages.model_stage
    from sarathi_pp.distributed.environment import let_threads_sleep

    assert sarathi_pp.stages.model_stage and sarathi_pp.cli.generate
    let_threads_sleep()
    program.write_text("import sys; print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_it_is_killed_by_its_number(program):
    program.write_text("import time\ntime.sleep(1000)")
    with subprocess.Popen([sys.executable, str(program)], env=environment()) as process:
        assert os.getpgid(process.pid) == os.getpgid(0)
        process.kill()
        assert process.wait(patient(10)) == -signal.SIGKILL


def test_a_folder_that_is_not_there_is_an_error_of_the_start(program, tmp_path):
    program.write_text("")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        subprocess.run([sys.executable, str(program)], env=environment(), cwd=tmp_path / "nowhere", check=False)


def test_signals_are_ignored_and_blocked_as_they_are_here(program):
    program.write_text(
        "import signal, sys; assert 'torch' in sys.modules\n"
        "print(signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN)\n"
        "print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)\n"
        "print(signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        done = subprocess.run([sys.executable, str(program)], env=environment(), capture_output=True, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
        signal.signal(signal.SIGUSR1, before)
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


def test_threads_start_programs_side_by_side(program):
    program.write_text("import os, sys; print('torch' in sys.modules, os.getppid(), sys.argv[1])")

    def told(number: int) -> str:
        command = [sys.executable, str(program), str(number)]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(told, range(40))) == [f"True {os.getpid()} {number}\n" for number in range(40)]


SUITE = {
    "conftest.py": "from tests.warm import start\n\ndef pytest_configure(config):\n    start.begin()\n",
    "probe.py": "import os, sys; print('torch' in sys.modules, os.getppid())",
    "test_probe.py": """
import os, subprocess, sys
import psutil, pytest
began_warm = "torch" in sys.modules
(server,) = psutil.Process().children()

@pytest.mark.parametrize("number", range(20))
def test_what_a_worker_starts(number):
    command = [sys.executable, os.path.join(os.path.dirname(__file__), "probe.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert began_warm and done.stdout == f"True {os.getpid()}\\n"
    assert psutil.Process().children() == [server]
""",
}


def test_workers_of_xdist_begin_warm_each_with_a_server_of_its_own(tmp_path):
    for name, text in SUITE.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path)], env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "20 passed" in done.stdout, done.stdout + done.stderr
