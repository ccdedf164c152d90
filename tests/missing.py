"""What a test needs of a machine and does not find there."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skips the test; in continuous integration, whose machines have to have it, the test fails."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)
