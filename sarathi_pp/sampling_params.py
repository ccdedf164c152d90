"""The sampling parameters of one request: their names, their legal values, and the other names that users know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, Never

from sarathi_pp.errors import ConfigError, RowError
from sarathi_pp.given_values import did_you_mean, is_count, is_int, is_real, is_unicode, plain
from sarathi_pp.structured_outputs import StructuredOutputs

SAMPLING_ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
# Unsupported sampling parameters of other engines, each with the values that have no effect. They are accepted with
# these values and with None.
UNSUPPORTED_SAMPLING: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "guided_decoding": (),
    "truncate_prompt_tokens": (),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "flat_logprobs": (False,),
    "logits_processors": ([],),
    "extra_args": ({},),
}

# Limits of SamplingParams. OpenAI and vLLM have the same limits of a bias.
MOST_BIAS = 100.0
MOST_BIASED_TOKENS = 1024
MOST_LOGPROBS = 20
MOST_CHOICES = 128
# Each token of a sequence takes memory for as many tokens. Longer ones hardly ever repeat.
_LONGEST_NGRAM = 64
_MOST_STOP_TOKENS = 1024
# Each bad word is tokenised twice for each request.
_MOST_WORDS = 1024
_MOST_WORD_CHARS = 1000
# More would not fit into the message with a request's rules (core/draw_rules.py).
_MOST_LISTED = 1 << 15
# Digits of the longest number that is read as a token id.
_MOST_DIGITS = 18

_LEAST_ABOVE_0 = math.ulp(0.0)
_MOST_BELOW_1 = math.nextafter(1.0, 0.0)
# Numbers of SamplingParams: the least and the most legal value, and both in words.
_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0, math.inf, "a number of at least 0"),
    "top_p": (_LEAST_ABOVE_0, 1, "a number in (0, 1]"),
    "min_p": (0, 1, "a number in [0, 1]"),
    "presence_penalty": (-2, 2, "a number from -2 to 2"),
    "frequency_penalty": (-2, 2, "a number from -2 to 2"),
    # Scores are float32. Outside this range, dividing by the penalty or multiplying with it would give infinity.
    "repetition_penalty": (1e-6, 1e6, "a number from 0.000001 to 1000000"),
    "typical_p": (_LEAST_ABOVE_0, 1, "a number in (0, 1]"),
    "epsilon_cutoff": (0, _MOST_BELOW_1, "a number in [0, 1)"),
    "eta_cutoff": (0, _MOST_BELOW_1, "a number in [0, 1)"),
}
# The most of integers of SamplingParams that have a limit.
_COUNTS = {
    "no_repeat_ngram_size": _LONGEST_NGRAM,
    "logprobs": MOST_LOGPROBS,
    "prompt_logprobs": MOST_LOGPROBS,
    "n": MOST_CHOICES,
}
_SWITCHES = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
# Lists of token ids, and the most ids in each.
_TOKEN_LISTS = {
    "allowed_token_ids": _MOST_LISTED,
    "suppress_tokens": _MOST_LISTED,
    "begin_suppress_tokens": _MOST_LISTED,
    "stop_token_ids": _MOST_STOP_TOKENS,
}


# Default of an argument that the caller may leave out, if None is a value that must be refused.
_ABSENT: Any = ...


@dataclass(frozen=True, slots=True, init=False)
class SamplingParams:
    """The way in which one request turns logits into tokens.

    Args:
        max_new_tokens: most tokens to generate. 0 gives a valid empty answer.
        temperature: divides the logits before sampling. 0 is greedy, whatever the other fields are.
        top_k: sample from the k likeliest tokens. 0 and -1 keep every token.
        top_p: sample from the likeliest tokens that together hold this share of the probability. 1.0 keeps every token.
        min_p: drop tokens below this share of the likeliest token's probability. 0.0 keeps every token.
        seed: the sample at position i depends on (seed, i) alone. Other requests, the chunk size and the number of
            stages do not change it. None: derived from the run's seed and the request.
        stop: strings that end the output. They are left out of its text. A single string is accepted too.
        ignore_eos: continue after the end-of-sequence token.
        skip_special_tokens: leave special tokens out of the text.
        presence_penalty: is subtracted from the logit of each token in the output so far. -2 to 2.
        frequency_penalty: is subtracted from a token's logit once for each time it is in the output so far. -2 to 2.
        repetition_penalty: for tokens of the prompt and the output, divides a positive logit and multiplies a negative
            one. 1.0 changes nothing.
        no_repeat_ngram_size: no sequence of this number of tokens is twice in prompt and output. 0: no such limit.
        logit_bias: numbers from -100 to 100 that are added to the logits of tokens, by token id. At most 1,024.
        allowed_token_ids: draw only these tokens. None: all.
        bad_words: words whose tokens must not be in the output. As in vLLM, the word after a space is banned too if it
            has as many tokens. At most 1,024, of at most 1,000 characters.
        bad_words_ids: sequences of token ids that must not be in the output.
        suppress_tokens: ids of tokens that are never drawn.
        begin_suppress_tokens: ids of tokens that are not drawn as the first one of the output.
        min_new_tokens: least tokens before an end-of-sequence token, a stop token or a stop string ends the output.
        min_length: like min_new_tokens, but counts the prompt too. Only one of both may be given.
        stop_token_ids: ids of tokens that end the output as the end-of-sequence token does. At most 1,024.
        include_stop_str_in_output: keep the stop string or stop token at the end of the text.
        typical_p: sample from the most typical tokens that together hold this share. 1.0 keeps every token.
        epsilon_cutoff: drop tokens below this probability. 0.0 keeps every token.
        eta_cutoff: like epsilon_cutoff, but lower if the probabilities are spread widely. 0.0 keeps every token.
        logprobs: return the log probability of each output token, and of this number of likeliest tokens. At most 20.
            They are of the model's own logits, before any other parameter. None: no log probabilities.
        prompt_logprobs: the same for each token of the prompt, given the tokens before it. Token 0 has none.
        logprobs_from: position of the first prompt token of prompt_logprobs, from 0.
        n: number of outputs, which are sampled with different seeds. 1 to 128. More than 1 needs a temperature above 0.
        structured_outputs: grammar that the output must match: a mapping with one of the keys json, json_object, regex,
            choice and grammar, and optionally start_after. It needs the extra `guided`. None: the output is free.

    `max_tokens` is another name for max_new_tokens, and `min_tokens` for min_new_tokens. Parameters of other engines
    are taken with a value that changes nothing, such as `best_of=1`.

    Raises:
        RowError: `invalid_parameter`, with the field, its value and the legal range.
        ConfigError: an argument that does not exist, or one parameter under two names.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    min_length: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_from: int = 0
    n: int = 1
    structured_outputs: StructuredOutputs | None = None

    def __init__(
        self,
        max_new_tokens: int = _ABSENT,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Iterable[str] | None = (),
        ignore_eos: bool = False,
        skip_special_tokens: bool = True,
        *,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        no_repeat_ngram_size: int = 0,
        logit_bias: Mapping[int, float] | Mapping[str, float] | Iterable[tuple[int, float]] | None = (),
        allowed_token_ids: Iterable[int] | None = None,
        bad_words: Iterable[str] | None = (),
        bad_words_ids: Iterable[Iterable[int]] | None = (),
        suppress_tokens: Iterable[int] | None = (),
        begin_suppress_tokens: Iterable[int] | None = (),
        min_new_tokens: int = _ABSENT,
        min_length: int = 0,
        stop_token_ids: Iterable[int] | None = (),
        include_stop_str_in_output: bool = False,
        typical_p: float = 1.0,
        epsilon_cutoff: float = 0.0,
        eta_cutoff: float = 0.0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        logprobs_from: int = 0,
        n: int = 1,
        structured_outputs: StructuredOutputs | Mapping[str, object] | None = None,
        max_tokens: int = _ABSENT,
        min_tokens: int = _ABSENT,
        **others: Never,
    ) -> None:
        given = dict(locals())  # all arguments by name
        _refuse_others(others)
        given["max_new_tokens"] = _given_once("max_new_tokens", max_new_tokens, max_tokens)
        given["min_new_tokens"] = _given_once("min_new_tokens", min_new_tokens, min_tokens)
        for one in fields(self):
            object.__setattr__(self, one.name, _legal(one, given[one.name]))
        self._check_pairs()

    def _check_pairs(self) -> None:
        """Raise RowError if two parameters exclude each other."""
        least, both = self.min_new_tokens, self.min_new_tokens and self.min_length
        if self.structured_outputs is not None:
            _require(not self.ignore_eos, "ignore_eos", True, "false with structured_outputs, whose grammar has an end")
        _require(not both, "min_length", self.min_length, f"0 if min_new_tokens is given, which is {least}")

    @property
    def max_tokens(self) -> int:
        """Another name for max_new_tokens."""
        return self.max_new_tokens

    @property
    def min_tokens(self) -> int:
        """Another name for min_new_tokens."""
        return self.min_new_tokens

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _legal(one: Field[Any], value: object) -> object:
    """Return a value of a field of SamplingParams, converted from the forms that other engines and numpy use.

    Raises:
        RowError: the value is not legal.
    """
    # A default is legal. Most parameters of most requests have it.
    if value is _ABSENT or value is one.default:
        return one.default
    name = one.name
    if name in _TOKEN_LISTS:
        found = None if value is None and name == "allowed_token_ids" else _token_ids(name, value, _TOKEN_LISTS[name])
        _require(found != () or name != "allowed_token_ids", name, [], "a list of at least one token id")
        return found
    if name in _CHECKS:
        return _CHECKS[name](name, value)
    if value is not None and not isinstance(value, (int, float)):
        value = plain(value)
    if name in _RANGES:
        least, most, words = _RANGES[name]
        _require(is_real(value) and least <= value <= most, name, value, words)  # type: ignore[operator]
    elif name in _SWITCHES:
        _require(isinstance(value, bool), name, value, "true or false")
    elif name == "seed":
        legal = value is None or (is_int(value) and -(2**63) <= value < 2**63)  # type: ignore[operator]
        _require(legal, name, value, "a 64-bit integer")
    elif name in _COUNTS:
        value = _limited(name, value)
    elif name == "top_k":
        value = 0 if is_int(value) and value == -1 else value  # other engines write -1 for all
        _require(is_count(value), name, value, "an integer of at least 0 (0 and -1 keep all)")
    else:
        _require(is_count(value), name, value, "an integer of at least 0")
    return value


def _limited(name: str, value: object) -> object:
    """Return an integer of _COUNTS. Raise RowError if it is not legal."""
    if name == "logprobs" and isinstance(value, bool):  # chats of OpenAI write true or false
        return 0 if value else None
    if name == "prompt_logprobs" and value is False:  # vLLM takes it for None
        return None
    least, most = int(name == "n"), _COUNTS[name]
    legal = is_count(value) and least <= value <= most  # type: ignore[operator]
    _require(legal, name, value, f"an integer from {least} to {most}")
    return value


def _given_once(name: str, value: int, other: int) -> int:
    """Return the value of a parameter with two names. Raise ConfigError if both are given."""
    if value is not _ABSENT and other is not _ABSENT:
        alias = next(alias for alias, meant in SAMPLING_ALIASES.items() if meant == name)
        raise ConfigError(f"{name} and {alias} are the same parameter; give one of them")
    return other if value is _ABSENT else value


def _listed(name: str, value: object, most: int, allowed: str) -> list[object]:
    """Return the items of a list, tuple, set or array; none for None.

    Args:
        most: most items.
        allowed: the legal values in words.

    Raises:
        RowError: the value is not a list, or has more items.
    """
    if value is None:
        return []
    legal = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    _require(legal, name, value, allowed)
    found = [plain(one) for one in value]  # type: ignore[attr-defined]
    _require(len(found) <= most, f"the length of {name}", len(found), f"at most {most}")
    return found


def _token_ids(name: str, value: object, most: int = _MOST_LISTED) -> tuple[int, ...]:
    found = _listed(name, value, most, "a list of token ids")
    for position, token_id in enumerate(found):
        _require(is_count(token_id), f"{name}[{position}]", token_id, "a token id, an integer of at least 0")
    return tuple(found)  # type: ignore[arg-type]


def _sequences(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    """Return a list of lists of token ids, as tuples."""
    found = []
    for position, one in enumerate(_listed(name, value, _MOST_LISTED, "a list of lists of token ids")):
        place = f"{name}[{position}]"
        _require(isinstance(one, Iterable), place, one, "a list of token ids")
        found.append(_token_ids(place, one))
        _require(found[-1] != (), place, one, "a list of at least one token id")
    return tuple(found)


def _texts(name: str, value: object) -> tuple[str, ...]:
    found = _listed(name, value, _MOST_WORDS, "a list of non-empty strings")
    for position, text in enumerate(found):
        place = f"{name}[{position}]"
        _require(isinstance(text, str) and text.strip() != "", place, text, "a string that is not only white space")
        length = len(text)  # type: ignore[arg-type]
        _require(length <= _MOST_WORD_CHARS, f"the length of {place}", length, f"at most {_MOST_WORD_CHARS} characters")
        _require(is_unicode(text), place, text, "text that UTF-8 can write")  # type: ignore[arg-type]
    return tuple(found)  # type: ignore[arg-type]


def _biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Return the bias of each token as pairs, by ascending token id. JSON writes the token ids as strings."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    pairs = _listed(name, pairs, MOST_BIASED_TOKENS, "a mapping from token ids to numbers")
    found: dict[int, float] = {}
    for pair in pairs:
        _require(isinstance(pair, (tuple, list)) and len(pair) == 2, name, pair, "a pair of a token id and a number")
        key, bias = map(plain, pair)  # type: ignore[call-overload]
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS:
            key = int(key)
        _require(is_count(key), f"a key of {name}", key, "a token id, an integer of at least 0")
        place = f"{name}[{key}]"
        _require(key not in found, place, bias, "given once")
        _require(
            is_real(bias) and abs(bias) <= MOST_BIAS, place, bias, f"a number from -{MOST_BIAS:.0f} to {MOST_BIAS:.0f}"
        )
        found[key] = float(bias)
    return tuple(sorted(found.items()))


def _stop(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or value is None:  # other engines take both
        value = (value,) if value else ()
    legal = isinstance(value, (tuple, list)) and all(isinstance(text, str) and text for text in value)
    _require(legal, name, value, "a non-empty string or a list of them")
    # JSON can hold half a surrogate pair, and a command line bytes that are not UTF-8. No tokenizer takes either.
    _require(all(map(is_unicode, value)), name, value, "text that UTF-8 can write")  # type: ignore[call-overload]
    return tuple(value)  # type: ignore[arg-type]


def _grammar(_: str, value: object) -> StructuredOutputs | None:
    return None if value is None else StructuredOutputs.read(value)


# Lists other than those of token ids, and the grammar, each with its check.
_CHECKS = {
    "stop": _stop,
    "bad_words": _texts,
    "bad_words_ids": _sequences,
    "logit_bias": _biases,
    "structured_outputs": _grammar,
}


def _refuse_others(others: Mapping[str, object]) -> None:
    """Raise ConfigError for an argument that SamplingParams does not have, unless its value has no effect."""
    known = [one.name for one in fields(SamplingParams)]
    for name, value in others.items():
        if name not in UNSUPPORTED_SAMPLING:
            near = did_you_mean(name, [*known, *SAMPLING_ALIASES], "help(sarathi_pp.SamplingParams)")
            raise ConfigError(f"SamplingParams has no argument {name!r}{near}")
        if not changes_nothing(value, UNSUPPORTED_SAMPLING[name]):
            raise ConfigError(f"SamplingParams({name}={value!r}) is not supported yet; remove {name}")


def changes_nothing(value: object, off: Iterable[object]) -> bool:
    """Return whether a value has no effect on an argument of another engine: it is None, or one of `off`."""
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in off)


def _require(legal: bool, name: str, value: object, allowed: str) -> None:
    if not legal:
        raise RowError("invalid_parameter", f"{name} is {value!r}; it must be {allowed}")
