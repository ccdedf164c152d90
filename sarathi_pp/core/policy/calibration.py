"""calibration: the policy of `sarathi-pp profile`. A cost model is fitted to the times of its microbatches.

A timetable, made before the run, lists all microbatches. It is not a policy for serving. The time of a microbatch
depends on its tokens, on the earlier tokens of its chunks and on the context of its decodes. So each of them is varied
separately: prompt tokens alone, decodes alone, both together. Each size runs several times. Some sizes are between
round numbers, because stages may compute in tiles of an unknown size. The order is shuffled, so that a machine that
slows down does not look like a size that costs more. Two or three of similar size follow each other, so that all stages
compute at once, as in a later run. (Vidur, arXiv 2405.05465, and SARATHI, arXiv 2308.16369, section 5.3, fit stage
times to measured sizes too. These sizes are ours.)

    step        chunks            decodes              as it prints
    0 ..        of short prompts  -                    m0[s0:0+1 s1:0+9 ...]     warm-up: sequences for later decodes
    then        256 tokens        -                    m9[s70:512+200 s71:0+56]  prompts in turn, cut where a step ends
                -                 8, short contexts    m10[d s3:12 ...]
                64 tokens         32, long contexts    m11[s71:56+64 | d s40:900 ...]

The timetable also fixes the length of each prompt and each output. So every request ends with its last step, and no
microbatch is left over. A sequence decodes again after at least `inflight` steps. By then its token is back, so no step
has to wait. (Only if memory is very short, a step waits until the pipeline is empty.)
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

from sarathi_pp.core.policy.view import Grant, Limits, Policy, View

# Least and most prompt tokens of the sizes that are measured in two groups. Larger ones take most of the time. Smaller
# ones come from the ends of prompts, and are rare if microbatches are filled.
_SMALL = 16
_LARGE = 512
# Prompt tokens of microbatches that also have decodes.
_MIXED_PREFILLS = (16, 32, 64, 128, 256, 512)
# Tokens of the shortest prompt after the warm-up, tokens of the longest prompt in the warm-up, most decodes of a
# sequence.
_SHORTEST = 16
_FILLING = 64
_MOST_DECODES = 64
# The fractional part of the golden ratio, for `_spread`.
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Step:
    """One microbatch of the timetable.

    Attributes:
        chunks: (index of the request, number of tokens) of each prompt chunk.
        decodes: indexes of the requests that decode.
        alone: issue it only when nothing is in flight. It needs a result, a seat (room for a running sequence) or pages
            of an earlier step.
    """

    chunks: tuple[tuple[int, int], ...]
    decodes: tuple[int, ...]
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Timetable:
    """All microbatches of a calibration, and the lengths that its requests must have.

    Attributes:
        warm_up: number of first steps whose times are not used.
        prompts: prompt lengths in tokens, by request index.
        outputs: output lengths in tokens, by request index.
    """

    steps: tuple[Step, ...]
    warm_up: int
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]


@cache
def make_timetable(limits: Limits, seed: int = 0) -> Timetable:
    """Return the timetable, the same for the same limits and seed. It needs no more seats or pages than there are."""
    return _Planner(limits, random.Random(seed)).plan()


@dataclass(slots=True)
class Calibration(Policy):
    """A policy that issues the microbatches of the timetable for the run's limits and this seed.

    The requests must have the lengths that the timetable gives.
    """

    # A calibration sets the chunk size itself.
    uses_chunk_size: ClassVar[bool] = False

    seed: int = 0
    _steps: Iterator[Step] | None = field(default=None, init=False)
    _next: Step | None = field(default=None, init=False)

    def pick(self, view: View) -> list[Grant]:
        if self._steps is None:
            self._steps = iter(make_timetable(view.limits, self.seed).steps)
            self._next = next(self._steps, None)
        ready = {s.index: s for s in (*view.decodes, *view.prefills, *view.waiting)}
        while self._next is not None:
            if self._next.alone and view.num_inflight:
                return []
            wanted = [*self._next.chunks, *((index, 1) for index in self._next.decodes)]
            self._next = next(self._steps, None)
            # A sequence that failed is gone. The others continue without it.
            there = [(ready[index], num_tokens) for index, num_tokens in wanted if index in ready]
            if there:
                return [Grant(sequence, min(num_tokens, sequence.remaining)) for sequence, num_tokens in there]
        # After the timetable, only requests that are not in it have tokens left.
        return [Grant(s, min(s.remaining, view.limits.chunk_size)) for s in list(ready.values())[:1]]

    def max_tokens(self, limits: Limits) -> int:
        return limits.chunk_size


@dataclass(frozen=True, slots=True)
class _Target:
    """A microbatch that the timetable should have. The planner chooses its sequences from the available ones.

    Attributes:
        decodes: number of decodes.
        contexts: choice of the sequences that decode: "short" or "long" for the shortest or longest contexts, "any" for
            a random choice. Empty without decodes.
    """

    prompt_tokens: int
    decodes: int = 0
    contexts: str = ""


class _Planner:
    """The maker of a timetable, step by step. It counts seats and pages as the coordinator will."""

    def __init__(self, limits: Limits, draw: random.Random) -> None:
        self._limits = limits
        self._draw = draw
        pool = limits.num_pages * limits.page_size
        room = limits.max_model_len - 2
        # Most decodes of a sequence, and most tokens of a prompt.
        self._growth = max(0, min(_MOST_DECODES, room, max(1, room // 8), max(1, pool // 16)))
        self._longest = max(1, min(limits.max_model_len - self._growth - 1, pool // 4 - self._growth))
        self._steps: list[Step] = []
        self._settled = 0  # the results of this number of first steps are back
        self._prompts: list[int] = []  # tokens, by request
        self._decoded: list[int] = []  # decodes so far, by request
        self._last: list[int] = []  # step of the last chunk or decode, by request
        self._left = 0  # tokens of the newest prompt that no step has yet
        self._live: list[int] = []  # requests in a seat, oldest first
        self._reserved = 0  # most pages that the live sequences will hold

    def plan(self) -> Timetable:
        self._fill()
        warm_up = len(self._steps) + self._limits.inflight
        groups = _groups(self._limits)
        self._draw.shuffle(groups)
        targets = [target for group in groups for target in group]
        self._take(targets)
        self._end_prompt()
        self._take(targets)
        self._end_prompt()
        return Timetable(tuple(self._steps), warm_up, tuple(self._prompts), tuple(1 + n for n in self._decoded))

    def _fill(self) -> None:
        """Add the warm-up: steps with short prompts, whose sequences decode in later steps.

        They use at most half of the KV pages, and all seats but one.
        """
        limits = self._limits
        room = min(limits.chunk_size, 4 * _FILLING)
        longest = min(_FILLING, self._longest, room)
        chunks: list[tuple[int, int]] = []
        for index in range(min(limits.max_decodes, limits.max_num_seqs - 1)):
            length = _spread(1, longest, index)
            if 2 * (self._reserved + self._pages(length)) > limits.num_pages:
                break
            if sum(tokens for _, tokens in chunks) + length > room:
                self._add(chunks, [])
                chunks = []
            self._open(length)
            self._left = 0
            chunks.append((index, length))
        if chunks:
            self._add(chunks, [])

    def _end_prompt(self) -> None:
        """Shorten the newest prompt to the tokens that are in steps, so that its sequence may decode."""
        if self._left:
            self._prompts[-1] -= self._left
            self._left = 0

    def _take(self, targets: list[_Target]) -> None:
        """Turn targets into steps and remove them from the list. Skip those that cannot be made yet.

        If none can be made, the next step waits until nothing is in flight (Step.alone), and all are tried once more.
        """
        while True:
            made = next((target for target in targets if self._make(target)), None)
            if made is not None:
                targets.remove(made)
            elif self._settled < len(self._steps):
                self._settled = len(self._steps)
            else:
                return

    def _make(self, target: _Target) -> bool:
        """Add the step of a target. Return False if too few sequences, or no room for a prompt, are available."""
        decodes = self._choose(target) if target.decodes else []
        if len(decodes) < target.decodes:
            return False
        chunks = self._cut(target.prompt_tokens, keep=decodes)
        if target.prompt_tokens and not chunks:
            return False
        self._add(chunks, decodes)
        return True

    def _choose(self, target: _Target) -> list[int]:
        """Return the requests that decode in a target's step; an empty list if too few are ready."""
        newest = len(self._prompts) - 1
        able = [
            index
            for index in self._live
            if self._is_back(index) and self._decoded[index] < self._growth and not (index == newest and self._left)
        ]
        if len(able) < target.decodes:
            return []
        able.sort(key=lambda index: self._prompts[index] + self._decoded[index])
        if target.contexts == "short":
            return able[: target.decodes]
        if target.contexts == "long":
            return able[-target.decodes :]
        return self._draw.sample(able, target.decodes)

    def _cut(self, num_tokens: int, keep: Collection[int]) -> list[tuple[int, int]]:
        """Return chunks of the next `num_tokens` prompt tokens, of fewer if there is no room for another prompt.

        Args:
            keep: requests that a new prompt must not replace.
        """
        chunks = []
        while num_tokens:
            if not self._left and not self._open(_spread(_SHORTEST, self._longest, len(self._prompts)), keep):
                break
            taken = min(num_tokens, self._left)
            chunks.append((len(self._prompts) - 1, taken))
            self._last[-1] = len(self._steps)
            self._left -= taken
            num_tokens -= taken
        return chunks

    def _open(self, length: int, keep: Collection[int] = ()) -> bool:
        """Start another prompt of `length` tokens. Return False if there is no room.

        It may replace the oldest requests whose last token is back, except those in `keep`.
        """
        limits, need = self._limits, self._pages(length)
        leaving = [index for index in self._live if index not in keep and self._is_back(index)]
        while len(self._live) == limits.max_num_seqs or self._reserved + need > limits.num_pages:
            if not leaving:
                return False
            oldest = leaving.pop(0)
            self._live.remove(oldest)
            self._reserved -= self._pages(self._prompts[oldest])
        self._live.append(len(self._prompts))
        self._prompts.append(length)
        self._decoded.append(0)
        self._last.append(len(self._steps))
        self._left = length
        self._reserved += need
        return True

    def _add(self, chunks: list[tuple[int, int]], decodes: list[int]) -> None:
        """Append a step to the timetable."""
        for index in (*(index for index, _ in chunks), *decodes):
            self._last[index] = len(self._steps)
        for index in decodes:
            self._decoded[index] += 1
        alone = 0 < len(self._steps) == self._settled
        self._steps.append(Step(tuple(chunks), tuple(decodes), alone))

    def _is_back(self, index: int) -> bool:
        """Return whether the result of a request's last step is known when the next step is issued."""
        last = self._last[index]
        return last < self._settled or last + self._limits.inflight <= len(self._steps)

    def _pages(self, length: int) -> int:
        """Return the pages that a prompt of this length and all its decodes need."""
        return -(-(length + self._growth) // self._limits.page_size)


def _groups(limits: Limits) -> list[list[_Target]]:
    """Return the targets of a calibration, in groups of similar size.

    With similar sizes, all stages compute at once while they are measured. A size has two groups, at different times of
    the run. The smallest and the largest sizes have one.
    """
    draw = random.Random(limits.chunk_size)
    groups = []
    sizes = _grid(limits.chunk_size)
    for size, above in zip(sizes, [*sizes[1:], sizes[-1]], strict=True):
        near = _Target(draw.randint(size, above))
        group = [_Target(size), _Target(size), near] if size <= _LARGE else [_Target(size), near]
        groups += [group] * (2 if _SMALL <= size <= _LARGE else 1)
    for count in _grid(min(limits.max_decodes, limits.chunk_size)):
        groups += [[_Target(0, count, contexts) for contexts in ("short", "any", "long")]] * 2
    most = limits.max_decodes
    for prefill in _MIXED_PREFILLS:
        for count in sorted({1, -(-most // 8), -(-most // 2), most}):
            around = draw.randint(prefill * 3 // 4, prefill * 5 // 4)
            if around + count <= limits.chunk_size:
                groups.append([_Target(around, count, contexts) for contexts in ("any", "long")])
    return groups


def _grid(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, ... and `most` itself."""
    sizes = {size for power in range(most.bit_length()) for size in (1 << power, 3 << power >> 1) if size <= most}
    return sorted(sizes | {most})


def _spread(least: int, most: int, index: int) -> int:
    """Return a length from `least` to `most` for an index.

    The lengths of the indexes 0, 1, 2, ... are spread evenly on a logarithmic scale, however many are taken. (The
    multiples of the golden ratio, modulo 1, have this property.)
    """
    least = min(least, most)
    return max(least, int(least * (most / least) ** (index * _GOLDEN % 1)))
