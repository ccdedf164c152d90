"""A run as the user asked for it (RunConfig) and as it will happen (ResolvedRun). Frozen values, no I/O.

Resolving returns a new type instead of filling in blanks, so that a component that needs the page count
cannot be handed a configuration that does not have one yet.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Never

from sarathi_pp.errors import ConfigError, OptionError, RowError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
HEADS = ("auto", "last")
TRANSPORTS = ("auto", "gloo")
# The same names as in model/attention, which imports torch. A test compares the two.
ATTENTIONS = ("auto", "numba", "triton", "flash", "varlen", "sdpa")


# Other names of fields: those of the command's options and of other engines. Options and the Python API share them.
ALIASES = {
    "pipeline_parallel_size": "stages",
    "pp_size": "stages",
    "data_parallel_size": "replicas",
    "tp_size": "tensor_parallel_size",
    "max_num_batched_tokens": "chunk_size",
    "block_size": "page_size",
    "kv_cache_memory": "kv_cache_memory_bytes",
    "peer_timeout": "peer_timeout_s",
    "join_timeout": "join_timeout_s",
}
SAMPLING_ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
# Unsupported sampling parameters of other engines, each with the values that have no effect. They are accepted with
# these values and with None.
UNSUPPORTED_SAMPLING: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "prompt_logprobs": (False,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "structured_outputs": (),
    "guided_decoding": (),
    "truncate_prompt_tokens": (),
}

# Limits of SamplingParams. OpenAI and vLLM have the same limits of a bias.
MOST_BIAS = 100.0
MOST_BIASED_TOKENS = 1024
MOST_LOGPROBS = 20
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
_COUNTS = {"no_repeat_ngram_size": _LONGEST_NGRAM, "logprobs": MOST_LOGPROBS}
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

    `max_tokens` is another name for max_new_tokens, and `min_tokens` for min_new_tokens. Parameters of other engines
    are taken with a value that changes nothing, such as `n=1`.

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
        max_tokens: int = _ABSENT,
        min_tokens: int = _ABSENT,
        **others: Never,
    ) -> None:
        _refuse_others(others)
        most = _given_once("max_new_tokens", max_new_tokens, max_tokens)
        least = _given_once("min_new_tokens", min_new_tokens, min_tokens)
        first = (most, temperature, top_k, top_p, min_p, seed, stop, ignore_eos, skip_special_tokens)
        penalties = (presence_penalty, frequency_penalty, repetition_penalty, no_repeat_ngram_size)
        banned = (logit_bias, allowed_token_ids, bad_words, bad_words_ids, suppress_tokens, begin_suppress_tokens)
        ends = (least, min_length, stop_token_ids, include_stop_str_in_output)
        values = (*first, *penalties, *banned, *ends, typical_p, epsilon_cutoff, eta_cutoff, logprobs)
        for one, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, one.name, _legal(one, value))
        self._check_lengths()

    def _check_lengths(self) -> None:
        least, both = self.min_new_tokens, self.min_new_tokens and self.min_length
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
    if name in _LISTS:
        return _LISTS[name](name, value)
    if value is not None and not isinstance(value, (int, float)):
        value = _plain(value)
    if name in _RANGES:
        least, most, words = _RANGES[name]
        _require(_is_real(value) and least <= value <= most, name, value, words)  # type: ignore[operator]
    elif name in _SWITCHES:
        _require(isinstance(value, bool), name, value, "true or false")
    elif name == "seed":
        legal = value is None or (_is_int(value) and -(2**63) <= value < 2**63)  # type: ignore[operator]
        _require(legal, name, value, "a 64-bit integer")
    elif name in _COUNTS:
        value = _limited(name, value)
    elif name == "top_k":
        value = 0 if _is_int(value) and value == -1 else value  # other engines write -1 for all
        _require(_is_count(value), name, value, "an integer of at least 0 (0 and -1 keep all)")
    else:
        _require(_is_count(value), name, value, "an integer of at least 0")
    return value


def _limited(name: str, value: object) -> object:
    """Return an integer of _COUNTS. Raise RowError if it is not legal."""
    if name == "logprobs" and isinstance(value, bool):  # chats of OpenAI write true or false
        return 0 if value else None
    legal = _is_count(value) and value <= _COUNTS[name]  # type: ignore[operator]
    _require(legal, name, value, f"an integer from 0 to {_COUNTS[name]}")
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
    found = [_plain(one) for one in value]  # type: ignore[attr-defined]
    _require(len(found) <= most, f"the length of {name}", len(found), f"at most {most}")
    return found


def _token_ids(name: str, value: object, most: int = _MOST_LISTED) -> tuple[int, ...]:
    found = _listed(name, value, most, "a list of token ids")
    for position, token_id in enumerate(found):
        _require(_is_count(token_id), f"{name}[{position}]", token_id, "a token id, an integer of at least 0")
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
        _require(_is_unicode(text), place, text, "text that UTF-8 can write")  # type: ignore[arg-type]
    return tuple(found)  # type: ignore[arg-type]


def _biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Return the bias of each token as pairs, by ascending token id. JSON writes the token ids as strings."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    pairs = _listed(name, pairs, MOST_BIASED_TOKENS, "a mapping from token ids to numbers")
    found: dict[int, float] = {}
    for pair in pairs:
        _require(isinstance(pair, (tuple, list)) and len(pair) == 2, name, pair, "a pair of a token id and a number")
        key, bias = map(_plain, pair)  # type: ignore[call-overload]
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS:
            key = int(key)
        _require(_is_count(key), f"a key of {name}", key, "a token id, an integer of at least 0")
        place = f"{name}[{key}]"
        _require(key not in found, place, bias, "given once")
        _require(
            _is_real(bias) and abs(bias) <= MOST_BIAS, place, bias, f"a number from -{MOST_BIAS:.0f} to {MOST_BIAS:.0f}"
        )
        found[key] = float(bias)
    return tuple(sorted(found.items()))


def _stop(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or value is None:  # other engines take both
        value = (value,) if value else ()
    legal = isinstance(value, (tuple, list)) and all(isinstance(text, str) and text for text in value)
    _require(legal, name, value, "a non-empty string or a list of them")
    # JSON can hold half a surrogate pair, and a command line bytes that are not UTF-8. No tokenizer takes either.
    _require(all(map(_is_unicode, value)), name, value, "text that UTF-8 can write")  # type: ignore[call-overload]
    return tuple(value)  # type: ignore[arg-type]


# Lists other than those of token ids, each with its check.
_LISTS = {"stop": _stop, "bad_words": _texts, "bad_words_ids": _sequences, "logit_bias": _biases}


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


def did_you_mean(name: str, known: Iterable[str], listed_by: str) -> str:
    """Return the end of an error message about an unknown name: "; did you mean stop? ... lists all".

    Args:
        known: names that exist. The nearest one is suggested if it is near enough.
        listed_by: a command or call that lists all names.
    """
    nearest = get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {nearest[0]}? {listed_by} lists all" if nearest else f"; {listed_by} lists all"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require(legal: bool, name: str, value: object, allowed: str) -> None:
    if not legal:
        raise RowError("invalid_parameter", f"{name} is {value!r}; it must be {allowed}")


# Largest timeout that the user may set, in seconds: a week.
_LONGEST_S = 7 * 86400.0


_REALS = ("gpu_memory_utilization", "request_rate", "peer_timeout_s", "join_timeout_s")
# Endings of field names that the options leave out: the option of peer_timeout_s is --peer-timeout.
_UNITS_OF_FIELDS = ("_bytes", "_s")
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def size_in_bytes(text: str) -> int | None:
    """Return the bytes that a text such as 4GiB, 500MB or 1073741824 means. None if it is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    size = float(match[1]) * {**_UNITS, **_BINARY}[match[2] or ""] if match else math.inf
    return int(size) if size < math.inf else None


def names_of(field_name: str) -> tuple[str, ...]:
    """Return all names of a field of RunConfig or SamplingParams, its own first."""
    aliases = {**ALIASES, **SAMPLING_ALIASES}
    return field_name, *(alias for alias, name in aliases.items() if name == field_name)


def options_of(field_name: str) -> tuple[str, ...]:
    """Return all options of a field, the main one first: `--page-size` and `--block-size` for page_size.

    The unit at the end of a field's name is left out: `--peer-timeout` for peer_timeout_s.
    """
    own, *others = names_of(field_name)
    names = others if own.endswith(_UNITS_OF_FIELDS) else (own, *others)
    return tuple(f"--{name.replace('_', '-')}" for name in names)


def option_of(field_name: str) -> str:
    """Return the command's option for a field."""
    return options_of(field_name)[0]


def _demand(legal: bool, name: str, value: object, allowed: str) -> None:
    if not legal:
        raise OptionError(name, option_of(name), value, allowed)


def _plain(value: object) -> object:
    """Return Python's own value for a number of numpy, a dtype or device of torch, or a path. Keep other values."""
    kind = type(value)
    if kind.__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()  # type: ignore[attr-defined]
    if kind.__module__ == "torch":
        return str(value).removeprefix("torch.")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run as the user asked for it. None means "choose for me".

    Args:
        model: model directory, or an id on the Hugging Face Hub.
        stages: pipeline stages of each replica.
        replicas: pipelines that share the requests.
        tensor_parallel_size: ranks that share each stage. Must divide the model's KV heads.
        policy: scheduling policy, as `name`, `name:key=value,...` or `package.module:Class`.
        chunk_size: most tokens in a microbatch. None: by the profile or the policy.
        max_num_seqs: most sequences that run at once in a replica. None: 64 per stage.
        max_model_len: most tokens of prompt and output together. None: the model's own limit.
        page_size: tokens per page of the KV cache. None: 16, or 256 for the attentions flash and varlen.
        kv_cache_memory_bytes: KV cache of each rank, in bytes or as text such as "4GiB". None: from free memory.
        gpu_memory_utilization: share of a GPU's memory that a rank may use, in (0, 1].
        layer_split: layers per stage. None: equal time by the profile, else even. "even": equal layers.
        inflight: most microbatches at once in a replica. None: the number of stages, or one more.
        dtype: number type of weights and activations.
        device: device that the stages compute on.
        attention: implementation of attention.
        request_rate: requests per second that arrive, as a Poisson process. inf: all at once.
        seed: seed of all sampling. A request draws from this and its id.
        peer_timeout_s: seconds of silence after which a stage counts as lost.
        join_timeout_s: seconds for all ranks to join. During set-up a rank may be silent, or do nothing, for the longer
            of both timeouts. Loading has no limit while a rank computes or reads.
        debug_nan: report the first stage whose output has NaN or infinity.
        enforce_eager: do not use CUDA graphs.
        head: stage of the LM head. "last": the last stage. "auto": on CPU the first stage may compute it too, if that
            makes the times of the stages more equal.
        transport: "auto": shared memory on CPUs of a host, NCCL on GPUs, else gloo. "gloo": gloo for everything.
        run_dir: directory for traces, report.json and exit_code. None: OUTPUT.run for a command, a temporary directory
            for an LLM.
        emulate: profile.json whose stage times are slept. No model runs.
        profile: profile.json of this model and machine. It decides layer_split, chunk_size and inflight if these are
            None.
        sampling_overrides: fields of SamplingParams that the command line named. The model's generation_config.json
            sets the other fields.
        override_generation_config: settings in the form of generation_config.json that win over the model's file.

    Raises:
        OptionError: a value that its field does not take.
    """

    model: str
    stages: int = 1
    replicas: int = 1
    tensor_parallel_size: int = 1
    policy: str = "balanced"
    chunk_size: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    page_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    layer_split: tuple[int, ...] | Literal["even"] | None = None
    inflight: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    request_rate: float = math.inf
    seed: int = 0
    peer_timeout_s: float = 60.0
    join_timeout_s: float = 300.0
    debug_nan: bool = False
    enforce_eager: bool = False
    head: str = "auto"
    transport: str = "auto"
    run_dir: Path | None = None
    emulate: Path | None = None
    profile: Path | None = None
    sampling_overrides: dict[str, object] = field(default_factory=dict)
    override_generation_config: dict[str, object] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return self.replicas * self.stages * self.tensor_parallel_size

    def __post_init__(self) -> None:
        self._convert()
        sizes = ("stages", "replicas", "tensor_parallel_size")
        for name in (*sizes, "chunk_size", "max_num_seqs", "max_model_len", "page_size", "inflight"):
            value = getattr(self, name)
            absent = value is None and name not in sizes
            _demand(absent or (_is_int(value) and value >= 1), name, value, "an integer of at least 1")
        for name in ("model", "policy", "attention"):
            _demand(isinstance(getattr(self, name), str), name, getattr(self, name), "a string")
        for name in ("run_dir", "emulate", "profile"):
            value = getattr(self, name)
            _demand(value is None or isinstance(value, Path), name, value, "a path")
        for name in ("debug_nan", "enforce_eager"):
            _demand(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        memory = self.kv_cache_memory_bytes
        _demand(
            memory is None or (_is_int(memory) and memory >= 1),
            "kv_cache_memory_bytes",
            memory,
            "a size of at least one byte, like '4GiB', '500MB' or 1073741824",
        )
        chosen = {"dtype": DTYPES, "device": DEVICES, "head": HEADS, "transport": TRANSPORTS, "attention": ATTENTIONS}
        for name, choices in chosen.items():
            _demand(getattr(self, name) in choices, name, getattr(self, name), f"one of {', '.join(choices)}")
        split = self.layer_split
        _demand(
            split in (None, "even") or (isinstance(split, tuple) and all(map(_is_int, split))),
            "layer_split",
            split,
            "one integer per stage, or 'even'",
        )
        _demand(_is_int(self.seed) and -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")
        for name in ("sampling_overrides", "override_generation_config"):
            _demand(isinstance(getattr(self, name), dict), name, getattr(self, name), "a dictionary")
        known = {one.name for one in fields(SamplingParams)}
        for name in self.sampling_overrides:
            _demand(name in known, "sampling_overrides", name, f"fields of SamplingParams ({', '.join(sorted(known))})")
        rate, share = self.request_rate, self.gpu_memory_utilization
        _demand(isinstance(rate, float) and rate > 0, "request_rate", rate, "above 0 (inf: all at once)")
        _demand(isinstance(share, float) and 0 < share <= 1, "gpu_memory_utilization", share, "a number in (0, 1]")
        for name in ("peer_timeout_s", "join_timeout_s"):
            seconds = getattr(self, name)
            legal = isinstance(seconds, float) and 0 < seconds <= _LONGEST_S
            _demand(legal, name, seconds, f"above 0 seconds and at most {_LONGEST_S:.0f}")

    def _convert(self) -> None:
        """Convert what Python programs naturally hold: paths as text, sizes with a unit, lists, numbers of numpy."""
        for one in fields(self):
            value = _plain(getattr(self, one.name))
            if one.name in ("run_dir", "emulate", "profile") and isinstance(value, str) and value:
                value = Path(value)
            elif one.name in _REALS and _is_int(value):
                value = float(value)  # type: ignore[arg-type]
            elif one.name == "kv_cache_memory_bytes" and isinstance(value, str):
                size = size_in_bytes(value)
                value = value if size is None else size
            elif one.name == "layer_split" and not isinstance(value, str) and isinstance(value, Iterable):
                value = tuple(map(_plain, value))
            object.__setattr__(self, one.name, value)


def stages_among(num_ranks: int, stages: int | None, replicas: int, tensor_parallel_size: int) -> int:
    """Return the number of stages of each replica, from the number of processes that torchrun started.

    Args:
        num_ranks: number of processes. Each one computes a stage, or a part of it with tensor parallelism.
        stages: number of stages that the user asked for; None accepts any number.

    Raises:
        ConfigError: the processes cannot be divided into these replicas and stages.
    """
    held = replicas * tensor_parallel_size
    if num_ranks % held:
        raise ConfigError(
            f"torchrun started {num_ranks} processes, and --replicas {replicas} with --tensor-parallel-size "
            f"{tensor_parallel_size} needs a multiple of {held}; start {held} processes for each stage"
        )
    if stages not in (None, num_ranks // held):
        asked = f"{stages} stages" if held == 1 else f"{replicas} x {stages} x {tensor_parallel_size} ranks"
        raise ConfigError(
            f"--stages is {stages}: the options need {asked}, and torchrun started {num_ranks} processes; leave "
            f"--stages out, or start {held * (stages or 1)} processes"
        )
    return num_ranks // held


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """One run as it will happen: every choice made, the same on all ranks.

    Fields without a line here mean what they mean in RunConfig.

    Args:
        layers: [first, end) of each stage: global layer indices, contiguous.
        num_pages: KV pages of every stage's shard.
        max_microbatch_tokens: tokens of the largest microbatch that the policy can emit. It sizes the wire's buffers.
        request_rate: arrivals per second. None: all requests are there at the start.
        moves_head: the first stage has the LM head too, and computes it for some of the microbatches.
    """

    model: str
    policy: str
    layers: tuple[tuple[int, int], ...]
    chunk_size: int
    max_num_seqs: int
    max_model_len: int
    max_microbatch_tokens: int
    page_size: int
    num_pages: int
    inflight: int
    dtype: str
    device: str
    attention: str
    seed: int
    peer_timeout_s: float
    request_rate: float | None = None
    replicas: int = 1
    tensor_parallel_size: int = 1
    moves_head: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.layers)
