"""The choice of a replica for the next request: the one with the least work, counted in tokens.

The work of a request is its prompt tokens plus the mean output tokens of ended requests, because its own output is not
known yet. A replica holds a limited number of requests. Further requests wait until one has ended, and go to the
replica that then has room. If all were given at the start, a slow replica would still run when the others are done.

With the prefix cache, a request may also go to a replica that knows the beginning of its prompt. SGLang's router and
Ray Serve choose in a similar way.
"""

from __future__ import annotations

from math import inf

from sarathi_pp.core.prefix_routes import PrefixRoutes
from sarathi_pp.core.request import MAX_WAITING_TOKENS, Request

# A replica that knows the prompt may have this factor of the least work, and one chunk. It may also hold this factor of
# the requests of others. Otherwise it would rarely get the request: while many wait, only the replica that has just
# ended one has room.
_KNOWN = 1.25


def most_held(max_num_seqs: int) -> int:
    """Return the most requests that a replica may hold, running and waiting ones together.

    As many may wait as may run. When a request ends, the next one is already there and starts at once.

    Args:
        max_num_seqs: most requests that run at once in the replica.
    """
    return 2 * max_num_seqs


def most_held_tokens(kv_tokens: int) -> int:
    """Return the number of prompt tokens at which a replica gets no further request.

    It is the tokens that may run, which the KV cache limits, and the tokens that may wait.

    Args:
        kv_tokens: most tokens that the replica's KV cache can hold.
    """
    return kv_tokens + MAX_WAITING_TOKENS


class LoadBalancer:
    """The requests that each replica holds, and the choice of a replica for the next one.

    Replicas are numbered from 0.

    Args:
        most: most requests that a replica may hold at once, waiting ones included. One that knows the prompt of a
            request gets it although it holds a quarter more.
        most_tokens: number of prompt tokens at which a replica gets no further request.
        routes: record of the replicas that know the beginnings of prompts. None: the prefix cache is off.
    """

    def __init__(self, num_replicas: int, most: int, most_tokens: int, routes: PrefixRoutes | None = None) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._routes = routes
        self._held: list[dict[int, Request]] = [{} for _ in range(num_replicas)]
        self._prompt_tokens = [0] * num_replicas
        self._lost = [False] * num_replicas
        self._ended = self._output_tokens = 0

    @property
    def room(self) -> int:
        """The number of requests that all replicas together can take now."""
        return sum(self._most - len(self._held[replica]) for replica in self.present if self._has_room(replica))

    @property
    def present(self) -> list[int]:
        """The indexes of the replicas that are not lost."""
        return [replica for replica, lost in enumerate(self._lost) if not lost]

    def num_held(self, replica: int) -> int:
        return len(self._held[replica])

    def give(self, request: Request) -> int:
        """Give a request to the replica with the least work, or to one that knows its prompt. Return its index.

        If several have equally little work, the first of them gets the request. The caller must check `room` before.
        """
        mean = self._output_tokens / self._ended if self._ended else 0.0
        loads = {
            replica: self._prompt_tokens[replica] + mean * len(self._held[replica])
            for replica in self.present
            if self._has_room(replica, _KNOWN)
        }
        replica = min(filter(self._has_room, loads), key=loads.__getitem__)
        if self._routes is not None:
            marks = self._routes.marks(request)
            most = _KNOWN * loads[replica] + self._routes.slack
            replica = next((known for known in self._routes.known(marks) if loads.get(known, inf) <= most), replica)
            self._routes.add(marks, replica)
        self._held[replica][request.index] = request
        self._prompt_tokens[replica] += len(request.prompt_token_ids)
        return replica

    def holds(self, replica: int, index: int) -> bool:
        """Return whether the replica holds the request with this index."""
        return index in self._held[replica]

    def end(self, replica: int, index: int, num_output_tokens: int) -> None:
        """Record that a request has ended. The replica must hold it.

        Args:
            index: index of the request.
        """
        request = self._held[replica].pop(index)
        self._prompt_tokens[replica] -= len(request.prompt_token_ids)
        self._ended += 1
        self._output_tokens += num_output_tokens

    def lose(self, replica: int) -> list[Request]:
        """Stop giving requests to the replica. Return the requests that it held, in the order in which it got them."""
        self._lost[replica] = True
        held, self._held[replica] = self._held[replica], {}
        self._prompt_tokens[replica] = 0
        return list(held.values())

    def clear(self) -> None:
        """Forget every request, without counting any as ended."""
        for held in self._held:
            held.clear()
        self._prompt_tokens = [0] * len(self._held)
        if self._routes is not None:
            self._routes.clear()

    def _has_room(self, replica: int, factor: float = 1.0) -> bool:
        """Return whether a replica may take a request. It then holds at most `factor` times `most`, rounded up."""
        return len(self._held[replica]) < factor * self._most and self._prompt_tokens[replica] < self._most_tokens
