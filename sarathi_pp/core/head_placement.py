"""The choice of the stage that computes the LM head: the last stage, or for some microbatches the first one.

The LM head turns a row (the output vector of a token) into the scores from which the next token is drawn. If the layers
are divided evenly, it makes the last stage slower than the others. Another split of the layers does not help: prompt
chunks draw few tokens, so their LM head takes little time, and that of many decodes takes as long as some layers. But
the first stage can compute the LM head too. It needs only the rows, and the coordinator, which waits for the drawn
tokens, runs in the same process.

This module adds up how much longer the last stage has computed than the first one. The next LM head goes to the stage
that brings this sum nearest to zero. If both stages take equal times without it, they take turns: the first stage
computes the LM head of every other microbatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from sarathi_pp.core.cost.model import CostModel, Load, Row
from sarathi_pp.core.cost.refiner import CostRefiner
from sarathi_pp.core.plan import MicroBatch, StageTime

# Number of latest measurements in each of the two medians: the time of an LM head, and the last stage's time relative
# to the first stage's.
_REMEMBERED = 31
# The first and the last stage count as equal if their times differ by less than this share of an LM head's time. They
# then take turns. If noise in the measured times changed the turns, both stages would have to wait.
_ALIKE = 0.5


def moves_head(head: str, device: str, num_stages: int, shards: int) -> bool:
    """Return whether the first stage may compute LM heads in this run.

    It does not on a GPU, because the LM head's weights would take memory from the first stage's KV cache. It does not
    with tensor parallelism, because the ranks of the last stage would first have to collect their rows.

    Args:
        head: the user's choice, "auto" or "last". See `RunConfig.head`.
        device: "cpu" or "cuda".
        shards: number of ranks that compute each stage together (tensor parallelism).
    """
    return head == "auto" and device == "cpu" and num_stages > 1 and shards == 1


class HeadPlacement:
    """The choice of a stage for the LM head of each microbatch.

    It adds up expected times, since a microbatch's times are measured after the choice. Measured times only improve the
    expectation. They are not added up themselves: a later choice cannot correct their noise.

    Args:
        cost: cost model of all stages before the run. Measured times of microbatches refine it.
    """

    def __init__(self, cost: CostModel) -> None:
        first, last = cost.stages[0], cost.stages[-1]
        self._first = CostRefiner(replace(cost, stages=(first,)))
        self._row_s = last.head_s
        self._heads_s = _Recent()
        # Ratios of the last stage's time without the LM head to the first stage's time.
        self._ratios = _Recent(_count(last.layers) / _count(first.layers))
        self._ahead = 0.0  # number of LM heads by which the last stage has computed longer
        self._rows: deque[Row] = deque()  # of the microbatches in flight

    def choose(self, microbatch: MicroBatch) -> bool:
        """Return whether the first stage computes the LM head of this microbatch, which is issued next."""
        num_drawn = microbatch.num_drawn
        row = self._first.row(Load.of(microbatch))
        self._rows.append(row)
        head_s = self._expected_s(num_drawn)
        longer_s = (self._ratios.median - 1) * self._first.model.stages[0].seconds(row)
        if abs(longer_s) >= _ALIKE * head_s > 0:
            self._ahead += longer_s / head_s
        # The rows of scored tokens are too many to be sent back.
        on_first = num_drawn > 0 and self._ahead > 0 and not microbatch.scores
        if num_drawn:
            self._ahead += -1 if on_first else 1
        # Beyond one LM head, one stage has already waited for the other. That time is lost, and a wait of the other
        # stage would not bring it back.
        self._ahead = max(-1.0, min(1.0, self._ahead))
        return on_first

    def observe(self, microbatch: MicroBatch, times: Sequence[StageTime], head_s: float) -> None:
        """Learn from the measured times of the oldest microbatch in flight, whose result has come.

        Args:
            times: one per stage, first stage first.
            head_s: seconds of its LM head, if the first stage computed it.
        """
        row = self._rows.popleft()
        own_s = [time.seconds for time in times if time.microbatch == microbatch.index]
        if not own_s or len(own_s) < len(times) or not all(own_s):
            return  # the times are unknown, or the device reports them later
        self._first.observe(0, row, own_s[0])
        drawn = microbatch.num_drawn
        kept_s = self._expected_s(drawn) if drawn and not microbatch.head_on_first else 0.0
        self._ratios.add(max(0.0, own_s[-1] - kept_s) / own_s[0])
        if microbatch.head_on_first:
            self._heads_s.add(head_s)

    def restart(self, inflight: Iterable[MicroBatch]) -> None:
        """Forget all microbatches except those in `inflight`, which still have no result. Give them oldest first."""
        self._rows = deque(self._first.row(Load.of(microbatch)) for microbatch in inflight)

    def _expected_s(self, num_drawn: int) -> float:
        """Return the expected seconds of an LM head for `num_drawn` rows.

        They are the median of the measured times, whatever the number of rows: reading the weights takes most of the
        time. Before the first measurement, the cost model gives the seconds.
        """
        return self._heads_s.median if self._heads_s.numbers else self._row_s * max(1, num_drawn)


class _Recent:
    """The latest numbers and their median, which is read more often than it changes; 0 if there are none."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = deque(numbers, maxlen=_REMEMBERED)
        self.median = median(numbers) if numbers else 0.0

    def add(self, number: float) -> None:
        self.numbers.append(number)
        self.median = median(self.numbers)


def _count(layers: tuple[int, int]) -> int:
    return layers[1] - layers[0]
