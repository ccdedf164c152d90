"""Requests that arrive at a simulated pipeline, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import Protocol

from sarathi_pp.core.request import Request


class Arrivals(Protocol):
    """A source of requests for a simulation. The time of the next arrival is known in advance."""

    @property
    def next_s(self) -> float:
        """Return the time in seconds at which the next request arrives; infinite if no more come."""

    def take(self, now_s: float) -> Request | None:
        """Return the next request if it has arrived by `now_s`, otherwise None. It is then no longer in the source."""


class InOrder:
    """The requests of a workload, each available from its `arrival_s`. Only the next one is in memory."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._next = next(requests, None)

    @property
    def next_s(self) -> float:
        return inf if self._next is None else self._next.arrival_s

    def take(self, now_s: float) -> Request | None:
        request = self._next
        if request is None or request.arrival_s > now_s:
            return None
        self._next = next(self._requests, None)
        assert self._next is None or self._next.arrival_s >= request.arrival_s, "requests come in order of arrival"
        return request


class Inbox:
    """The requests that the load balancer has given to a replica. Each is available from the time when it was given."""

    def __init__(self) -> None:
        self._given: deque[tuple[float, Request]] = deque()

    def put(self, at_s: float, request: Request) -> None:
        """Add a request that was given at `at_s`, which must not be before earlier ones."""
        self._given.append((at_s, request))

    @property
    def next_s(self) -> float:
        return self._given[0][0] if self._given else inf

    def take(self, now_s: float) -> Request | None:
        return self._given.popleft()[1] if self._given and self._given[0][0] <= now_s else None
