"""The pool of state slot ids. It alone decides which state slots are free, and which sequence has which one.

A state slot holds what layers such as linear attention keep of one sequence's earlier tokens: a state of fixed size.
Every rank stores the states of its own layers, under the same ids. The coordinator sends a sequence's slot with its
first chunk, so a rank decides nothing.

    first chunk   its first row starts from the zero state, so it does not read the slot
    next chunks   each row reads the state that the row before it left there
    end           the slot is free, also after a preemption. Nothing is cleared

A slot may go to another sequence while chunks of its old sequence are in flight, as pages may. Stages are first in,
first out, so they apply the old chunks before the first chunk of the new sequence, which starts from the zero state.

Each token must be applied exactly once and in order. So no token is computed again (Grant.overlap), and no token is
skipped because its page was found (the prefix cache is off).
"""

from __future__ import annotations


class SlotPool:
    """State slot ids [0, num_slots). The slot that was given back last is taken first, and fresh ones lowest first.

    So on a CPU, few slots take physical memory. An assertion fails if a slot is taken when none is free, or given back
    when it is free, because that is a bug of sarathi-pp.

    Args:
        num_slots: number of slots; 0 if the model has no states. Each sequence then has the slot -1.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._taken = bytearray(num_slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Return a free slot, which is taken now; -1 if the model has no states."""
        if not self.num_slots:
            return -1
        assert self._free, f"all {self.num_slots} state slots are taken"
        slot = self._free.pop()
        self._taken[slot] = 1
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot that `take` returned."""
        if slot < 0:
            return
        assert self._taken[slot], f"state slot {slot} is free already"
        self._taken[slot] = 0
        self._free.append(slot)
