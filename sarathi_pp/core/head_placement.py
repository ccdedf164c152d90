"""Which end of a pipeline computes the head: the last stage, or for some microbatches the first one.

Layers come in whole numbers and a head is none of them, so stages that are equal without it are not with it; and where
prompts make few rows for it and decodes many, no split of layers is even for both. But whoever draws needs nothing but
the rows, and the coordinator, which waits for the tokens, sits beside the first stage. So the error is diffused: what
the last stage has computed longer than the first one is kept, and the next head goes to where it brings that nearest to
zero. Of two equal stages that is every other microbatch, so that both compute the same in each turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from sarathi_pp.core.cost.model import CostModel, Load, Row
from sarathi_pp.core.cost.refiner import CostRefiner
from sarathi_pp.core.plan import MicroBatch, StageTime

# Microbatches whose median says what heads take, and how the last stage compares with the first.
_REMEMBERED = 31
# Stages whose times differ by less of a head are taken for equal: taking turns is then the nearest there is, and turns
# that noise turns round are a gap on both.
_ALIKE = 0.5


def moves_head(head: str, device: str, num_stages: int, shards: int) -> bool:
    """Whether a run does so. head: as somebody asked for it. On a GPU it would take memory from the KV cache, and a
    stage of several ranks would have to bring its rows together.
    """
    return head == "auto" and device == "cpu" and num_stages > 1 and shards == 1


class HeadPlacement:
    """cost: of all stages, as far as is known beforehand; learnt from then on, with what microbatches took.

    That comes later than where their heads go is decided, so it is expected times that are added up: in those of single
    microbatches there is noise that no later head makes good.
    """

    def __init__(self, cost: CostModel) -> None:
        first, last = cost.stages[0], cost.stages[-1]
        self._first = CostRefiner(replace(cost, stages=(first,)))
        self._row_s = last.head_s
        self._heads_s = _Recent()
        # Of the last stage's time without the head to the first one's.
        self._ratios = _Recent(_count(last.layers) / _count(first.layers))
        self._ahead = 0.0  # by how many heads the last stage has computed longer
        self._rows: deque[Row] = deque()  # of the microbatches in flight

    def choose(self, microbatch: MicroBatch) -> bool:
        """Whether the first stage computes the head of this one, which is the next to be issued."""
        num_drawn = microbatch.num_drawn
        row = self._first.row(Load.of(microbatch))
        self._rows.append(row)
        head_s = self._expected_s(num_drawn)
        longer_s = (self._ratios.median - 1) * self._first.model.stages[0].seconds(row)
        if abs(longer_s) >= _ALIKE * head_s > 0:
            self._ahead += longer_s / head_s
        on_first = num_drawn > 0 and self._ahead > 0
        if num_drawn:
            self._ahead += -1 if on_first else 1
        # What is further off was lost, and is not made good by losing as much on the other side.
        self._ahead = max(-1.0, min(1.0, self._ahead))
        return on_first

    def observe(self, microbatch: MicroBatch, times: Sequence[StageTime], head_s: float) -> None:
        """What the oldest one in flight took on each stage, and its head where the first one computed it."""
        row = self._rows.popleft()
        own_s = [time.seconds for time in times if time.microbatch == microbatch.index]
        if not own_s or len(own_s) < len(times) or not all(own_s):
            return  # nobody told, or a device that tells its times later
        self._first.observe(0, row, own_s[0])
        drawn = microbatch.num_drawn
        kept_s = self._expected_s(drawn) if drawn and not microbatch.head_on_first else 0.0
        self._ratios.add(max(0.0, own_s[-1] - kept_s) / own_s[0])
        if microbatch.head_on_first:
            self._heads_s.add(head_s)

    def restart(self, inflight: Iterable[MicroBatch]) -> None:
        """Forget all microbatches but these, oldest first."""
        self._rows = deque(self._first.row(Load.of(microbatch)) for microbatch in inflight)

    def _expected_s(self, num_drawn: int) -> float:
        """Of a head, of however many rows: reading its weights is most of it."""
        return self._heads_s.median if self._heads_s.numbers else self._row_s * max(1, num_drawn)


class _Recent:
    """Numbers of late, and their median where there are any: asked for more often than it changes."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = deque(numbers, maxlen=_REMEMBERED)
        self.median = median(numbers) if numbers else 0.0

    def add(self, number: float) -> None:
        self.numbers.append(number)
        self.median = median(self.numbers)


def _count(layers: tuple[int, int]) -> int:
    return layers[1] - layers[0]
