"""The work of the LM head for a microbatch with scored prompt tokens, on the last stage.

rows   [ scored tokens ............ | last tokens of chunks ]
         `- some at a time: score     `- together: draw
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sarathi_pp.core.plan import MicroBatch
from sarathi_pp.drawing.scoring import score, scored_rows
from sarathi_pp.model.stage_model import LMHead
from sarathi_pp.stages.stage import StageOutput
from sarathi_pp.stages.token_draw import TokenDraw


class PromptScoring:
    """The log probabilities of a microbatch's prompt tokens, and the tokens that are drawn after it.

    The rows after which a token is drawn get their logits together, as in any other microbatch.

    Attributes:
        rows: rows of the microbatch that the LM head gets: scored tokens first, then those after which one is drawn.
    """

    def __init__(self, microbatch: MicroBatch, draw: TokenDraw) -> None:
        assert not microbatch.head_on_first, "the rows of scored tokens stay here"
        scored = scored_rows(microbatch)
        self.rows = (*scored, *draw.rows())
        self._num_scored = len(scored)
        self._microbatch = microbatch
        self._draw = draw

    def begin(self) -> None:
        """Begin the work that goes on while the layers compute."""
        self._draw.begin()

    def output(self, head: LMHead, inputs: Tensor) -> StageOutput:
        """Compute the LM head, draw tokens and score prompt tokens. A sequence whose scores fail gets no token.

        Args:
            inputs: (n, size) inputs of the LM head, one for each of `rows`.
        """
        scored, last = inputs[: self._num_scored], inputs[self._num_scored :]
        output = self._draw.output(head.forward(last)) if self._draw.chunks else StageOutput()
        prompt_logprobs, failed = score(head, scored, self._microbatch)
        tokens = output.tokens
        if failed:
            lost = {token.sequence for token in failed}
            tokens = (*failed, *(token for token in tokens if token.sequence not in lost))
        return replace(output, tokens=tokens, prompt_logprobs=prompt_logprobs)
