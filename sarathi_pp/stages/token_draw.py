"""The next tokens of a microbatch, drawn from the logits after the last known token of each sequence."""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import dataclass

from torch import Tensor

from sarathi_pp.core.plan import MicroBatch, SampledToken
from sarathi_pp.drawing.draw import Edits, draw
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

    Attributes:
        chunks: the chunks after which a token is drawn: those that reach the end of their sequence's known tokens.
    """

    def __init__(self, microbatch: MicroBatch, edits: Edits, waits: WaitCount) -> None:
        self.chunks = [chunk for chunk in microbatch.chunks if chunk.sampling is not None]
        self._microbatch = microbatch
        self._edits = edits
        self._waits = waits

    def rows(self) -> list[int]:
        """Return the rows of the microbatch after which a token is drawn, in the order of the chunks."""
        rows, end = [], 0
        for chunk in self._microbatch.chunks:
            end += chunk.num_tokens
            if chunk.sampling is not None:
                rows.append(end - 1)
        return rows

    def output(self, logits: Tensor) -> StageOutput:
        """Draw tokens after the masks of their grammars are computed, and measure the wait for them.

        Each step of a grammar is limited, so the wait ends. It counts as progress, since loading the tokenizer of the
        first grammar may take longer than --peer-timeout.

        Args:
            logits: (n, vocab), one row per chunk.
        """
        masks = [edit.mask for edit in self._edits.values() if edit.mask is not None]
        if not masks:
            return StageOutput(tokens=self._draw(logits))
        clock = SystemClock()
        start_s = clock.now()
        while wait(masks, _WAIT_S).not_done:
            self._waits.num_waits += 1
        mask_s = clock.now() - start_s
        return StageOutput(tokens=self._draw(logits), mask_s=mask_s)

    def _draw(self, logits: Tensor) -> tuple[SampledToken, ...]:
        rows = [chunk.sampling for chunk in self.chunks if chunk.sampling is not None]
        if not rows:
            return ()
        return tuple(
            SampledToken(chunk.sequence, chunk.epoch, token_id, failure, logprobs=logprobs)
            for chunk, (token_id, failure, logprobs) in zip(self.chunks, draw(logits, rows, self._edits), strict=True)
        )
