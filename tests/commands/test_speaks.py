"""A command shows its work from its first second on and is never silent for long."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.commands.processes import COMMAND, Files, environment, free_port
from tests.machine import patient
from tests.warm.start import start_cold

ADDER = Path(__file__).parents[2] / "examples" / "tiny-adder"
# Three times the promise: a line within one second of the start, and at most five seconds without one.
FIRST_S, SILENT_S = 3.0, 15.0

pytestmark = pytest.mark.timeout(280)


class Spoken:
    """A command, and its lines on standard error with their times since its start."""

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        self.lines: list[tuple[float, str]] = []
        self._start_s = time.monotonic()
        command = (*COMMAND, *arguments)
        self.process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append((time.monotonic() - self._start_s, line.decode().rstrip()))

    def wait_for(self, pattern: str) -> None:
        """Wait until a line matches."""
        end_s = time.monotonic() + patient(120)
        while not any(re.search(pattern, line) for _, line in self.lines):
            assert self.process.poll() is None and time.monotonic() < end_s, self.text
            time.sleep(0.05)

    def end(self, number: signal.Signals | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(patient(120))
        self._thread.join(patient(10))
        return code

    @property
    def text(self) -> str:
        return "\n".join(f"{at_s:6.2f} {line}" for at_s, line in self.lines)

    def longest_silence_s(self) -> float:
        times = [at_s for at_s, _ in self.lines]
        return max((later - earlier for earlier, later in zip(times, times[1:], strict=False)), default=0.0)

    def require_speech(self) -> None:
        assert self.lines[0][0] <= patient(FIRST_S), self.text
        assert self.longest_silence_s() <= patient(SILENT_S), self.text


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start commands as a user's shell does: without libraries that are already imported (tests/warm)."""
    monkeypatch.setattr(subprocess, "_fork_exec", start_cold)


@pytest.mark.usefixtures("cold")
def test_while_it_loads_slowly_it_shows_how_far_it_is(tmp_path: Path) -> None:
    """Rank 0 shows its own reading for some seconds, and then that of the other rank, which reads more."""
    files = Files(tmp_path)
    files.write_prompts([(1, 5, 6, 12)], max_new_tokens=2)
    slow = {"SLOW_READ_S": "0.3", "PYTHONPATH": f"{Path(__file__).with_name('slow')}:{environment()['PYTHONPATH']}"}
    spoken = Spoken(files.options(ADDER, "--stages", "2", "--layer-split", "1,4"), {**environment(), **slow})
    assert spoken.end() == 0, spoken.text
    spoken.require_speech()
    assert re.search(r" loading its layers: \d+\.\d of \d+\.\d MiB", spoken.text), spoken.text
    assert re.search(r" waiting for stage 1 \(rank 1\): loading its layers: \d", spoken.text), spoken.text
    assert f"{files.output}: 1 answers" in spoken.text and "report: sarathi-pp report" in spoken.text


@pytest.mark.usefixtures("cold")
def test_while_a_rank_is_missing_its_number_and_the_address_are_shown(tmp_path: Path) -> None:
    files, port = Files(tmp_path), free_port()
    files.write_prompts([(1, 5, 6, 12)], max_new_tokens=2)
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    spoken = Spoken(files.options(ADDER), {**environment(), **job})
    spoken.wait_for(rf"waiting for rank 1 of 2 at 127\.0\.0\.1:{port} \((\d\d|[6-9]) s\)")
    spoken.require_speech()
    assert spoken.end(signal.SIGTERM) == 75, spoken.text


@pytest.mark.usefixtures("cold")
def test_a_rank_without_rank_0_shows_whom_it_waits_for(tmp_path: Path) -> None:
    """The rank is the first one of another host."""
    port = free_port()
    job = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    spoken = Spoken(Files(tmp_path).options(ADDER), {**environment(), **job})
    spoken.wait_for(rf"waiting for rank 0 at 127\.0\.0\.1:{port} \(\d+ s\)")
    spoken.require_speech()
    os.kill(spoken.process.pid, signal.SIGKILL)
    spoken.end()


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize(
    ("command", "options", "phase"),
    [
        (
            "simulate",
            ("--preset", "gpt3-a100-tp8pp8", "--workload", "zipf:n=1000,min=1024,max=4096,theta=0.4,pd=10"),
            r"simulating balanced, chunk size \d+ \(1 of 1\)",
        ),
        ("doctor", (), "loading libraries"),
        ("check", ("--model", str(ADDER)), "loading libraries"),
        pytest.param(
            "bench",
            ("--model", str(ADDER), "--workload", "uniform:n=4,min=8,max=16,pd=4"),
            "quiet|machine's rates",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_other_commands_show_it_too(command: str, options: tuple[str, ...], phase: str) -> None:
    spoken = Spoken((command, *options), environment())
    spoken.wait_for(phase)
    assert spoken.lines[0][0] <= patient(FIRST_S), spoken.text
    spoken.end(signal.SIGTERM)


def test_quiet_is_quiet(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.write_prompts([(1, 5, 6, 12)], max_new_tokens=2)
    spoken = Spoken(files.options(ADDER, "--stages", "2", "--quiet"), environment())
    assert (spoken.end(), spoken.lines) == (0, [])
