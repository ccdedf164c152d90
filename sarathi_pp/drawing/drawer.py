"""The sequences whose requests have drawing rules, on a stage that draws tokens.

A microbatch brings the tokens of all its chunks to every stage. For sequences with rules, that includes the token that
was drawn last. So the stage that draws knows these sequences completely before its layers run:

    microbatch -> prepare: histories -> Edits     logits -> draw: changed scores -> token ids

Two stages may draw: the last one, and the first one for microbatches whose LM head it computes. Each keeps histories of
its own. They are equal, because each sees every microbatch.
"""

from __future__ import annotations

from sarathi_pp.core.draw_rules import DrawRules, split_first_bytes
from sarathi_pp.core.plan import MicroBatch
from sarathi_pp.drawing.draw import Edits
from sarathi_pp.drawing.grammar import GrammarThread
from sarathi_pp.drawing.history import Edit, History


class Drawer:
    """The histories of the sequences that have rules. A run without rules has none.

    Args:
        grammars: makes the guides of sequences with a grammar.
    """

    def __init__(self, grammars: GrammarThread | None = None) -> None:
        self._grammars = grammars
        self._histories: dict[int, History] = {}

    def prepare(self, microbatch: MicroBatch, *, draws: bool = True) -> Edits:
        """Take in the tokens of a microbatch. Return the changes for the tokens that are drawn after it.

        Raises:
            ProtocolError: the rules that came with a chunk are not legal.
        """
        histories = self._histories
        if histories:
            for sequence in microbatch.freed:
                histories.pop(sequence, None)
        edits: dict[int, Edit] = {}
        num_drawn = 0
        for chunk in microbatch.chunks:
            if chunk.rules:
                rules, tokens = split_first_bytes(chunk.rules)
                histories[chunk.sequence] = self._history(rules)
                histories[chunk.sequence].extend(0, tokens)
            if histories and (history := histories.get(chunk.sequence)) is not None:
                history.extend(chunk.start, chunk.token_ids)
                if draws and chunk.sampling is not None:
                    edits[num_drawn] = history.edit()
            num_drawn += chunk.sampling is not None
        return edits

    def _history(self, rules: DrawRules) -> History:
        if not rules.grammar:
            return History(rules)
        assert self._grammars is not None, "a stage with a model has its directory"
        return History(rules, self._grammars.guide(rules))
