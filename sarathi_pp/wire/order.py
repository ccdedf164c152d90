"""Which directed edges a pipeline has, in the one order in which every rank sets them up.

    0 -> 1 -> 2 -> ... -> P-1     activations, behind their microbatch's header
    ^-----------------------'     token ids (the return edge)

One communicator per directed edge and one order per edge: no two messages can ever be matched crosswise.
"""

from __future__ import annotations


def edges(num_stages: int) -> tuple[tuple[int, int], ...]:
    """(sender, receiver) of every edge between different ranks; the return edge is the last one."""
    forward = tuple((stage, stage + 1) for stage in range(num_stages - 1))
    return (*forward, (num_stages - 1, 0)) if num_stages > 1 else ()
