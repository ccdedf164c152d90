"""The notice at the first signal."""

import math
import signal
from dataclasses import replace
from unittest.mock import Mock

import pytest

from sarathi_pp.engine.progress import Progress
from sarathi_pp.process.signals import Asked
from sarathi_pp.run.display import StopNotice

CTRL_C, TERM = Asked(signal.SIGINT, 1.0, math.inf), Asked(signal.SIGTERM, 1.0, 21.0)


@pytest.mark.parametrize(
    ("running", "asked", "says"),
    [
        (None, CTRL_C, "stopping: running requests are finished first; Ctrl-C again ends at once"),
        (0, CTRL_C, "stopping: 0 running requests are finished first; Ctrl-C again ends at once"),
        (1, CTRL_C, "stopping: 1 running request is finished first; Ctrl-C again ends at once"),
        (
            31,
            TERM,
            "stopping (SIGTERM): 31 running requests are finished first, for up to 20 s; another signal ends at once",
        ),
    ],
)
def test_it_counts_what_the_last_report_has_running(running, asked, says):
    seen, said = [], []
    notice = StopNotice(Mock(report_progress=seen.append), Mock(note=said.append))
    reports = [] if running is None else [replace(Progress.nothing(1), running=count) for count in (5, running)]
    for report in reports:
        notice.report_progress(report)
    notice.say(asked)
    assert (seen, said) == (reports, [says])
