"""Fixtures for tests of checkpoints."""

from tests.model.conftest import plain_linears as plain_linears
