"""The bytes that one token stands for. They may be a part of a character."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# SentencePiece writes a space as this character.
_SPACE = "\u2581"


def is_byte_level(backend: Any) -> bool:
    """Return whether a transformers tokenizer writes each byte as one character, as GPT-2's does."""
    fast = getattr(backend, "backend_tokenizer", None)
    return fast is not None and "ByteLevel" in repr(fast.decoder)


def token_bytes(written: str, *, byte_level: bool, is_special: bool) -> bytes:
    """Return the bytes of a token.

    Args:
        written: the token as it is written in the vocabulary.
        byte_level: see `is_byte_level`.
        is_special: the token is written as it is, also in a byte-level vocabulary.
    """
    if match := _BYTE_TOKEN.fullmatch(written):
        return bytes.fromhex(match[1])
    if byte_level and not is_special and all(character in _bytes_of_characters() for character in written):
        return bytes(_bytes_of_characters()[character] for character in written)
    return written.replace(_SPACE, " ").encode(errors="replace")


@cache
def _bytes_of_characters() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary.

    Printable bytes of Latin-1 are their own characters. The others are the characters from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
