"""Skip or fail a test if this machine does not have what the test needs."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skip the test; in continuous integration, whose machines must have it, fail the test."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)
