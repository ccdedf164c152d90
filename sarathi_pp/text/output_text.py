"""The text of an output as it comes: the text that the output adds to that of its prompt.

    prompt ids           output ids
    . . . . . . . . [c c]. . . . . .
                     |   `- text = decode(context + output) without decode(context)
                     `----- context: the end of the prompt that decides how the output's first tokens read

Decoding an output alone would drop its first space with many tokenizers. It would also break a character whose first
bytes are in the prompt.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any, Protocol

# The beginning of a context is not searched further back than this.
_LONGEST_CONTEXT = 64
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
# Decoders that turn each token into text separately, except for changes at the ends of the whole text.
_BY_TOKEN = ("Replace", "ByteFallback", "Metaspace", "WordPiece", "BPEDecoder", "Strip")
# Decoders that make one text of all tokens.
_FUSING = ("Fuse", "ByteLevel")


class Decoder(Protocol):
    """The part of a tokenizer that decoding an output needs."""

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
        """Return the text of these first tokens of the output.

        It begins at the first character that the prompt's text does not have. Bytes at the end of a prompt read as
        U+FFFD until the output completes their character. Bytes of an output that make no character can spoil the
        prompt's last character, which is not part of the output.
        """
        whole = self._tokenizer.decode([*self._context, *token_ids], skip_special_tokens=self._skip)
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        same = len(os.path.commonprefix((whole, self._before)))
        if whole[same : same + 1] == "\ufffd" != self._before[same]:
            return self.of_part(token_ids)
        return whole[same:]

    def of_part(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens from the middle of the output. Its beginning may differ."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class StopChecker:
    """A search for stop strings in the output of one request, as its tokens come.

    Only the last tokens are decoded each time, enough for the longest stop string and some context. (A decoder may
    change the start of a text, for example drop a space. This must not reach the part that is searched.) So a token
    costs the same at the end of a long output as at its start:

        ids    . . . . . . . . . . . . [. . . . . . . .]
                                        `- window: at least `reach` characters, halved at twice that

    If the bytes of a character are in several tokens, it comes out right once its last byte is in the window. For that,
    the window must not begin inside a character: some decoders give up on a whole run of bytes for one misplaced byte.
    A match is confirmed on the whole output. So `push` is never true unless the text holds a stop string. A stop string
    that is written like a special token is matched by its id, since decoding hides it.
    """

    _CONTEXT = 16

    def __init__(self, text: OutputText, stop: Sequence[str], stop_ids: frozenset[int]) -> None:
        self._text = text
        self._stop = tuple(stop)
        self._stop_ids = stop_ids
        self._reach = max(map(len, stop)) + self._CONTEXT
        self._ids: list[int] = []
        self._start = 0

    def push(self, token_id: int) -> bool:
        """Take the next token, and return whether the output so far holds a stop string."""
        if token_id in self._stop_ids:
            return True
        if not self._text.visible(token_id):
            return False
        self._ids.append(token_id)
        window = self._text.of_part(self._ids[self._start :]) if self._start else self._text.of(self._ids)
        if self._holds_stop(window):
            return not self._start or self._holds_stop(self._text.of(self._ids))
        if len(window) > 2 * self._reach:
            self._narrow(force=len(window) > 16 * self._reach)
        return False

    def _holds_stop(self, text: str) -> bool:
        return any(stop in text for stop in self._stop)

    def _narrow(self, *, force: bool) -> None:
        """Halve the window if it then begins with a whole character.

        With `force`, halve it anyway: its bytes make none.
        """
        middle = (self._start + len(self._ids)) // 2
        for start in range(middle, middle + 4):  # a character has at most 4 bytes, so at most 4 tokens
            window = self._text.of_part(self._ids[start:])
            if start and len(window) >= self._reach and (force or not window.startswith("\ufffd")):
                self._start = start
                return


def decodes_locally(backend: Any) -> bool:
    """Return whether a short context decides how the tokens after it read. Return False if that is not known.

    Args:
        backend: a transformers tokenizer.
    """
    if not backend.is_fast:
        return False
    rust = backend.backend_tokenizer
    # Clean-up replaces parts all over the text, and earlier replacements decide what later ones find.
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
    """Return the end of a prompt after which an output reads as after the whole prompt.

    The decoder must be a local one.

    The context begins with a token that begins a character. This token is no byte of a run of byte tokens. It is not
    white space alone, which some decoders drop at the start of a text.
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
