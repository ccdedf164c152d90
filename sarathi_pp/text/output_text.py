"""The text of an output as it comes: what the output adds to the text of its prompt.

    prompt ids           output ids
    . . . . . . . . [c c]. . . . . .
                     |   `- text = decode(context + output) without decode(context)
                     `----- context: as much of the prompt as decides how the output's first tokens read

Decoding an output alone would drop its first space with many tokenizers, and would break a character whose first bytes
are in the prompt.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any, Protocol

# Further back no beginning of a context is looked for.
_LONGEST_CONTEXT = 64
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
# Decoders that turn each token into text for itself, but for what they do at the ends of the whole text.
_BY_TOKEN = ("Replace", "ByteFallback", "Metaspace", "WordPiece", "BPEDecoder", "Strip")
# Decoders that make one text of all tokens.
_FUSING = ("Fuse", "ByteLevel")


class Decoder(Protocol):
    """What decoding an output asks of a tokenizer."""

    def visible(self, token_id: int, *, skip_special_tokens: bool) -> bool: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def written(self, token_id: int) -> str: ...

    def context(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[int]: ...


class OutputText:
    """Decodes the output of one request after its prompt.

    Args:
        prompt_token_ids: of the request.
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

        It begins at the first character that the prompt's text does not have: bytes at the end of a prompt read as
        U+FFFD until the output completes their character. Bytes of an output that make no character can spoil the
        prompt's last one, which is no part of the output.
        """
        whole = self._tokenizer.decode([*self._context, *token_ids], skip_special_tokens=self._skip)
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        same = len(os.path.commonprefix((whole, self._before)))
        if whole[same : same + 1] == "\ufffd" != self._before[same]:
            return self.of_part(token_ids)
        return whole[same:]

    def of_part(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens from within the output, which may differ at its beginning."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


class StopChecker:
    """Looks for stop strings in the output of one request as its tokens come.

    Only the last tokens are decoded each time, enough for the longest stop string and some context (what a
    decoder does at the start of a text, such as dropping a space, must not reach the part that is searched),
    so a token costs the same at the end of a long output as at its start:

        ids    . . . . . . . . . . . . [. . . . . . . .]
                                        `- window: at least `reach` characters, halved at twice that

    Characters whose bytes lie in several tokens come out right once their last byte is in the window, provided
    that it does not begin inside one: some decoders give up on a whole run of bytes for one that is astray. A find
    is confirmed on the whole output, so `push` is never true without the text holding a stop string. A stop
    string that is written like a special token is matched by its id, since decoding hides it.
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
        """Take the next token; return whether the output so far holds a stop string."""
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
        """Halve the window if it then begins with a whole character, or by force: bytes that make none."""
        middle = (self._start + len(self._ids)) // 2
        for start in range(middle, middle + 4):  # a character has at most 4 bytes, so at most 4 tokens
            window = self._text.of_part(self._ids[start:])
            if start and len(window) >= self._reach and (force or not window.startswith("\ufffd")):
                self._start = start
                return


def decodes_locally(backend: Any) -> bool:
    """Return whether a short context decides how the tokens after it read; False if that is not known.

    backend: a transformers tokenizer.
    """
    if not backend.is_fast:
        return False
    rust = backend.backend_tokenizer
    # Cleaning up replaces all over the text, and earlier replacements decide what later ones find.
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
    """Return the end of a prompt after which an output reads as after all of it; the decoder must be a local one.

    The context begins with a token that begins a character and is no byte of a run of them, and that is not white space
    alone, which some decoders drop at the start of a text.
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
