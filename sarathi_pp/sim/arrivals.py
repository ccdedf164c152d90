"""Requests on their way to a pipeline, the next one known ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import Protocol

from sarathi_pp.core.request import Request


class Arrivals(Protocol):
    @property
    def next_s(self) -> float:
        """When the next one is there; infinite where none comes."""

    def take(self, now_s: float) -> Request | None:
        """The next one, if it is there."""


class InOrder:
    """Those of a workload, each when it arrives; one is made ahead."""

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
    """Those that a replica was given, in the order in which it was: each is there from then on."""

    def __init__(self) -> None:
        self._given: deque[tuple[float, Request]] = deque()

    def put(self, at_s: float, request: Request) -> None:
        self._given.append((at_s, request))

    @property
    def next_s(self) -> float:
        return self._given[0][0] if self._given else inf

    def take(self, now_s: float) -> Request | None:
        return self._given.popleft()[1] if self._given and self._given[0][0] <= now_s else None
