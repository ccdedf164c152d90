"""The next tokens of a microbatch, drawn from the logits after the last known token of each sequence."""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from sarathi_pp.core.plan import MicroBatch, SampledToken, SamplingRow
from sarathi_pp.drawing.draw import Drawn, Edits, draw
from sarathi_pp.drawing.grammar import GrammarThread
from sarathi_pp.drawing.latest_draw import LatestDraw
from sarathi_pp.drawing.sampling import launch
from sarathi_pp.model.inputs import on_device, pinned
from sarathi_pp.stages.stage import StageOutput
from sarathi_pp.trace.clock import SystemClock

# Seconds of a wait for masks that count as one step of progress.
_WAIT_S = 0.2


@dataclass(slots=True)
class WaitCount:
    """The number of whole _WAIT_S that drawing waited for masks. A stage reports them as progress."""

    num_waits: int = 0


class TokenDraw:
    """The drawing of one microbatch's next tokens.

    Args:
        edits: changes of the logits by the rules of requests.
        waits: counts the wait for masks.
        grammars: computes the masks.

    Attributes:
        chunks: the chunks after which a token is drawn: those that reach the end of their sequence's known tokens.
    """

    def __init__(
        self, microbatch: MicroBatch, edits: Edits, waits: WaitCount, grammars: GrammarThread | None = None
    ) -> None:
        self.chunks = [chunk for chunk in microbatch.chunks if chunk.sampling is not None]
        self._microbatch = microbatch
        self._edits = edits
        self._waits = waits
        self._grammars = grammars
        self._masks: Future[None] | None = None

    def rows(self) -> list[int]:
        """Return the rows of the microbatch after which a token is drawn, in the order of the chunks."""
        rows, end = [], 0
        for chunk in self._microbatch.chunks:
            end += chunk.num_tokens
            if chunk.sampling is not None:
                rows.append(end - 1)
        return rows

    def begin(self) -> None:
        """Begin to compute the masks of grammars, at the first call, while the layers compute."""
        if self._masks is None:
            masks = [edit.mask for edit in self._edits.values() if edit.mask is not None]
            if masks:
                assert self._grammars is not None, "its guides come from there"
                self._masks = self._grammars.compute(masks)

    def output(self, logits: Tensor) -> StageOutput:
        """Draw tokens after the masks of their grammars are computed, and measure the wait. Call `begin` before.

        Each step of a grammar is limited, so the wait ends. It counts as progress, since loading the tokenizer of the
        first grammar may take longer than --peer-timeout.

        Args:
            logits: (n, vocab), one row per chunk.
        """
        if self._masks is None:
            assert all(edit.mask is None for edit in self._edits.values()), "begin comes before the layers"
            return StageOutput(tokens=self._draw(logits))
        clock = SystemClock()
        start_s = clock.now()
        while wait([self._masks], _WAIT_S).not_done:
            self._waits.num_waits += 1
        self._masks.result()
        mask_s = clock.now() - start_s
        return StageOutput(tokens=self._draw(logits), mask_s=mask_s)

    def launch(self, logits: Tensor, latest: LatestDraw) -> StageOutput:
        """Let the device draw what `output` draws, and keep the ids there for the next microbatch.

        The host does not wait, unless a request has rules. Then it draws, for all rows.
        """
        if self._edits:
            return remember(self.output(logits), latest, logits.device)
        ids = launch(logits, self._sampling())
        copy = pinned(torch.empty(ids.shape, dtype=ids.dtype), ids.device)
        copy.copy_(ids, non_blocking=True)
        latest.put([chunk.sequence for chunk in self.chunks], ids)
        return StageOutput(later=lambda: self._tokens([Drawn.of(token, token < 0) for token in copy.tolist()]))

    def _draw(self, logits: Tensor) -> tuple[SampledToken, ...]:
        rows = self._sampling()
        return self._tokens(draw(logits, rows, self._edits)) if rows else ()

    def _sampling(self) -> list[SamplingRow]:
        return [chunk.sampling for chunk in self.chunks if chunk.sampling is not None]

    def _tokens(self, found: list[Drawn]) -> tuple[SampledToken, ...]:
        return tuple(
            SampledToken(chunk.sequence, chunk.epoch, token_id, failure, logprobs=logprobs)
            for chunk, (token_id, failure, logprobs) in zip(self.chunks, found, strict=True)
        )


def remember(output: StageOutput, latest: LatestDraw, device: torch.device) -> StageOutput:
    """Keep the ids of tokens that the host knows for the next microbatch, and return the output."""
    ids = torch.tensor([token.token_id for token in output.tokens], dtype=torch.int64)
    latest.put([token.sequence for token in output.tokens], on_device(ids, device))
    return output
