"""The tokens of one sequence so far, as its drawing rules need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.drawing.grammar import Guide, NextMask

_LEAST_ROOM = 256
_NO_IDS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Edit:
    """The changes of one row of scores before a token is drawn. Tokens are ids.

    Attributes:
        rules: the rules of the sequence.
        seen: tokens that the penalties concern, each once.
        counts: for each of them, how often it is in the output.
        banned: tokens that must not be drawn, some of them more than once.
        allowed: no other tokens may be drawn; None for all.
        mask: tokens that the grammar allows, not yet computed; None without a grammar, or before it begins.
    """

    rules: DrawRules
    seen: NDArray[np.int64]
    counts: NDArray[np.int64]
    banned: NDArray[np.int64]
    allowed: NDArray[np.int64] | None = None
    mask: NextMask | None = None

    @property
    def changes_scores(self) -> bool:
        """Return whether scores change, and not only bans."""
        return bool(self.rules.logit_bias) or len(self.seen) > 0


class History:
    """The tokens of one sequence. Taking a token takes constant time, whatever the length.

    Args:
        guide: the grammar of the output; None without one.
    """

    def __init__(self, rules: DrawRules, guide: Guide | None = None) -> None:
        self._rules = rules
        self._guide = guide
        self._tokens: list[int] = []
        self._places: dict[int, int] = {}  # of each token in the next two arrays
        self._seen = np.empty(_LEAST_ROOM, np.int64)
        self._counts = np.empty(_LEAST_ROOM, np.int64)
        self._followers: dict[tuple[int, ...], set[int]] = {}  # last tokens of the n-grams so far, by the others
        self._words: dict[int, list[tuple[int, ...]]] = {}  # bad words of several tokens, by their last token but one
        for word in rules.bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append(word)
        single = (word[0] for word in rules.bad_words if len(word) == 1)
        self._always_banned = np.array([*rules.banned_token_ids, *single], np.int64)
        self._may_ban = bool(rules.no_repeat_ngram_size or self._words or rules.min_tokens or rules.banned_at_start)
        allowed = rules.allowed_token_ids
        self._allowed = None if allowed is None else np.array(allowed, np.int64)

    def extend(self, start: int, token_ids: Sequence[int]) -> None:
        """Take the tokens [start, start + n) of the sequence. Those that it has already are skipped."""
        assert start <= len(self._tokens), f"tokens {len(self._tokens)} to {start} did not come"
        for token in token_ids[len(self._tokens) - start :]:
            self._add(token)

    def edit(self) -> Edit:
        """Return the changes of the scores for the next token."""
        banned, seen, counts = self._always_banned, _NO_IDS, _NO_IDS
        if self._may_ban and (now := self._banned_now()):
            banned = np.concatenate([banned, np.array(list(now), np.int64)])
        if used := len(self._places):
            seen, counts = self._seen[:used].copy(), self._counts[:used].copy()
        mask = None if self._guide is None else self._guide.next_mask()
        return Edit(self._rules, seen, counts, banned, self._allowed, mask)

    def _add(self, token: int) -> None:
        rules, is_output = self._rules, len(self._tokens) >= self._rules.num_prompt
        self._tokens.append(token)
        if self._guide is not None and is_output:
            self._guide.add(token)
        if rules.repetition_penalty != 1 or (is_output and (rules.frequency_penalty or rules.presence_penalty)):
            self._count(token, is_output)
        size = rules.no_repeat_ngram_size
        if 0 < size <= len(self._tokens):
            *others, last = self._tokens[-size:]
            self._followers.setdefault(tuple(others), set()).add(last)

    def _count(self, token: int, is_output: bool) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._seen):
                self._seen, self._counts = np.resize(self._seen, 2 * place), np.resize(self._counts, 2 * place)
            self._seen[place], self._counts[place] = token, 0
        self._counts[place] += is_output

    def _banned_now(self) -> set[int]:
        """Return the tokens that are banned at this position only. There are none without `_may_ban`."""
        rules, tokens = self._rules, self._tokens
        found: set[int] = set()
        size = rules.no_repeat_ngram_size
        if size and len(tokens) >= size - 1:
            found |= self._followers.get(tuple(tokens[len(tokens) - size + 1 :]), set())
        for *others, last in self._words.get(tokens[-1], ()):
            if tokens[-len(others) :] == others:
                found.add(last)
        num_output = len(tokens) - rules.num_prompt
        if num_output < rules.min_tokens:
            found.update(rules.end_token_ids)
        if num_output == 0:
            found.update(rules.banned_at_start)
        return found
