"""The parser of one input line: from bytes to a prompt with parameters, or to the reason why it cannot run.

    bytes -> parse_line -> ParsedLine -> (tokenise, check) -> Row with its Request -> engine -> sink

A file is JSON Lines or plain text as a whole (`choose_format`). JSON Lines take two forms:

    own     {"prompt": str} | {"prompt_token_ids": [int]} | {"messages": [...]}, with `id` and sampling keys
    OpenAI  {"custom_id", "method": "POST", "url": "/v1/chat/completions" | "/v1/completions", "body": {...}}

A key with null counts as missing. An unsupported parameter of other engines may have the value that means "off"
(`"best_of": 1`). With any other value it is the error `unsupported_parameter`. It is never ignored.

Other keys are the user's own, such as labels. They change nothing. The output line repeats them under `extra`, so that
they cannot replace its other keys. A key that differs from a parameter only by a typing mistake is the error
`unknown_parameter`. So is any unknown key of an OpenAI `body`, which holds only parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from sarathi_pp.errors import RowError
from sarathi_pp.inputs.chat.messages import read_messages
from sarathi_pp.inputs.chat.options import read_chat_options, refuse_chat_options
from sarathi_pp.inputs.generation_config import single_token_biases
from sarathi_pp.inputs.json_line import (
    DEEPEST_ID,
    DEEPEST_LINE,
    MOST_PARTS,
    has_too_many_parts,
    is_finite,
    is_text,
    kind_of,
    nests_deep,
    read_damaged_json,
    read_json,
    show_value,
)
from sarathi_pp.inputs.line_keys import (
    BATCH_KEYS,
    CACHE_SALT,
    ECHO,
    MISPLACED_KEYS,
    MOST_SALT,
    OPENAI_LABELS,
    OWN_KEYS,
    PROMPT_KEYS,
    READING_KEYS,
    SAMPLING_KEYS,
    SETTINGS,
    UNSUPPORTED_KEYS,
    URL_FORMS,
    WHOLE_NUMBERS,
)
from sarathi_pp.inputs.lines import MAX_LINE_BYTES
from sarathi_pp.inputs.row import Form
from sarathi_pp.inputs.spelling import nearest_key
from sarathi_pp.sampling_params import MOST_BIAS, MOST_BIASED_TOKENS, SamplingParams
from sarathi_pp.text.chat_options import ChatOptions
from sarathi_pp.text.grammar import structured_outputs

# A name that a log may hold. A longer or unusual key may be text of a prompt.
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.-]{0,39}", re.ASCII)
_MAX_EXTRA_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """A parsed line: a prompt in one of three forms (text, token ids, conversation), or an error.

    Args:
        line: number of the line, from 1.
        id: any JSON value, repeated unchanged in the output. If the line names none, its number as a string.
        form: form of the input line, which decides the form of the output line.
        prompt, prompt_token_ids, messages: the prompt in its form; the other two are None.
        overrides: sampling values that the line sets, by field name of SamplingParams. Each value is legal for its
            field.
        extra: the line's other keys as a JSON object, empty if there are none. They are bytes to save memory while
            the line waits for its answer.
        add_special_tokens: see Tokenizer.encode_prompt.
        switched_off: settings of generation_config.json that the line switches off with a value that has no effect.
        error: the reason why the line cannot run.
        summary: the error without the line's values, for a log; None if there is none.
        cache_salt: see Request.
        echo: the output line repeats the prompt.
        nameless: True if the line's own id could not be read. Then `id` is the line's number, which may also be the
            id of another line.
        chat: settings with which the chat template renders messages; None for its defaults, or without messages.
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
    error: RowError | None = None
    summary: str | None = None
    nameless: bool = False
    chat: ChatOptions | None = None
    cache_salt: str = ""
    echo: bool = False


def parse_line(number: int, data: bytes, *, plain_text: bool, max_line_bytes: int = MAX_LINE_BYTES) -> ParsedLine:
    """Return a parsed line with checked types. Sampling values are checked later, together with the defaults.

    Args:
        number: number of the line, from 1.
        data: bytes of the line, without its end.
        plain_text: True if the whole line is the prompt. False if it is JSON.
        max_line_bytes: limit of the line's length.

    The codes of its error are `line_too_long`, `invalid_utf8`, `invalid_json`, `invalid_parameter`,
    `missing_required_parameter`, `unknown_parameter`, `unsupported_parameter` and `empty_prompt`.
    """
    reader = _LineReader(number, nameless=not plain_text)
    try:
        if len(data) > max_line_bytes:
            reader.fail("line_too_long", f"the line is longer than {max_line_bytes} bytes; split the request")
        return reader.read_text(data) if plain_text else reader.read(data)
    except RowError as error:
        # The traceback and the cause would keep all values of the line in memory.
        error.__context__ = error.__cause__ = None
        return reader.refused(error.with_traceback(None))


class _LineReader:
    """A reader of one line. It keeps the id and form that it has read so far, so that an error line has them too."""

    def __init__(self, line: int, *, nameless: bool) -> None:
        self._line = line
        self._id: object = str(line)
        self._form: Form = "own"
        self._nameless = nameless
        self._extra = b""
        self._cache_salt = ""
        self._echo = False
        self._summary: str | None = None
        self._switched_off: set[str] = set()

    def fail(self, code: str, message: str, summary: str | None = None) -> NoReturn:
        """Raise the error of this line.

        Args:
            summary: the message for a log, without values of the line; None if the message holds no such values.
        """
        self._summary = summary
        raise RowError(code, message)

    def refused(self, error: RowError) -> ParsedLine:
        """Return the line with the error that `fail` has raised."""
        return ParsedLine(
            self._line,
            self._id,
            self._form,
            extra=self._extra,
            error=error,
            summary=self._summary,
            nameless=self._nameless,
        )

    def read_text(self, data: bytes) -> ParsedLine:
        """Return the line of a plain text file: its text is the prompt."""
        return self._parsed({}, prompt=self._decode(data))

    def read(self, data: bytes) -> ParsedLine:
        """Return the line of a JSON Lines file."""
        if has_too_many_parts(data):
            what = f"more than {MOST_PARTS} strings, lists and objects"
            self.fail("line_too_long", f"the line holds {what}; split the request")
        return self._parse(self._decode(data))

    def _decode(self, data: bytes) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            if self._nameless:
                self._recover_id(data)
            self.fail("invalid_utf8", f"byte {error.start} of the line is not UTF-8; convert the file to UTF-8")

    def _recover_id(self, data: bytes) -> None:
        """Find the id of a JSON line that has damaged bytes. These are often outside the id."""
        try:
            record = read_damaged_json(data)
        except (ValueError, RecursionError):
            return
        if isinstance(record, dict):
            candidate, form = _name(record)
            if candidate is None or nests_deep(candidate):
                return
            if is_text(candidate) and is_finite(candidate):
                self._id, self._form, self._nameless = candidate, form, False

    def _parse(self, text: str) -> ParsedLine:
        try:
            record = read_json(text)
        except RecursionError:
            self.fail("invalid_json", f"the line nests too deep: {DEEPEST_LINE} levels are legal")
        except ValueError as error:
            self.fail("invalid_json", f"not JSON: {error}")
        # Count brackets first, because a visit of every token id of a prompt would take longer than reading it.
        if text.count("[") + text.count("{") > DEEPEST_LINE and nests_deep(record, DEEPEST_LINE):
            self.fail("invalid_json", f"the line nests too deep: {DEEPEST_LINE} levels are legal")
        if not isinstance(record, dict):
            kind = "null" if record is None else kind_of(record)
            self.fail("invalid_json", f"a line must be a JSON object, and this one is {kind}")
        name, self._form = _name(record)
        if record.get("id") is not None and record.get("custom_id") is not None:
            self.fail("invalid_parameter", "id and custom_id are both given; keep one")
        if name is not None:
            self._set_id(name)
        self._nameless = False
        return self._own(record) if self._form == "own" else self._openai(record)

    def _set_id(self, name: object) -> None:
        if not is_finite(name):
            self.fail("invalid_parameter", f"id is {name!r}; it must be a finite JSON value")
        if nests_deep(name):
            self.fail("invalid_parameter", f"id nests deeper than {DEEPEST_ID} levels; give a string")
        self._id = name

    def _own(self, record: Mapping[str, object]) -> ParsedLine:
        self._set_extra(record, OWN_KEYS)
        own = {key: record[key] for key in OWN_KEYS if key in record}
        overrides = self._overrides(own, SAMPLING_KEYS, ("id", "custom_id", *PROMPT_KEYS, *READING_KEYS))
        return self._with_prompt(record, overrides)

    def _openai(self, record: Mapping[str, object]) -> ParsedLine:
        for key in MISPLACED_KEYS:
            if record.get(key) is not None:
                keys = ", ".join(BATCH_KEYS)
                message = f"{key} is not a key of a batch line ({keys}): parameters belong in body"
                self.fail("unknown_parameter", message, f'unknown key "{key}": parameters belong in body')
        self._set_extra(record, (*BATCH_KEYS, *MISPLACED_KEYS))
        if not isinstance(record.get("custom_id"), str):
            self.fail("missing_required_parameter", "a batch line needs custom_id, a string unique in the file")
        if record.get("method") not in (None, "POST"):
            self.fail("invalid_parameter", f"method is {record['method']!r}; it must be POST")
        if not isinstance(record.get("url"), str) or record["url"] not in URL_FORMS:
            choices = " or ".join(URL_FORMS)
            self.fail("invalid_parameter", f"url is {record.get('url')!r}; it must be {choices}")
        body = record.get("body")
        if not isinstance(body, dict):
            self.fail("missing_required_parameter", f"body is {kind_of(body)}; it must be an object")
        model = body.get("model")
        if model is not None and not isinstance(model, str):
            self.fail("invalid_parameter", f"model is {kind_of(model)}; it must be a string")
        prompt_key = "messages" if self._form == "openai-chat" else "prompt"
        overrides = self._overrides(body, SAMPLING_KEYS, (prompt_key, *READING_KEYS, *OPENAI_LABELS))
        if body.get(prompt_key) is None:
            self.fail("missing_required_parameter", f"body needs {prompt_key} for {record['url']}")
        return self._with_prompt(body, overrides)

    def _overrides(
        self, record: Mapping[str, object], sampling: Mapping[str, str], other: tuple[str, ...]
    ) -> dict[str, object]:
        """Return the sampling values that a line sets, by field. Refuse every key that would otherwise be ignored.

        Args:
            record: the line, or the body of an OpenAI line.
            sampling: from a key to the field of SamplingParams that it sets.
            other: keys that are legal and set no such field.
        """
        overrides: dict[str, object] = {}
        for key, value in record.items():
            if key in sampling:
                if value is None or key == "top_logprobs" or (key, value) == ("response_format", {"type": "text"}):
                    continue
                if sampling[key] in overrides:
                    self.fail("invalid_parameter", f"{sampling[key]} is given twice, the second time as {key}")
                overrides[sampling[key]] = self._checked(key, sampling[key], value)
            elif key in UNSUPPORTED_KEYS:
                if value is None:
                    continue
                self._switched_off |= {*SETTINGS.get(key, (key,))}
                if not _changes_nothing(value, UNSUPPORTED_KEYS[key]):
                    message = f"{key} = {show_value(value)} is not supported; remove {key}"
                    self.fail("unsupported_parameter", message, f'"{key}" is not supported with that value; remove it')
            elif key == ECHO:
                self._set_echo(value, record)
            elif key not in other:
                legal = ", ".join((*other, *sampling))
                message = f"{key} is not a parameter; the known ones are {legal}"
                self.fail("unknown_parameter", message, f"unknown key {_named(key)} in body")
        self._add_top_logprobs(record.get("top_logprobs"), overrides)
        return overrides

    def _set_echo(self, value: object, record: Mapping[str, object]) -> None:
        if value is None or value is False:
            return
        if value is not True:
            self.fail("invalid_parameter", f"echo is {show_value(value)}; it must be true or false")
        if self._form != "openai-completion":
            what = "echo is supported for lines with the url /v1/completions"
            self.fail("unsupported_parameter", f"{what}; remove echo, or use prompt_logprobs")
        for key in ("prompt_logprobs", "logprobs_from"):
            if record.get(key) is not None:
                self.fail("invalid_parameter", f"echo and {key} are both given; keep one. With echo, use logprobs")
        self._echo = True

    def _add_top_logprobs(self, number: object, overrides: dict[str, object]) -> None:
        """Set the number of likeliest tokens, which OpenAI's chats give apart from `"logprobs": true`."""
        if number is None or (number == 0 and not isinstance(number, bool)):
            return
        if overrides.get("logprobs") is not True:
            self.fail("invalid_parameter", 'top_logprobs needs "logprobs": true')
        if isinstance(number, bool):
            self.fail("invalid_parameter", "top_logprobs is a boolean; it must be an integer")
        overrides["logprobs"] = self._checked("top_logprobs", "logprobs", number)

    def _checked(self, key: str, name: str, value: object) -> object:
        """Return a value for the field `name` of SamplingParams, after a check. The line sets it with `key`."""
        if name in WHOLE_NUMBERS and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            if key == "sequence_bias":
                value = single_token_biases(value)
            elif name == "structured_outputs":
                value = structured_outputs(key, value)
            SamplingParams(**{name: value})  # type: ignore[arg-type]  # values are checked there
        except RowError as error:
            # The summary goes to a log, so it must repeat no value of the line.
            wanted = error.message.rpartition("; it must be ")[2]
            summary = f'"{key}" has a value that is not legal; it must be {wanted}'
            self.fail(error.code, error.message.replace(name, key, 1), summary)
        if value is None:
            limits = f"at most {MOST_BIASED_TOKENS} numbers from -{MOST_BIAS:.0f} to {MOST_BIAS:.0f}"
            self.fail("unsupported_parameter", f"{key} is supported for sequences of one token, with {limits}")
        return value

    def _set_extra(self, record: Mapping[str, object], known: tuple[str, ...]) -> None:
        """Keep the user's own keys for the output line. Refuse a known key that has a typing mistake."""
        own = {key: value for key, value in record.items() if key not in known}
        if not own:
            return
        # The user did not mean an unsupported key, or a second prompt. So these are not suggested.
        has_prompt = any(key in record for key in (*PROMPT_KEYS, "body"))
        effective = tuple(k for k in known if k not in UNSUPPORTED_KEYS and not (has_prompt and k in PROMPT_KEYS))
        for key in own:
            if near := nearest_key(key, effective):
                message = f"{key} is not a parameter; did you mean {near}? A key of your own needs another name"
                self.fail("unknown_parameter", message, f'unknown key {_named(key)}; did you mean "{near}"?')
        if not is_finite(own):
            self.fail("invalid_parameter", "a key that is not a parameter holds a number like 1e999; it must be finite")
        extra = json.dumps(own, separators=(",", ":")).encode()
        if len(extra) > _MAX_EXTRA_BYTES:
            limit = f"the output line repeats at most {_MAX_EXTRA_BYTES}"
            self.fail("line_too_long", f"keys that are not parameters hold {len(extra)} bytes; {limit}; remove keys")
        self._extra = extra

    def _with_prompt(self, record: Mapping[str, object], overrides: dict[str, object]) -> ParsedLine:
        given = [key for key in PROMPT_KEYS if record.get(key) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            code = "invalid_parameter" if given else "missing_required_parameter"
            self.fail(code, f"a line needs exactly one of {', '.join(PROMPT_KEYS)}; it has {found}")
        key, value = given[0], record[given[0]]
        self._cache_salt = self._salt(record.get(CACHE_SALT))
        add_special_tokens = record.get("add_special_tokens")
        if not (add_special_tokens is None or isinstance(add_special_tokens, bool)):
            self.fail(
                "invalid_parameter", f"add_special_tokens is {show_value(add_special_tokens)}; it must be true or false"
            )
        if add_special_tokens and not isinstance(value, str):
            self.fail(
                "unsupported_parameter",
                f"add_special_tokens is true, and {key} has its own special tokens; remove add_special_tokens",
            )
        if key == "messages":
            return self._parsed(overrides, messages=read_messages(value), chat=read_chat_options(record))
        refuse_chat_options(record)
        if key == "prompt_token_ids" or (self._form == "openai-completion" and isinstance(value, list)):
            ids = self._token_ids(key, value)
            return self._parsed(overrides, prompt_token_ids=ids)
        if not isinstance(value, str):
            self.fail("invalid_parameter", f"prompt is {kind_of(value)}; it must be a string")
        return self._parsed(overrides, prompt=value, add_special_tokens=add_special_tokens is not False)

    def _parsed(
        self,
        overrides: dict[str, object],
        *,
        prompt: str | None = None,
        prompt_token_ids: tuple[int, ...] | None = None,
        messages: list[dict[str, object]] | None = None,
        add_special_tokens: bool = True,
        chat: ChatOptions | None = None,
    ) -> ParsedLine:
        name, extra = (self._line, self._id, self._form), self._extra
        off, salt = frozenset(self._switched_off), self._cache_salt
        own = (*name, prompt, prompt_token_ids, messages, overrides, extra)
        return ParsedLine(*own, add_special_tokens, off, chat=chat, cache_salt=salt, echo=self._echo)

    def _salt(self, value: object) -> str:
        if value is None:
            return ""
        if not is_salt(value):
            what = f"a text of 1 to {MOST_SALT} characters"
            self.fail("invalid_parameter", f"{CACHE_SALT} is {show_value(value)}; it must be {what}")
        return str(value)

    def _token_ids(self, key: str, value: object) -> tuple[int, ...]:
        if not isinstance(value, list):
            self.fail("invalid_parameter", f"{key} is {kind_of(value)}; it must be a list of integers")
        if not value:
            self.fail("empty_prompt", f"{key} is empty; it needs at least one token id")
        if key == "prompt" and isinstance(value[0], (str, list)):
            self.fail("unsupported_parameter", "prompt holds several prompts; give each a line of its own")
        for position, token_id in enumerate(value):
            if type(token_id) is not int:
                self.fail("invalid_parameter", f"{key}[{position}] is {kind_of(token_id)}; it must be an integer")
        return tuple(value)


def is_salt(value: object) -> bool:
    """Return whether a value is legal as a cache_salt."""
    return isinstance(value, str) and 0 < len(value) <= MOST_SALT and is_text(value)


def _name(record: Mapping[str, object]) -> tuple[object, Form]:
    """Return the id that a line gives itself, None if it gives none, and the form of the line."""
    name = record.get("custom_id") if record.get("id") is None else record["id"]
    if not any(key in record for key in ("body", "url", "method")):
        return name, "own"
    url = record.get("url")
    return name, URL_FORMS.get(url, "openai-chat") if isinstance(url, str) else "openai-chat"


def _named(key: str) -> str:
    """Return a key in quotes for a log. If it may be text of a prompt, return a note instead."""
    return f'"{key}"' if _PLAIN_NAME.fullmatch(key) else "(its name is left out here)"


def _changes_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    # 0 is not false: `"logprobs": 0` asks for log probabilities, `false` does not.
    return any(isinstance(value, bool) is isinstance(off, bool) and value == off for off in neutral)
