"""Options of the test suite.

`--full`: run the cases marked `full` too, property tests on all their examples, and every process cold.

`--cold`: start every process cold, including xdist's workers.

Without `--full` these cases are deselected, so the output lists no skipped ones. In CI the examples are always the
same. So a change in CI does not fail by chance on an unrelated example; runs at home find new ones.
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

# Otherwise waiting threads of torch take cores from the threads they wait for, for minutes on a busy machine.
let_threads_sleep()

# A test that sets no limit of its own hangs after this time.
_HANGS_S = 300.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the cases marked `full` too; start processes cold")
    parser.addoption("--cold", action="store_true", help="start processes cold")


def pytest_configure(config: pytest.Config) -> None:
    # Processes that a test starts would ignore these signals too, as they should.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background processes like this
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup starts processes like this
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Set this before xdist's workers, which inherit it, keep the cores busy.
    slowness(config.getoption("numprocesses", None) or 1)
    thinning.full = config.getoption("--full")
    if not thinning.full and not config.getoption("--cold"):
        start.begin()
    fixed = bool(os.environ.get("CI"))
    # No deadline: on a busy machine an example may take any time.
    hypothesis.settings.register_profile(
        "thinned", max_examples=thinning.examples(100), derandomize=fixed, deadline=None
    )
    hypothesis.settings.load_profile("thinned")


@pytest.fixture(autouse=True)
def signals_are_as_before() -> Iterator[None]:
    """Restore the signal handlers: a command ignores signals at its end, but this process continues."""
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
    """Return the reference answers of a family, computed once: in launch/test.sh once for all tiers."""
    own = tmp_path_factory.getbasetemp()
    shared = Path(os.environ.get("TESTS_SHARE") or (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own))
    return cache(lambda family: shared_reference(family, shared))


@pytest.fixture
def awake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep all cores of this machine out of sleep states while the test runs."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples" / "benchmarks")
    with importlib.import_module("awake").awake():
        yield
