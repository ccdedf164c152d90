"""The text of an output while its tokens arrive: the text that the output adds to that of its prompt.

    prompt ids           output ids
    . . . . . . . . [c c]. . . . . .
                     |   `- text = decode(context + output) without decode(context)
                     `----- context: the last tokens of the prompt, which decide how the output's first ones decode

Decoding an output alone would drop its first space with many tokenizers. It would also break a character whose first
bytes are in the prompt.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any, Protocol

from sarathi_pp.sampling_params import SamplingParams

# The beginning of a context is searched in this number of last tokens of the prompt.
_LONGEST_CONTEXT = 64
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
# Decoders of the tokenizers library that turn each token into text separately. They may change both ends of the text.
_BY_TOKEN = ("Replace", "ByteFallback", "Metaspace", "WordPiece", "BPEDecoder", "Strip")
# Decoders that first join all tokens, and then make one text of them.
_FUSING = ("Fuse", "ByteLevel")


class Decoder(Protocol):
    """The methods of a tokenizer with which an output is decoded. See Tokenizer, which has them all."""

    def visible(self, token_id: int, *, skip_special_tokens: bool) -> bool: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def written(self, token_id: int) -> str: ...

    def context(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[int]: ...


class OutputText:
    """A decoder of one request's output, after its prompt.

    Args:
        prompt_token_ids: tokens of the request's prompt.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Decoder, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context = tokenizer.context(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._before = tokenizer.decode(self._context, skip_special_tokens=skip_special_tokens)

    def visible(self, token_id: int) -> bool:
        """Return whether the token can show in the text."""
        return self._tokenizer.visible(token_id, skip_special_tokens=self._skip)

    def of(self, token_ids: Sequence[int]) -> str:
        """Return the text of an output.

        Args:
            token_ids: tokens of the output, from its first one on.

        The text begins at the first character that the prompt's text does not have. Bytes at the end of a prompt read
        as U+FFFD until the output completes their character. Bytes of an output that make no character can spoil the
        prompt's last character, which is not part of the output.
        """
        whole = self._tokenizer.decode([*self._context, *token_ids], skip_special_tokens=self._skip)
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        same = len(os.path.commonprefix((whole, self._before)))
        if whole[same : same + 1] == "\ufffd" != self._before[same]:
            return self.of_part(token_ids)
        return whole[same:]

    def written(self, token_id: int) -> str:
        """Return a special token as it is written in the vocabulary."""
        return self._tokenizer.written(token_id)

    def of_part(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens from the middle of the output. Its beginning may be wrong, such as a space."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class StopChecker:
    """A search for stop strings in the output of one request, while its tokens arrive.

    Args:
        text: decodes the output.
        stop: the stop strings.
        stop_ids: ids of special tokens that are written like a stop string. They are compared by id, since decoding
            hides them.
        num_early: number of first tokens of the output that no stop string ends. A stop string must end after their
            text, but may begin in it.

    For each token, only the last tokens are decoded: enough for the longest stop string and some context. (A decoder
    may change the start of a text, for example drop a space. This must not reach the part that is searched.) So a token
    costs the same at the end of a long output as at its start:

        ids    . . . . . . . . . . . . [. . . . . . . .]
                                        `- window: at least `reach` characters, halved when it has twice that number

    If the bytes of a character are in several tokens, it is right when its last byte is in the window. For that, the
    window must not begin inside a character: for one misplaced byte, some decoders decode none of the bytes next to it.
    A match is confirmed on the whole output. So `push` is never true unless the text holds a stop string.
    """

    _CONTEXT = 16

    def __init__(self, text: OutputText, stop: Sequence[str], stop_ids: frozenset[int], num_early: int = 0) -> None:
        self._text = text
        self._stop = tuple(stop)
        self._stop_ids = stop_ids
        self._reach = max(map(len, stop)) + self._CONTEXT
        self._num_early_left = num_early
        self._ids: list[int] = []  # visible tokens of the output
        self._num_early = 0  # the early ones among them
        self._num_early_chars = 0  # in the text of the window
        self._start = 0

    def push(self, token_id: int) -> bool:
        """Add the next token of the output, and return whether the output so far holds a stop string."""
        if self._num_early_left:
            self._push_early(token_id)
            return False
        if token_id in self._stop_ids:
            return True
        if not self._text.visible(token_id):
            return False
        self._ids.append(token_id)
        window = self._text.of_part(self._ids[self._start :]) if self._start else self._text.of(self._ids)
        if find_stop(window, self._stop, self._num_early_chars) is not None:
            return not self._start or self._is_confirmed()
        if len(window) > 2 * self._reach:
            self._narrow(force=len(window) > 16 * self._reach)
        return False

    def _push_early(self, token_id: int) -> None:
        self._num_early_left -= 1
        if self._text.visible(token_id):
            self._ids.append(token_id)
            self._num_early += 1
        if not self._num_early_left:
            self._num_early_chars = num_whole_chars(self._text.of(self._ids))

    def _is_confirmed(self) -> bool:
        num_early_chars = num_whole_chars(self._text.of(self._ids[: self._num_early])) if self._num_early else 0
        return find_stop(self._text.of(self._ids), self._stop, num_early_chars) is not None

    def _narrow(self, *, force: bool) -> None:
        """Halve the window if it then begins with a whole character.

        Args:
            force: halve it in any case, because its bytes make no characters at all.
        """
        middle = (self._start + len(self._ids)) // 2
        for start in range(middle, middle + 4):  # a character has at most 4 bytes, so at most 4 tokens
            window = self._text.of_part(self._ids[start:])
            if start and len(window) >= self._reach and (force or not window.startswith("\ufffd")):
                self._start = start
                early = self._ids[start : self._num_early]
                self._num_early_chars = num_whole_chars(self._text.of_part(early)) if early else 0
                return


def find_stop(text: str, stop: Sequence[str], num_early_chars: int = 0) -> tuple[int, int] | None:
    """Return the first character and the end of the first stop string in a text; None if the text holds none.

    Args:
        num_early_chars: characters at the beginning of the text in which no stop string may end.
    """
    starts = ((text.find(one, max(0, num_early_chars + 1 - len(one))), len(one)) for one in stop)
    return min(((at, at + length) for at, length in starts if at >= 0), default=None)


def num_whole_chars(text: str) -> int:
    """Return the number of characters of a text without those at its end that the next tokens may complete."""
    return len(text.rstrip("\ufffd"))


def cut_at_stop(text: OutputText, token_ids: Sequence[int], sampling: SamplingParams, stop_ids: frozenset[int]) -> str:
    """Return the text of an output up to its first stop string. It ends where StopChecker has ended it.

    Args:
        token_ids: tokens of the output.
        sampling: parameters of the request, with the stop strings.
        stop_ids: see StopChecker.
    """
    least, keep = sampling.min_new_tokens, sampling.include_stop_str_in_output
    late = range(least, len(token_ids))
    end = next((place for place in late if token_ids[place] in stop_ids), len(token_ids))
    whole = text.of(token_ids[:end])
    found = find_stop(whole, sampling.stop, num_whole_chars(text.of(token_ids[:least])) if least else 0)
    if found is not None:
        return whole[: found[1] if keep else found[0]]
    return whole + text.written(token_ids[end]) if keep and end < len(token_ids) else whole


def decodes_locally(backend: Any) -> bool:
    """Return whether a few tokens of context are enough to decode the tokens after them.

    Return False if that is not known. Then the whole prompt must be the context.

    Args:
        backend: a transformers tokenizer.
    """
    if not backend.is_fast:
        return False
    rust = backend.backend_tokenizer
    # Clean-up replaces strings anywhere in the text, so a change at the start can affect later text.
    if backend.clean_up_tokenization_spaces and type(rust.model).__name__ != "BPE":
        return False
    if getattr(backend, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False):
        return False
    if rust.decoder is None:
        return True
    decoder = json.loads(rust.decoder.__getstate__())
    fused = False
    for part in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        if fused and not (part["type"] == "Strip" and part["content"] == " "):
            return False
        if part["type"] not in (*_BY_TOKEN, *_FUSING):
            return False
        fused |= part["type"] in _FUSING
    return True


def find_context(tokenizer: Decoder, token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[int]:
    """Return the last tokens of a prompt, after which an output decodes to the same text as after the whole prompt.

    `decodes_locally` must be true for the tokenizer.

    The first of these tokens begins a character. It is not a single byte, and not white space alone, which some
    decoders drop at the start of a text. If the last tokens of the prompt have no such token, return the whole prompt.
    """
    last = token_ids[-_LONGEST_CONTEXT:]
    for start in reversed(range(len(last))):
        token_id = last[start]
        if not tokenizer.visible(token_id, skip_special_tokens=skip_special_tokens):
            continue
        text = tokenizer.decode([token_id], skip_special_tokens=skip_special_tokens)
        if text.strip() and text[0] != "\ufffd" and not _BYTE_TOKEN.fullmatch(tokenizer.written(token_id)):
            return list(last[start:])
    return list(token_ids)
