"""Grammars of outputs: which tokens may follow, by llguidance, on a thread of its own.

    prepare: new tokens -> Guide -> [mask thread: compile, consume, mask] -> Future     draw: waits for it

The thread works while the layers compute. Only it touches the library. A run without grammars does not have it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.errors import InputError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_log = logging.getLogger(__name__)

# A bit for each token id that may be drawn, the lowest bit of each word first. Ids above them may not. None: the
# grammar cannot go on.
Mask = NDArray[np.uint32] | None

# Grammars that are kept compiled. Many requests have the same one.
_MOST_COMPILED = 64
# The library follows a chain of rules by nested calls. The longest chain that fits into a message takes 20 MB.
_STACK_BYTES = 256 << 20
# A state takes 1 to 2 kB of memory.
_MOST_LEXER_STATES = 50_000


def parser_limits() -> LLParserLimits:
    """Return the limits of a grammar. Each bounds one step to some 20 ms, and the states to about 100 MB."""
    from llguidance import LLParserLimits  # llguidance is optional

    return LLParserLimits(max_lexer_states=_MOST_LEXER_STATES, verbose_errors=False)


class TokenizerFiles(Protocol):
    """The files of the model's tokenizer."""

    def load(self) -> Any:
        """Return the tokenizer of transformers."""
        ...


def deep_executor(name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread whose stack is large enough for the library. Linux gives memory where needed."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        executor.submit(int).result()  # this starts the thread
    finally:
        threading.stack_size(before)
    return executor


class GrammarThread:
    """The thread that computes masks, and the vocabulary. Both are made by `warm_up` or for the first grammar.

    Args:
        tokenizer: loads the tokenizer of the model.
    """

    def __init__(self, tokenizer: TokenizerFiles) -> None:
        self._tokenizer = tokenizer
        self._executor: ThreadPoolExecutor | None = None
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # the latest one last

    def warm_up(self) -> None:
        """Read the vocabulary and wait for it. If that fails, the first grammar fails in the same way."""
        self._thread().submit(self._read_vocabulary).exception()

    def guide(self, rules: DrawRules) -> Guide:
        """Return the guide of a sequence at the start of its output. Compiling begins at once."""
        executor = self._thread()
        return Guide(rules, executor, executor.submit(self._matcher, rules.grammar))

    def _thread(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = deep_executor("grammar")
        return self._executor

    def _read_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer.load())
        return self._vocabulary

    def _matcher(self, grammar: str) -> tuple[LLMatcher, list[int]]:
        """Return a new matcher of a grammar, and the ids of the tokenizer's end tokens."""
        from llguidance import LLMatcher

        vocabulary, compiled = self._read_vocabulary(), self._compiled
        if grammar not in compiled:
            compiled[grammar] = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
        compiled.move_to_end(grammar)
        if len(compiled) > _MOST_COMPILED:
            compiled.popitem(last=False)
        return compiled[grammar].deep_copy(), vocabulary.eos_tokens


def _vocabulary(backend: Any) -> LLTokenizer:
    """Return llguidance's view of a fast tokenizer of transformers. It takes 2 s for 131,072 tokens."""
    from llguidance.hf import from_tokenizer

    return from_tokenizer(backend)


class Guide:
    """The grammar of one sequence, and the tokens of its output so far."""

    def __init__(
        self, rules: DrawRules, executor: ThreadPoolExecutor, matcher: Future[tuple[LLMatcher, list[int]]]
    ) -> None:
        self._rules = rules
        self._executor = executor
        self._matcher = matcher
        self._new: list[int] = []
        self._begun = rules.start_after is None

    def add(self, token_id: int) -> None:
        """Take the next token of the output."""
        if self._begun:
            self._new.append(token_id)
        elif token_id == self._rules.start_after:
            self._begun = True

    def next_mask(self) -> Future[Mask] | None:
        """Return the mask of the next token; None before the grammar begins."""
        if not self._begun:
            return None
        new, self._new = self._new, []
        return self._executor.submit(self._compute, new)

    def _compute(self, new: list[int]) -> Mask:
        """Return the mask after the new tokens."""
        try:
            matcher, ends = self._matcher.result()
        except (ImportError, ValueError, InputError) as error:
            _log.warning("a grammar cannot be used: %s", error)
            return None
        matcher.consume_tokens(new)
        found = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            _log.warning("a grammar cannot go on: %s", matcher.get_error().partition("\n")[0])
            return None
        own = self._rules.end_token_ids
        mask = np.zeros(max(len(found) // 4, max(own, default=0) // 32 + 1), np.uint32)
        mask[: len(found) // 4] = np.frombuffer(found, np.uint32)
        for token_id in ends:  # the rules alone decide which tokens end the output
            mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if matcher.is_accepting():
            for token_id in own:
                mask[token_id // 32] |= np.uint32(1 << token_id % 32)
        return mask
