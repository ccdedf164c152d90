"""The choice of a replica for the next request: the one with the least work, counted in tokens.

The work of a request is its prompt tokens plus the mean output tokens of ended requests, because its own output is not
known yet. A replica holds a limited number of requests. Further requests wait until one has ended, and go to the
replica that then has room. If all were given at the start, a slow replica would still run when the others are done.
"""

from __future__ import annotations

from sarathi_pp.core.request import MAX_WAITING_TOKENS, Request


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
        most: most requests that a replica may hold at once, waiting ones included.
        most_tokens: number of prompt tokens at which a replica gets no further request.
    """

    def __init__(self, num_replicas: int, most: int, most_tokens: int) -> None:
        self._most = most
        self._most_tokens = most_tokens
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
        """Give a request to the replica with the least work. Return the index of that replica.

        If several have equally little work, the first of them gets the request. The caller must check `room` before.
        """
        mean = self._output_tokens / self._ended if self._ended else 0.0
        replica = min(
            filter(self._has_room, self.present),
            key=lambda replica: self._prompt_tokens[replica] + mean * len(self._held[replica]),
        )
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

    def _has_room(self, replica: int) -> bool:
        return len(self._held[replica]) < self._most and self._prompt_tokens[replica] < self._most_tokens
