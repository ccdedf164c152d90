"""What signals do to a process that has started stages. What they do to the stages is in tests/faults/."""

import os
import signal

import pytest

from sarathi_pp.errors import EXIT_INTERRUPTED, PeerLostError
from sarathi_pp.runtime.launcher import Workers, launch


@pytest.fixture
def ends(monkeypatch):
    """Makes the next launch's workers be nobody, who are waited for in that way."""

    def end_by(wait):
        monkeypatch.setattr(Workers, "start", lambda workers, arguments: None)
        monkeypatch.setattr(Workers, "wait", lambda workers, say, given_up: wait(given_up))

    return end_by


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, PeerLostError.exit_code)]
)
def test_a_signal_gives_up_the_run(number, code, ends):
    before = signal.getsignal(number)

    def given_up_after_it(given_up):
        assert not given_up()
        os.kill(os.getpid(), number)
        assert given_up()

    ends(given_up_after_it)
    assert launch(2, (), print) == code
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("code", [0, 3, 66])
def test_a_signal_changes_nothing_about_a_run_that_has_ended(code, ends):
    def ended_before_it(given_up):
        os.kill(os.getpid(), signal.SIGTERM)
        return code

    ends(ended_before_it)
    assert launch(2, (), print) == code


def test_what_is_ignored_stays_ignored(ends):
    """As under nohup."""

    def hung_up(given_up):
        os.kill(os.getpid(), signal.SIGHUP)
        assert not given_up()
        return 0

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ends(hung_up)
        assert launch(2, (), print) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
