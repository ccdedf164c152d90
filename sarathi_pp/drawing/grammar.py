"""Grammars of outputs: which tokens may follow, by llguidance, on a thread of its own.

    prepare: new tokens -> Guide -> NextMask    layers begin -> [grammar thread: compile, consume, mask]    draw: waits

The thread works while the layers compute. One task has all masks of a microbatch, since each hand-over between threads
takes as long as a mask. It begins with the layers, because before them both threads would need the interpreter's lock.
Every mask must be computed, in the order of `next_mask`, since it brings the new tokens. Only this thread touches the
library. A run without grammars does not have it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
        return Guide(rules, self._thread().submit(self._follower, rules))

    def compute(self, masks: Sequence[NextMask]) -> Future[None]:
        """Begin to compute masks, in this order."""
        return self._thread().submit(_compute, masks)

    def _thread(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = deep_executor("grammar")
        return self._executor

    def _read_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer.load())
        return self._vocabulary

    def _follower(self, rules: DrawRules) -> _Follower:
        """Return a follower at the start of an output."""
        from llguidance import LLMatcher

        grammar, vocabulary, compiled = rules.grammar, self._read_vocabulary(), self._compiled
        if grammar not in compiled:
            compiled[grammar] = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
        compiled.move_to_end(grammar)
        if len(compiled) > _MOST_COMPILED:
            compiled.popitem(last=False)
        return _Follower(compiled[grammar].deep_copy(), vocabulary, rules)


def _vocabulary(backend: Any) -> LLTokenizer:
    """Return llguidance's view of a fast tokenizer of transformers. It takes 2 s for 131,072 tokens."""
    from llguidance.hf import from_tokenizer

    return from_tokenizer(backend)


def _compute(masks: Sequence[NextMask]) -> None:
    for mask in masks:
        mask.compute()


@dataclass(slots=True, eq=False)
class NextMask:
    """The mask of the next token of one sequence.

    Attributes:
        value: the mask. It is there when the future of `GrammarThread.compute` is done.
    """

    guide: Guide
    new: list[int]
    value: Mask = None

    def compute(self) -> None:
        """Compute the mask. Only the grammar thread may do this, once."""
        self.value = self.guide.mask_after(self.new)


class Guide:
    """The grammar of one sequence, and the tokens of its output so far.

    Args:
        follower: computes the masks.
    """

    def __init__(self, rules: DrawRules, follower: Future[_Follower]) -> None:
        self._rules = rules
        self._follower = follower
        self._new: list[int] = []
        self._begun = rules.start_after is None

    def add(self, token_id: int) -> None:
        """Take the next token of the output."""
        if self._begun:
            self._new.append(token_id)
        elif token_id == self._rules.start_after:
            self._begun = True

    def next_mask(self) -> NextMask | None:
        """Return the mask of the next token, not yet computed; None before the grammar begins."""
        if not self._begun:
            return None
        new, self._new = self._new, []
        return NextMask(self, new)

    def mask_after(self, new: list[int]) -> Mask:
        """Return the mask after some new tokens of the output. Only the grammar thread may ask for it."""
        try:
            follower = self._follower.result()
        except (ImportError, ValueError, InputError) as error:
            _log.warning("a grammar cannot be used: %s", error)
            return None
        return follower.mask_after(new)


class _Follower:
    """The library's view of one output. Only the grammar thread uses it.

    Args:
        matcher: follows the output.
        rules: they alone decide which tokens end the output. The library has the tokenizer's end tokens.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer, rules: DrawRules) -> None:
        self._matcher = matcher
        self._num_library = -(-vocabulary.vocab_size // 32)  # it takes exactly this many words
        self._num_words = max(self._num_library, max(rules.end_token_ids, default=0) // 32 + 1)
        self._never = [(token // 32, ~_bit(token)) for token in vocabulary.eos_tokens]
        self._at_end = [(token // 32, _bit(token)) for token in rules.end_token_ids]

    def mask_after(self, new: list[int]) -> Mask:
        """Return the mask after some new tokens of the output."""
        matcher = self._matcher
        matcher.consume_tokens(new)
        mask = np.zeros(self._num_words, np.uint32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, self._num_library * mask.itemsize)
        if matcher.is_error():
            _log.warning("a grammar cannot go on: %s", matcher.get_error().partition("\n")[0])
            return None
        for word, bits in self._never:
            mask[word] &= bits
        if matcher.is_accepting():
            for word, bits in self._at_end:
                mask[word] |= bits
        return mask


def _bit(token_id: int) -> np.uint32:
    return np.uint32(1 << token_id % 32)
