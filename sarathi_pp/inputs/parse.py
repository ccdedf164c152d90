"""One input line: from bytes to what it asks for, or to the reason why it cannot run.

    bytes -> RawLine -> parse_line -> ParsedLine -> (tokenise, check) -> Row -> engine -> sink
                             `- LineError ------------------------------^

A file is JSON Lines or plain text as a whole (`choose_format`). JSON Lines take two forms:

    own     {"prompt": str} | {"prompt_token_ids": [int]} | {"messages": [...]}, with `id` and sampling keys
    OpenAI  {"custom_id", "method": "POST", "url": "/v1/chat/completions" | "/v1/completions", "body": {...}}

Null counts as not given. A parameter that is known elsewhere and not supported here may be present with the
value that means "off" (`"n": 1`); with any other value it is `unsupported_parameter`, never ignored.

Other keys are the user's own, such as labels. They change nothing, and the output line has them again under `extra`,
where they collide with none of its keys. A key that differs from a parameter only as a typing mistake does is
`unknown_parameter`, and so is any unknown key of an OpenAI `body`, which holds nothing but parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Literal, NoReturn

from sarathi_pp.config import SamplingParams
from sarathi_pp.core.request import Request
from sarathi_pp.errors import RowError
from sarathi_pp.inputs.generation_config import UNSUPPORTED
from sarathi_pp.inputs.lines import MAX_LINE_BYTES, RawLine

Form = Literal["own", "openai-chat", "openai-completion"]

_DEEPEST_ID = 32
# Far below what a program may nest calls, of which messages and reading take some.
_DEEPEST_LINE = 128
# Read, a string, list or object takes 100 bytes and more, and written as little as one.
_MOST_PARTS = 2**18
_FEW_PARTS_BYTES = 2**20
# Possessive, and without an end if need be: one pass, whatever the line is.
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)

_URL_FORMS: dict[str, Form] = {
    "/v1/chat/completions": "openai-chat",
    "/v1/completions": "openai-completion",
}
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
_SAMPLING_KEYS = {
    "max_new_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
}
# Whole numbers, which tables write as 16.0.
_WHOLE = ("max_new_tokens", "top_k", "seed")
# How a prompt is read.
_READING_KEYS = ("add_special_tokens",)
# The settings of generation_config.json that a line's key switches off; any other key is the setting's own name.
_SETTINGS = {
    "n": ("num_return_sequences",),
    "min_tokens": ("min_new_tokens", "min_length"),
    "min_new_tokens": ("min_new_tokens", "min_length"),
    "bad_words": ("bad_words_ids",),
    "use_beam_search": ("num_beams",),
}
# Names for the caller's own bookkeeping: they change no token.
_OPENAI_LABELS = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Parameters that other engines have, each with the values under which it changes nothing.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    **UNSUPPORTED,
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "stream_options": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (False,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "structured_outputs": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "max_length": (),
    "max_output_tokens": (),
    "n_predict": (),
    "do_sample": (),
    "stop_sequences": ([],),
    "stop_strings": ([],),
    "guided_grammar": (),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
_OWN_KEYS = ("id", "custom_id", *_PROMPT_KEYS, *_READING_KEYS, *_SAMPLING_KEYS, *_UNSUPPORTED)
_BATCH_KEYS = ("custom_id", "method", "url", "body")
_MISPLACED_KEYS = ("id", *_PROMPT_KEYS, *_READING_KEYS, *_SAMPLING_KEYS, *_UNSUPPORTED)
# What people number or mark their own columns with: `seed1` and `prompt_b` are no misspelt `seed` and `prompt`.
_NUMBERED = re.compile(r"_?[0-9]+|_[a-z]")
# A name that a log may hold. A longer or stranger key may be text out of a prompt.
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.-]{0,39}", re.ASCII)
_MAX_EXTRA_BYTES = 2**20


class LineError(RowError):
    """A RowError that knows its line, so that the error line gets the right id and form.

    nameless: nobody can tell what id the line meant to give, and the default one may be another row's. extra: see
    ParsedLine. summary: the message without the line's values, for a log; None if there is none.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        line: int,
        id: object,
        form: Form,
        nameless: bool,
        extra: bytes = b"",
        summary: str | None = None,
    ) -> None:
        super().__init__(code, message)
        self.line = line
        self.id = id
        self.form = form
        self.nameless = nameless
        self.extra = extra
        self.summary = summary


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """What one line asks for. Exactly one of the three prompts is set.

    id: any JSON value, echoed unchanged; the line number as a string where the line names none.
    overrides: sampling fields that the line sets, under SamplingParams' names; each is legal by itself.
    switched_off: settings of generation_config.json that the line gives the value under which they change nothing.
    add_special_tokens: see Tokenizer.encode_prompt.
    extra: the line's other keys as a JSON object, empty if there are none; as bytes, because it waits for the answer.
    """

    line: int
    id: object
    form: Form
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: list[dict[str, object]] | None = None
    overrides: dict[str, object] = field(default_factory=dict)
    extra: bytes = b""
    add_special_tokens: bool = True
    switched_off: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Row:
    """One input line on its way to an output line: a request, or the error that it gets instead.

    nameless: see LineError. extra: see ParsedLine.
    """

    line: int
    id: object
    form: Form
    request: Request | None = None
    error: RowError | None = None
    arrival_s: float = 0.0
    nameless: bool = False
    extra: bytes = b""

    def __post_init__(self) -> None:
        assert (self.request is None) != (self.error is None), "a row is a request or an error"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids) if self.request else 0


def parse_line(raw: RawLine, *, plain_text: bool, max_line_bytes: int = MAX_LINE_BYTES) -> ParsedLine:
    """What a line asks for, types checked; sampling values are checked later, where they meet the defaults.

    Raises LineError: `line_too_long`, `invalid_utf8`, `invalid_json`, `invalid_parameter`,
    `missing_required_parameter`, `unknown_parameter`, `unsupported_parameter`, `empty_prompt`.
    """
    reader = _LineReader(raw.number, nameless=not plain_text)
    if raw.cut:
        reader.fail("line_too_long", f"the line is longer than {max_line_bytes} bytes; split the request")
    if not plain_text and _has_too_many_parts(raw.data):
        what = f"more than {_MOST_PARTS} strings, lists and objects"
        reader.fail("line_too_long", f"the line holds {what}; split the request")
    try:
        text = raw.data.decode("utf-8")
    except UnicodeDecodeError as error:
        if not plain_text:
            reader.recover_id(raw.data)
        reader.fail("invalid_utf8", f"byte {error.start} of the line is not UTF-8; convert the file to UTF-8")
    if plain_text:
        return ParsedLine(raw.number, str(raw.number), "own", prompt=text)
    return reader.parse(text)


class _LineReader:
    """Parses one JSON line; holds what is known of its id and form so far, for the error line."""

    def __init__(self, line: int, *, nameless: bool) -> None:
        self._line = line
        self._id: object = str(line)
        self._form: Form = "own"
        self._nameless = nameless
        self._extra = b""
        self._switched_off: set[str] = set()

    def fail(self, code: str, message: str, summary: str | None = None) -> NoReturn:
        raise LineError(
            code,
            message,
            line=self._line,
            id=self._id,
            form=self._form,
            nameless=self._nameless,
            extra=self._extra,
            summary=summary,
        )

    def recover_id(self, data: bytes) -> None:
        """The id of a line that is JSON but for stray bytes, which need not be in the id."""
        try:
            record = json.loads(data.decode("utf-8", "surrogateescape"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return
        if isinstance(record, dict):
            candidate, form = _name(record)
            if candidate is None or _nests_deep(candidate):
                return
            if _is_text(candidate) and _is_finite(candidate):
                self._id, self._form, self._nameless = candidate, form, False

    def parse(self, text: str) -> ParsedLine:
        try:
            record = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        except RecursionError:
            self.fail("invalid_json", "the line nests too deep")
        except ValueError as error:
            self.fail("invalid_json", f"not JSON: {error}")
        # Looking at every token id of a prompt would take longer than reading it.
        if text.count("[") + text.count("{") > _DEEPEST_LINE and _nests_deep(record, _DEEPEST_LINE):
            self.fail("invalid_json", f"the line nests too deep: {_DEEPEST_LINE} levels are legal")
        if not isinstance(record, dict):
            kind = "null" if record is None else _kind(record)
            self.fail("invalid_json", f"a line must be a JSON object, and this one is {kind}")
        name, self._form = _name(record)
        if record.get("id") is not None and record.get("custom_id") is not None:
            self.fail("invalid_parameter", "id and custom_id are both given; keep one")
        if name is not None:
            self._set_id(name)
        self._nameless = False
        return self._own(record) if self._form == "own" else self._openai(record)

    def _set_id(self, name: object) -> None:
        if not _is_finite(name):
            self.fail("invalid_parameter", f"id is {name!r}; it must be a finite JSON value")
        if _nests_deep(name):
            self.fail("invalid_parameter", f"id nests deeper than {_DEEPEST_ID} levels; give a string")
        self._id = name

    def _own(self, record: Mapping[str, object]) -> ParsedLine:
        self._set_extra(record, _OWN_KEYS)
        own = {key: record[key] for key in _OWN_KEYS if key in record}
        overrides = self._overrides(own, _SAMPLING_KEYS, ("id", "custom_id", *_PROMPT_KEYS, *_READING_KEYS))
        return self._with_prompt(record, overrides)

    def _openai(self, record: Mapping[str, object]) -> ParsedLine:
        for key in _MISPLACED_KEYS:
            if record.get(key) is not None:
                keys = ", ".join(_BATCH_KEYS)
                message = f"{key} is not a key of a batch line ({keys}): parameters belong in body"
                self.fail("unknown_parameter", message, f'unknown key "{key}": parameters belong in body')
        self._set_extra(record, (*_BATCH_KEYS, *_MISPLACED_KEYS))
        if not isinstance(record.get("custom_id"), str):
            self.fail("missing_required_parameter", "a batch line needs custom_id, a string unique in the file")
        if record.get("method") not in (None, "POST"):
            self.fail("invalid_parameter", f"method is {record['method']!r}; it must be POST")
        if not isinstance(record.get("url"), str) or record["url"] not in _URL_FORMS:
            choices = " or ".join(_URL_FORMS)
            self.fail("invalid_parameter", f"url is {record.get('url')!r}; it must be {choices}")
        body = record.get("body")
        if not isinstance(body, dict):
            self.fail("missing_required_parameter", f"body is {_kind(body)}; it must be an object")
        model = body.get("model")
        if model is not None and not isinstance(model, str):
            self.fail("invalid_parameter", f"model is {_kind(model)}; it must be a string")
        prompt_key = "messages" if self._form == "openai-chat" else "prompt"
        overrides = self._overrides(body, _SAMPLING_KEYS, (prompt_key, *_READING_KEYS, *_OPENAI_LABELS))
        if body.get(prompt_key) is None:
            self.fail("missing_required_parameter", f"body needs {prompt_key} for {record['url']}")
        return self._with_prompt(body, overrides)

    def _overrides(
        self, record: Mapping[str, object], sampling: Mapping[str, str], other: tuple[str, ...]
    ) -> dict[str, object]:
        """The sampling fields that are set; refuses every key that would otherwise be ignored."""
        overrides: dict[str, object] = {}
        for key, value in record.items():
            if key in sampling:
                if value is None:
                    continue
                if sampling[key] in overrides:
                    self.fail("invalid_parameter", f"{sampling[key]} is given twice, the second time as {key}")
                overrides[sampling[key]] = self._checked(key, sampling[key], value)
            elif key in _UNSUPPORTED:
                if value is None:
                    continue
                self._switched_off |= {*_SETTINGS.get(key, (key,))}
                if not _changes_nothing(value, _UNSUPPORTED[key]):
                    message = f"{key} = {_shown(value)} is not supported; remove {key}"
                    self.fail("unsupported_parameter", message, f'"{key}" is not supported with that value; remove it')
            elif key not in other:
                legal = ", ".join((*other, *sampling))
                message = f"{key} is not a parameter; those known here are {legal}"
                self.fail("unknown_parameter", message, f"unknown key {_named(key)} in body")
        return overrides

    def _checked(self, key: str, name: str, value: object) -> object:
        """Return the value of a field of SamplingParams, which the line calls `key`."""
        if name in _WHOLE and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            SamplingParams(**{name: value})  # type: ignore[arg-type]  # values are checked there
        except RowError as error:
            # A summary quotes nothing of a line.
            wanted = error.message.rpartition("; it must be ")[2]
            summary = f'"{key}" has a value that is not legal; it must be {wanted}'
            self.fail(error.code, error.message.replace(name, key, 1), summary)
        return value

    def _set_extra(self, record: Mapping[str, object], known: tuple[str, ...]) -> None:
        """Keep the user's own keys for the output line; refuse one that is a known key but for a typing mistake."""
        own = {key: value for key, value in record.items() if key not in known}
        if not own:
            return
        # A key without an effect, or a prompt that is there already, cannot have been meant.
        has_prompt = any(key in record for key in (*_PROMPT_KEYS, "body"))
        effective = tuple(k for k in known if k not in _UNSUPPORTED and not (has_prompt and k in _PROMPT_KEYS))
        for key in own:
            if near := _misspelt(key, effective):
                message = f"{key} is not a parameter; did you mean {near}? A key of your own needs another name"
                self.fail("unknown_parameter", message, f'unknown key {_named(key)}; did you mean "{near}"?')
        if not _is_finite(own):
            self.fail("invalid_parameter", "a key that is not a parameter holds a number that is not finite")
        extra = json.dumps(own, separators=(",", ":")).encode()
        if len(extra) > _MAX_EXTRA_BYTES:
            limit = f"at most {_MAX_EXTRA_BYTES} are kept for the answer"
            self.fail("line_too_long", f"keys that are not parameters hold {len(extra)} bytes; {limit}; remove some")
        self._extra = extra

    def _with_prompt(self, record: Mapping[str, object], overrides: dict[str, object]) -> ParsedLine:
        given = [key for key in _PROMPT_KEYS if record.get(key) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            code = "invalid_parameter" if given else "missing_required_parameter"
            self.fail(code, f"a line needs exactly one of {', '.join(_PROMPT_KEYS)}; it has {found}")
        key, value = given[0], record[given[0]]
        add_special_tokens = record.get("add_special_tokens")
        if not (add_special_tokens is None or isinstance(add_special_tokens, bool)):
            self.fail(
                "invalid_parameter", f"add_special_tokens is {_shown(add_special_tokens)}; it must be true or false"
            )
        if add_special_tokens and not isinstance(value, str):
            self.fail("unsupported_parameter", f"add_special_tokens is true, and {key} has its own; remove it")
        if key == "messages":
            messages = self._messages(value)
            return self._parsed(overrides, messages=messages)
        if key == "prompt_token_ids" or (self._form == "openai-completion" and isinstance(value, list)):
            ids = self._token_ids(key, value)
            return self._parsed(overrides, prompt_token_ids=ids)
        if not isinstance(value, str):
            self.fail("invalid_parameter", f"prompt is {_kind(value)}; it must be a string")
        return self._parsed(overrides, prompt=value, add_special_tokens=add_special_tokens is not False)

    def _parsed(
        self,
        overrides: dict[str, object],
        *,
        prompt: str | None = None,
        prompt_token_ids: tuple[int, ...] | None = None,
        messages: list[dict[str, object]] | None = None,
        add_special_tokens: bool = True,
    ) -> ParsedLine:
        name, extra = (self._line, self._id, self._form), self._extra
        off = frozenset(self._switched_off)
        return ParsedLine(*name, prompt, prompt_token_ids, messages, overrides, extra, add_special_tokens, off)

    def _token_ids(self, key: str, value: object) -> tuple[int, ...]:
        if not isinstance(value, list):
            self.fail("invalid_parameter", f"{key} is {_kind(value)}; it must be a list of integers")
        if not value:
            self.fail("empty_prompt", f"{key} is empty; it needs at least one token id")
        if key == "prompt" and isinstance(value[0], (str, list)):
            self.fail("unsupported_parameter", "prompt holds several prompts; give each a line of its own")
        for position, token_id in enumerate(value):
            if type(token_id) is not int:
                self.fail("invalid_parameter", f"{key}[{position}] is {_kind(token_id)}; it must be an integer")
        return tuple(value)

    def _messages(self, value: object) -> list[dict[str, object]]:
        if not isinstance(value, list) or not value:
            self.fail("invalid_parameter", "messages must be a list of at least one message")
        for position, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                self.fail("invalid_parameter", f"messages[{position}] must be an object with a role")
        return [self._message(f"messages[{position}]", message) for position, message in enumerate(value)]

    def _message(self, where: str, message: dict[str, object]) -> dict[str, object]:
        """The message with text parts joined by line ends: most chat templates expect one string."""
        content = message.get("content")
        if content is None or isinstance(content, str):
            return message
        if not isinstance(content, list):
            self.fail("invalid_parameter", f"{where}.content is {_kind(content)}; it must be a string")
        texts: list[str] = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else _kind(part)
                self.fail("unsupported_parameter", f"{where}.content holds {kind}; only text parts are supported")
            if not isinstance(part.get("text"), str):
                self.fail("invalid_parameter", f"{where}.content has a text part without text")
            texts.append(part["text"])
        return {**message, "content": "\n".join(texts)}


def _has_too_many_parts(data: bytes) -> bool:
    """Before it is read as JSON, which may take 27 times its bytes; numbers, as token ids are, take far less."""
    return len(data) > _FEW_PARTS_BYTES and any(True for _ in islice(_PART.finditer(data), _MOST_PARTS, None))


def _name(record: Mapping[str, object]) -> tuple[object, Form]:
    name = record.get("custom_id") if record.get("id") is None else record["id"]
    if not any(key in record for key in ("body", "url", "method")):
        return name, "own"
    url = record.get("url")
    return name, _URL_FORMS.get(url, "openai-chat") if isinstance(url, str) else "openai-chat"


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) != len(pairs):
        left = set(record)
        for key, _ in pairs:
            if key not in left:
                raise ValueError(
                    "a key occurs twice in one object"
                )  # not which: it may be a prompt, and this is logged
            left.remove(key)
    return record


def _is_finite(value: object) -> bool:
    """False where it holds a number that no JSON has: what is written as 1e999 is read as infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _nests_deep(value: object, most: int = _DEEPEST_ID) -> bool:
    """Whether it is nested too deep; an id is written and read again where the stack may be shorter."""
    level = [value]
    for _ in range(most):
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, list):
                inner += one
        level = inner
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _changes_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    # 0 is not false: `"logprobs": 0` asks for log probabilities, `false` does not.
    return any(isinstance(value, bool) is isinstance(off, bool) and value == off for off in neutral)


def _is_text(value: object) -> bool:
    """False where a string holds lone surrogates, the trace of bytes that were not UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    if value is None:
        return "missing or null"
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return kinds.get(type(value), "a number")


@lru_cache(maxsize=1024)  # the lines of a file have the same keys
def _misspelt(key: str, known: tuple[str, ...]) -> str | None:
    """Return the known key from which this one differs by one typing mistake, or by upper case."""
    lower = key.lower()
    for meant in known:
        if len(meant) < 4 or (lower.startswith(meant) and _NUMBERED.fullmatch(lower[len(meant) :])):
            continue
        if lower == meant or _is_one_mistake(lower, meant):
            return meant
    return None


def _is_one_mistake(written: str, meant: str) -> bool:
    """Return whether one character is missing, added or another one, or two neighbours are swapped.

    Many words are near to a short key: `step` and `top` to `stop`, `need` and `speed` to `seed`. There only a swap,
    a character that is doubled, a missing underscore and a plural count.
    """
    shorter = min(len(written), len(meant))
    same = next((at for at in range(shorter) if written[at] != meant[at]), shorter)
    left, right = written[same:], meant[same:]
    swapped = len(left) >= 2 and left[:2] == right[1::-1] and left[2:] == right[2:]
    added, missing = left[1:] == right, left == right[1:]
    if len(meant) >= 6:
        return swapped or added or missing or left[1:] == right[1:]
    doubled = added and (written[same - 1 : same] == left[:1] or (left == "s" and not right))
    return swapped or doubled or (missing and right.startswith("_"))


def _named(key: str) -> str:
    """Return a key's name for a log, if it is one."""
    return f'"{key}"' if _PLAIN_NAME.fullmatch(key) else "(its name is left out here)"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
