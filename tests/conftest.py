"""`--full`: run the cases marked `full` too, property tests on all their examples, and every process cold.

`--cold`: start every process cold, xdist's workers too.

Without it such cases are deselected, so nothing is shown as skipped. In CI the examples are the same each time: a new
one that fails is found by whoever runs the tests at home, not by luck on another's change.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest

from sarathi_pp.distributed.environment import let_threads_sleep
from tests import thinning
from tests.exact.references import References, shared_reference
from tests.machine import patient, slowness
from tests.warm import start

# Else threads of torch that wait keep the core from those that they wait for, on busy cores for minutes.
let_threads_sleep()

# A test that says nothing else has hung by then.
_HANGS_S = 300.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the cases marked `full` too; start processes cold")
    parser.addoption("--cold", action="store_true", help="start processes cold")


def pytest_configure(config: pytest.Config) -> None:
    # What a test starts would ignore them too, as it should.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it puts into the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup starts
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Before xdist's workers, which inherit it, keep the cores busy.
    slowness(config.getoption("numprocesses", None) or 1)
    thinning.full = config.getoption("--full")
    if not thinning.full and not config.getoption("--cold"):
        start.begin()
    fixed = bool(os.environ.get("CI"))
    # No deadline: on a busy machine an example takes as long as it takes.
    hypothesis.settings.register_profile(
        "thinned", max_examples=thinning.examples(100), derandomize=fixed, deadline=None
    )
    hypothesis.settings.load_profile("thinned")


@pytest.fixture(autouse=True)
def signals_are_as_before() -> Iterator[None]:
    """A command ignores signals at its end, which is not the end of this process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
    before = [(number, signal.getsignal(number)) for number in numbers]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker is not None else _HANGS_S
        item.add_marker(pytest.mark.timeout(patient(seconds)), append=False)
    if config.getoption("--full"):
        return
    thinned = [item for item in items if item.get_closest_marker("full")]
    if thinned:
        config.hook.pytest_deselected(items=thinned)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The reference answers of a family, computed once: in launch/test.sh for all tiers."""
    own = tmp_path_factory.getbasetemp()
    shared = Path(os.environ.get("TESTS_SHARE") or (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own))
    return cache(lambda family: shared_reference(family, shared))


@pytest.fixture
def awake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For as long as the test runs, no core of this machine goes to sleep."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples" / "benchmarks")
    with importlib.import_module("awake").awake():
        yield
