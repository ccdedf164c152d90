"""Requests on their way to a pipeline. The next one is known in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import Protocol

from sarathi_pp.core.request import Request


class Arrivals(Protocol):
    @property
    def next_s(self) -> float:
        """Return when the next request is there; infinite if none comes."""

    def take(self, now_s: float) -> Request | None:
        """Return the next request if it is there, otherwise None."""


class InOrder:
    """The requests of a workload, each available from its arrival. One is made in advance."""

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
    """The requests that a replica was given, in that order. Each is available from the time when it was given."""

    def __init__(self) -> None:
        self._given: deque[tuple[float, Request]] = deque()

    def put(self, at_s: float, request: Request) -> None:
        self._given.append((at_s, request))

    @property
    def next_s(self) -> float:
        return self._given[0][0] if self._given else inf

    def take(self, now_s: float) -> Request | None:
        return self._given.popleft()[1] if self._given and self._given[0][0] <= now_s else None
