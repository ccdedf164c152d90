"""`--full`: run the cases marked `full` too. Without it they are deselected, so nothing is shown as skipped."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the cases marked `full` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    thinned = [item for item in items if item.get_closest_marker("full")]
    if thinned:
        config.hook.pytest_deselected(items=thinned)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
