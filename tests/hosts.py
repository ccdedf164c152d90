"""The hosts of examples/benchmarks/hosts.py, for tests; without such hosts the test is skipped with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from examples.benchmarks.hosts import Hosts, NoHostsError, make_hosts
from tests.missing import missing


@contextmanager
def hosts_of(count: int) -> Iterator[Hosts]:
    try:
        with make_hosts(count) as hosts:
            yield hosts
    except NoHostsError as error:
        missing(str(error))
