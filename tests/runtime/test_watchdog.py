"""The watchdog: it ends the process in time, wherever what it writes gets stuck."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.processes import environment, full_pipe

PROGRAM = """
import sys, time
from sarathi_pp.errors import PeerLostError
from sarathi_pp.runtime.watchdog import Watchdog

def leave(error):
    open(sys.argv[1], "w").write(str(error.exit_code))
    if sys.argv[2] == "speaks":
        print(error, file=sys.stderr, flush=True)

Watchdog(leave).end_within(0.1, PeerLostError("lost"))
time.sleep(100)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["speaks", "is silent"])
def test_a_standard_error_that_nobody_reads_does_not_keep_it_from_ending(how: str, tmp_path: Path) -> None:
    """Neither the message nor, behind a silent one, the stacks, which are written with the interpreter's lock held."""
    reader, writer = full_pipe()
    left = tmp_path / "left"
    process = subprocess.Popen((sys.executable, "-c", PROGRAM, str(left), how), env=environment(), stderr=writer)
    os.close(writer)
    try:
        began_s = time.monotonic()
        assert process.wait(3 * 5.0) == 75
        assert time.monotonic() - began_s > 2.0
        assert left.read_text() == "75"
    finally:
        process.kill()
        process.wait()
        os.close(reader)


def test_the_stacks_are_shown_behind_the_message(tmp_path: Path) -> None:
    command = (sys.executable, "-c", PROGRAM, str(tmp_path / "left"), "speaks")
    done = subprocess.run(command, env=environment(), stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 75
    assert done.stderr.startswith("lost\n") and "most recent call first" in done.stderr and "line 12" in done.stderr
