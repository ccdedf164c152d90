"""A pipeline whose stages hold tokens instead of keys and values: quick, and each token depends on every page.

The next token is a hash of what the last stage reads through its page tables. A wrong page or a wrong table changes it.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence

import torch

from sarathi_pp.core.plan import MicroBatch, SampledToken
from sarathi_pp.core.request import Request
from sarathi_pp.inputs.row import Row
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.stages.stage import StageOutput

VOCAB = 97
PAGE_SIZE = 4


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCAB


def expected(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


class FakeStage:
    counts_cpu = False
    bytes_read = 0
    graphed = None

    def __init__(self, num_pages: int, *, last: bool) -> None:
        self._memory = [0] * (num_pages * PAGE_SIZE)
        self._tables: dict[int, list[int]] = {}
        self._last = last

    def prepare(self, microbatch: MicroBatch):
        for sequence in microbatch.freed:
            self._tables.pop(sequence, None)
        for chunk in microbatch.chunks:
            self._tables.setdefault(chunk.sequence, []).extend(chunk.new_pages)

        def compute(hidden):
            drawn = []
            for chunk in microbatch.chunks:
                slots = self._slots(chunk.sequence, chunk.start + chunk.num_tokens)
                for slot, token in zip(slots[chunk.start :], chunk.token_ids, strict=True):
                    self._memory[slot] = token
                if chunk.sampling is not None:
                    token = next_token([self._memory[slot] for slot in slots])
                    drawn.append(SampledToken(chunk.sequence, chunk.epoch, token))
            if self._last:
                return StageOutput(tokens=tuple(drawn))
            return StageOutput(hidden=torch.zeros(microbatch.num_tokens, 1))

        return compute

    def _slots(self, sequence: int, count: int) -> list[int]:
        table = self._tables[sequence]
        return [table[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE for place in range(count)]


def request_rows(first_index: int, prompts: Sequence[Sequence[int]], count: int, stop: tuple[str, ...]) -> list[Row]:
    rows = []
    for index, prompt in enumerate(prompts, start=first_index):
        params = SamplingParams(max_new_tokens=count, seed=0, stop=stop)
        rows.append(Row(index + 1, index, "own", Request(index, tuple(prompt), params, 0.0)))
    return rows


def serving(runner, channel) -> threading.Thread:
    thread = threading.Thread(target=runner.serve, args=(channel,), daemon=True)
    thread.start()
    return thread
