"""The rules that change a request's logits before a token is drawn, such as penalties and banned tokens.

A stage that draws tokens needs them: the last stage, and the first one if it computes the LM head. They travel as bytes
with the first chunk of a sequence, and again each time that the sequence is computed again. If that chunk does not
start at the first token, the tokens before it travel with them. A request without such rules has none of these objects.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sarathi_pp.errors import ProtocolError

# Most bytes of a request's rules in a message, and of the rules of one microbatch with the tokens that go with them.
MOST_BYTES = 1 << 16
MOST_MICROBATCH_BYTES = 1 << 18
TOKEN_BYTES = 4


class Failure(enum.IntEnum):
    """The reason why no token was drawn, and the request fails."""

    NONE = 0
    NOT_FINITE = 1  # the logits have NaN or infinity
    NO_TOKEN = 2  # the request's rules allow no token
    GRAMMAR = 3  # the request's grammar is beyond the limits of its library, or names a token that does not exist


@dataclass(frozen=True, kw_only=True)
class DrawRules:
    """The rules of one request. The defaults change nothing.

    A token's score starts as its logit in float32. The rules apply in this order, which is that of transformers:
    logit_bias, repetition_penalty, frequency_penalty and presence_penalty, then all bans. A grammar bans each token
    that cannot continue it. Temperature, top-k, top-p and min-p follow, and after them typical_p, epsilon_cutoff and
    eta_cutoff.

    Attributes:
        num_prompt: number of prompt tokens.
        logit_bias: pairs of a token id and the number that is added to its score.
        repetition_penalty: for each token of the prompt or the output, a positive score is divided by it, and a
            negative one is multiplied.
        frequency_penalty: is subtracted from a token's score as often as the token is in the output.
        presence_penalty: is subtracted from the score of each token in the output.
        allowed_token_ids: only these tokens may be drawn; None for all.
        banned_token_ids: these tokens are never drawn.
        banned_at_start: these tokens are not drawn as the first token of the output.
        bad_words: sequences of token ids. The last token of one is banned after the other ones.
        no_repeat_ngram_size: no sequence of this number of tokens may be in prompt and output twice; 0 for no limit.
        min_tokens: number of output tokens before which `end_token_ids` are banned.
        end_token_ids: tokens that end the output.
        typical_p: see TypicalLogitsWarper of transformers; 1 keeps every token.
        epsilon_cutoff: least probability of a kept token; 0 keeps every token.
        eta_cutoff: see EtaLogitsWarper of transformers; 0 keeps every token.
        logprobs: number of the likeliest tokens whose log probabilities are wanted, besides that of the drawn one; None
            for no log probabilities.
        grammar: grammar of the output, in a form of llguidance; empty for none. When it is complete, only
            `end_token_ids` are allowed.
        start_after: id of the output token after which the grammar begins; None for the start of the output.
    """

    num_prompt: int
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    banned_at_start: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    logprobs: int | None = None
    grammar: str = ""
    start_after: int | None = None

    @functools.cached_property
    def edits(self) -> bool:
        """Return whether the rules change scores. A row that only wants log probabilities keeps its logits."""
        return any(getattr(self, name) != default for name, default in _DEFAULTS.items() if name != "logprobs")

    @property
    def narrows(self) -> bool:
        """Return whether typical_p, epsilon_cutoff or eta_cutoff may drop a token."""
        return self.typical_p < 1 or self.epsilon_cutoff > 0 or self.eta_cutoff > 0

    def to_bytes(self) -> bytes:
        """Return a JSON text without the fields that change nothing."""
        given = {name: value for name, value in asdict(self).items() if value != _DEFAULTS.get(name, ...)}
        return json.dumps(given, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> DrawRules:
        """Return the rules that `to_bytes` wrote. Raise ProtocolError for any other text."""
        try:
            values: dict[str, Any] = {name: _tuples(value) for name, value in json.loads(text).items()}
            for name, value in values.items():
                if not _is_legal(value, _DEFAULTS.get(name, 0)):
                    raise ValueError(f"{name} is {value!r:.100}")
            return cls(**values)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{len(text)} bytes are not the rules of a request: {error}") from error


_DEFAULTS = {one.name: one.default for one in fields(DrawRules) if one.name != "num_prompt"}


def first_bytes(rules: bytes, tokens: Sequence[int]) -> bytes:
    """Return the bytes that go with the first chunk of a sequence.

    Args:
        rules: those of the sequence, as bytes.
        tokens: ids of its tokens before that chunk.
    """
    return b"".join((rules, b"\0", struct.pack(f"<{len(tokens)}i", *tokens))) if tokens else rules


def split_first_bytes(text: bytes) -> tuple[DrawRules, tuple[int, ...]]:
    """Return the rules and the tokens of `first_bytes`. Raises ProtocolError for any other bytes."""
    rules, _, tokens = text.partition(b"\0")
    if len(tokens) % TOKEN_BYTES:
        raise ProtocolError(f"{len(tokens)} bytes are not the tokens before a chunk")
    return DrawRules.from_bytes(rules), struct.unpack(f"<{len(tokens) // TOKEN_BYTES}i", tokens)


def _is_legal(value: object, default: object) -> bool:
    """Return whether a value has the type of its field's default, and holds only finite numbers."""
    if isinstance(default, str):
        return isinstance(value, str)
    if default is None or isinstance(default, tuple):
        return (isinstance(value, tuple) and _holds_numbers(value)) or (default is None and isinstance(value, int))
    return _holds_numbers((value,)) and not (isinstance(default, int) and isinstance(value, float))


def _holds_numbers(values: tuple[object, ...]) -> bool:
    return all(
        _holds_numbers(one)
        if isinstance(one, tuple)
        else isinstance(one, (int, float)) and not isinstance(one, bool) and math.isfinite(one)
        for one in values
    )


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
