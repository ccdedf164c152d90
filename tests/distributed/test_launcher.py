"""Signals to a process that has started stages; tests/faults/ covers their effect on the stages."""

import os
import signal
import sys
import time
from unittest.mock import Mock

import pytest

from sarathi_pp.distributed import launcher
from sarathi_pp.distributed.environment import begun_mark, heeded_mark
from sarathi_pp.distributed.launcher import Workers, launch
from sarathi_pp.errors import EXIT_INTERRUPTED, PeerLostError
from sarathi_pp.wire.mesh import Mesh
from tests.machine import patient

TWO = Mesh(stages=2)


@pytest.fixture
def ends(monkeypatch):
    """Return a function that replaces the next launch's workers with a given wait."""

    def end_by(wait):
        monkeypatch.setattr(Workers, "start", lambda workers, arguments: None)
        monkeypatch.setattr(Workers, "wait", lambda workers, say, noted: wait(noted))

    return end_by


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, PeerLostError.exit_code)]
)
def test_a_signal_gives_up_the_run(number, code, ends):
    def given_up_after_it(noted):
        assert not noted
        os.kill(os.getpid(), number)
        assert noted == [number]

    ends(given_up_after_it)
    assert launch(TWO, (), Mock()) == code
    os.kill(os.getpid(), number)  # too late: the process ends with that code
    assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.parametrize("code", [0, 3, 66])
def test_a_signal_changes_nothing_about_a_run_that_has_ended(code, ends):
    def ended_before_it(noted):
        os.kill(os.getpid(), signal.SIGTERM)
        return code

    ends(ended_before_it)
    assert launch(TWO, (), Mock()) == code


def test_what_is_ignored_stays_ignored(ends):
    """This is the case under nohup."""

    def hung_up(noted):
        os.kill(os.getpid(), signal.SIGHUP)
        assert not noted
        return 0

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ends(hung_up)
        assert launch(TWO, (), Mock()) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("ended_with", "starts", "code"),
    [([75, 75, 0], 3, 0), ([75, 75, 75, 75], 3, 75), ([75, 3], 2, 3), ([70], 1, 70), ([0], 1, 0)],
)
def test_only_a_lost_stage_starts_a_run_again(ended_with, starts, code, ends):
    codes = list(ended_with)
    said = []
    ends(lambda noted: codes.pop(0))
    assert launch(TWO, (), Mock(error=said.append), max_restarts=2) == code
    assert len(ended_with) - len(codes) == starts == len(said) + 1


def test_a_run_that_was_told_to_stop_is_not_started_again(ends):
    def told(noted):
        os.kill(os.getpid(), signal.SIGTERM)
        return PeerLostError.exit_code

    ends(told)
    assert launch(TWO, (), Mock(error=pytest.fail), max_restarts=2) == PeerLostError.exit_code


@pytest.mark.parametrize(
    ("codes", "begun", "over", "code"),
    [
        ({0: None, 1: None, 2: None, 3: -9}, False, True, 75),  # not yet: during set-up a rank waits for all
        ({0: None, 1: None, 2: 75, 3: -9}, True, False, None),
        ({0: 0, 1: 0, 2: 75, 3: -9}, True, True, 0),
        ({0: 3, 1: 0, 2: None, 3: None}, True, True, 3),
        ({0: 75, 1: 75, 2: 70, 3: 75}, True, True, 70),
        ({0: -9, 1: 75, 2: 75, 3: 75}, True, True, 75),
    ],
)
def test_once_all_are_set_up_a_replica_may_be_lost_and_rank_0_knows_how_the_run_ended(
    codes, begun, over, code, tmp_path
):
    workers = Workers(tmp_path / "store", Mesh(replicas=2, stages=2))
    if begun:
        begun_mark(tmp_path / "store").touch()
    assert workers._is_over(codes) == over
    if over:
        assert workers._cause(codes) == code


STAND_IN = """#!{python}
import os, pathlib, signal, sys, time
here = pathlib.Path(os.environ["SARATHI_PP_STORE"]).parent
rank = os.environ["RANK"]
told = []
signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
(here / f"ready-{{rank}}").touch()
while not told or {stays}:
    time.sleep(0.02)
    if told:
        (here / f"told-{{rank}}").touch()
sys.exit(75)
"""


@pytest.mark.timeout(30)
@pytest.mark.parametrize("stays", [False, True])
def test_the_first_signal_is_the_first_ranks_and_the_second_is_everybodys(stays, tmp_path, monkeypatch):
    """stays: the first rank does not end alone."""
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable, stays=stays))
    stand_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    workers = Workers(tmp_path / "store", TWO)
    workers.start(())
    heeded_mark(tmp_path / "store").touch()

    class Noted(list):
        """Signals that come after both workers handle them; the second one comes after the first has arrived."""

        def __len__(self):
            ready = all((tmp_path / f"ready-{rank}").exists() for rank in range(2))
            return ready + (stays and (tmp_path / "told-0").exists())

        def __getitem__(self, index):
            return signal.SIGUSR1

    try:
        assert workers.wait(Mock(), Noted()) == (None if stays else PeerLostError.exit_code)
        assert not (tmp_path / "told-1").exists()
    finally:
        workers.stop()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 1])
def test_a_worker_that_a_signal_killed_is_named_with_it(number, tmp_path, monkeypatch):
    """Python has no name for most real-time signals."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\n[ "$RANK" = 0 ] && exec sleep 20\nkill -{int(number)} $$\n')
    stand_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setattr(launcher, "_ECHO_S", 0.1)
    workers, said = Workers(tmp_path / "store", TWO), []
    try:
        workers.start(())
        assert workers.wait(Mock(error=said.append), []) == PeerLostError.exit_code
    finally:
        workers.stop()
    assert said == [f"stage 1 (rank 1) was killed by {'SIGKILL' if number == signal.SIGKILL else 'signal 35'}"]


FINISHED = """#!{python}
import os, pathlib, sys, time
first = os.environ["RANK"] == "0"
time.sleep(0 if first else {longer_s})
pathlib.Path(os.environ["SARATHI_PP_STORE"] + ".ended-" + os.environ["RANK"]).touch()
if not first and {dies}:
    os.kill(os.getpid(), 9)
sys.exit({code} if first else 0)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("longer_s", "dies", "code"),
    [
        *((4.0, False, 0), (4.0, True, 3), (1000.0, False, 0)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [(4.0, False, 3), (4.0, True, 0), (1000.0, False, 3)]
        ),
    ],
)
def test_a_rank_that_stays_when_the_first_has_finished_is_waited_for_and_not_for_ever(
    longer_s, dies, code, tmp_path, monkeypatch
):
    """4 s is more than a rank gets after a failure, because it may have a GPU to release.

    The run has ended in any case.
    """
    stand_in = tmp_path / "python"
    stand_in.write_text(FINISHED.format(python=sys.executable, longer_s=longer_s, dies=dies, code=code))
    stand_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setattr(launcher, "_LEAVE_S", 8.0)
    workers, said = Workers(tmp_path / "store", TWO), []
    workers.start(())
    began_s = time.monotonic()
    try:
        assert workers.wait(Mock(error=said.append), []) == code
        assert time.monotonic() - began_s < patient(8.0 + 3 * 3.0)
        stays = longer_s > 8.0
        assert (tmp_path / "store.ended-1").exists() == (not stays)
        stayed, died = "stage 1 (rank 1) had not ended 8 s after rank 0, and was killed", "was killed by SIGKILL"
        assert said == ([stayed] if stays else [f"stage 1 (rank 1) {died}"] if dies else [])
    finally:
        workers.stop()
