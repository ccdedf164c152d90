import io
import json
import time
import tracemalloc
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.errors import RowError
from sarathi_pp.inputs.generation_config import UNSUPPORTED
from sarathi_pp.inputs.ids import SeenIds
from sarathi_pp.inputs.line_keys import SAMPLING_KEYS
from sarathi_pp.inputs.lines import read_lines
from sarathi_pp.inputs.parse import ParsedLine, parse_line
from sarathi_pp.sampling_params import SAMPLING_ALIASES, SamplingParams
from tests.machine import patient


def read(record: object) -> ParsedLine:
    data = record if isinstance(record, bytes) else json.dumps(record).encode()
    return parse_line(7, data, plain_text=False)


def parse(record: object) -> ParsedLine:
    parsed = read(record)
    assert parsed.error is None, parsed.error
    return parsed


def refused(record: object) -> RowError:
    error = read(record).error
    assert error is not None and error.__traceback__ is None
    return error


def chat_line(**body: object) -> dict[str, object]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
    return {"custom_id": "c1", "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_the_three_prompt_forms_of_an_own_line():
    assert parse({"prompt": "hi"}) == ParsedLine(7, "7", "own", prompt="hi")
    assert parse({"prompt_token_ids": [1, 2]}).prompt_token_ids == (1, 2)
    assert parse({"messages": [{"role": "user", "content": "hi"}]}).messages == [{"role": "user", "content": "hi"}]


def test_sampling_keys_become_overrides_and_null_counts_as_absent():
    line = {"prompt": "", "max_tokens": 0, "temperature": 0.5, "top_k": 3, "stop": ["a"], "seed": None, "min_p": 0}
    assert parse(line).overrides == {
        "max_new_tokens": 0,
        "temperature": 0.5,
        "top_k": 3,
        "stop": ["a"],
        "min_p": 0,
    }


@pytest.mark.parametrize("name", ["a", 5, 5.5, True, ["x"], {"k": None}])
def test_an_id_is_echoed_with_its_type(name):
    parsed = parse({"id": name, "prompt": "p"})
    assert parsed.id == name and type(parsed.id) is type(name)
    assert parse({"custom_id": name, "prompt": "p"}).id == name


def test_a_chat_batch_line():
    parsed = parse(chat_line(max_completion_tokens=9, top_p=0.5, n=2, best_of=1, stream=False, user="u", logprobs=None))
    assert (parsed.id, parsed.form) == ("c1", "openai-chat")
    assert parsed.overrides == {"max_new_tokens": 9, "top_p": 0.5, "n": 2}


@pytest.mark.parametrize(("prompt", "ids"), [("once", None), ([4, 5], (4, 5))])
def test_a_completion_batch_line_takes_text_or_token_ids(prompt, ids):
    parsed = parse({"custom_id": "c", "url": "/v1/completions", "body": {"prompt": prompt, "max_tokens": 1}})
    assert parsed.form == "openai-completion"
    assert parsed.prompt_token_ids == ids
    assert (parsed.prompt is None) == (ids is not None)


def test_text_parts_are_joined_and_other_parts_refused():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse({"messages": [{"role": "user", "content": parts}]}).messages == [{"role": "user", "content": "a\nb"}]
    error = refused({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    assert error.code == "unsupported_parameter" and "image_url" in error.message


@pytest.mark.parametrize(
    ("record", "code", "word"),
    [
        (b'{"prompt": "x"', "invalid_json", "not JSON"),
        (b"[1]", "invalid_json", "a list"),
        (b'{"prompt": "x", "top_p": NaN}', "invalid_json", "NaN"),
        (b'{"prompt": "x", "prompt": "y"}', "invalid_json", "twice"),
        (b"[" * 100_000, "invalid_json", "deep"),
        (b'{"prompt": "x", "tools": ' + b"[" * 128 + b"]" * 128 + b"}", "invalid_json", "deep: 128 levels"),
        (b'{"prompt": "x", "tools": ' + b"[" * 127 + b"]" * 127 + b"}", "unsupported_parameter", "tools"),
        (b'{"id": 1e999, "prompt": "x"}', "invalid_parameter", "finite"),
        ({}, "missing_required_parameter", "none"),
        ({"prompt": "a", "messages": []}, "invalid_parameter", "prompt and messages"),
        ({"prompt": 5}, "invalid_parameter", "a number"),
        ({"prompt_token_ids": []}, "empty_prompt", "prompt_token_ids"),
        ({"prompt_token_ids": [1, True]}, "invalid_parameter", "prompt_token_ids[1]"),
        ({"prompt_token_ids": [1.0]}, "invalid_parameter", "prompt_token_ids[0]"),
        ({"messages": [{"content": "x"}]}, "invalid_parameter", "messages[0]"),
        ({"prompt": "a", "temprature": 1}, "unknown_parameter", "temprature"),
        ({"prompt": "a", "max_tokens": 1, "max_new_tokens": 2}, "invalid_parameter", "twice"),
        ({"prompt": "a", "id": 1, "custom_id": 1}, "invalid_parameter", "custom_id"),
        ({"prompt": "a", "n": 0}, "invalid_parameter", "n is 0; it must be an integer from 1 to 128"),
        (chat_line(n=129), "invalid_parameter", "n is 129; it must be an integer from 1 to 128"),
        ({"prompt": "a", "n": True}, "invalid_parameter", "n is True"),
        ({"prompt": "a", "n": 2, "num_return_sequences": 2}, "invalid_parameter", "n is given twice"),
        (chat_line(best_of=2), "unsupported_parameter", "best_of = 2"),
        (chat_line(stream=True), "unsupported_parameter", "stream"),
        (chat_line(tools=[{"type": "function"}]), "invalid_parameter", "tools[0].function"),
        (chat_line(logit_bias={"one": 5}), "invalid_parameter", "a key of logit_bias is 'one'"),
        (chat_line(sequence_bias=[[[1, 2], 5.0]]), "unsupported_parameter", "sequences of one token"),
        (chat_line(sequence_bias=[[[1], 500.0]]), "unsupported_parameter", "from -100 to 100"),
        ({"prompt": "a", "min_tokens": 1, "min_new_tokens": 1}, "invalid_parameter", "twice"),
        ({"prompt": "a", "logit_bias": {}, "sequence_bias": []}, "invalid_parameter", "twice"),
        (chat_line(logprobs=21), "invalid_parameter", "logprobs is 21; it must be an integer from 0 to 20"),
        (chat_line(top_logprobs=3), "invalid_parameter", 'top_logprobs needs "logprobs": true'),
        (chat_line(logprobs=2, top_logprobs=3), "invalid_parameter", 'top_logprobs needs "logprobs": true'),
        (chat_line(logprobs=True, top_logprobs=21), "invalid_parameter", "top_logprobs is 21"),
        (chat_line(logprobs=True, top_logprobs=True), "invalid_parameter", "top_logprobs is a boolean"),
        (chat_line(prompt="x"), "unknown_parameter", "prompt"),
        (chat_line(model=4), "invalid_parameter", "model"),
        ({**chat_line(), "url": "/v1/embeddings"}, "invalid_parameter", "/v1/completions"),
        ({**chat_line(), "url": ["x"]}, "invalid_parameter", "url"),
        ({**chat_line(), "method": "GET"}, "invalid_parameter", "GET"),
        ({**chat_line(), "body": None}, "missing_required_parameter", "body"),
        ({**chat_line(), "custom_id": 3}, "missing_required_parameter", "custom_id"),
        ({**chat_line(), "custom_idd": 3}, "unknown_parameter", "did you mean custom_id?"),
        ({**chat_line(), "temperature": 0}, "unknown_parameter", "belong in body"),
        (chat_line(label=3), "unknown_parameter", "label"),
        ({"prompt": "a", "max_token": 1}, "unknown_parameter", "did you mean max_tokens?"),
        ({"prompt": "a", "Temperature": 1}, "unknown_parameter", "did you mean temperature?"),
        (b'{"prompt": "x", "label": 1e999}', "invalid_parameter", "finite"),
        ({"prompt": "x", "label": "y" * 2**20}, "line_too_long", "1048576"),
        (
            {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": ["a", "b"]}},
            "unsupported_parameter",
            "several",
        ),
    ],
)
def test_a_bad_line_names_what_is_wrong(record, code, word):
    error = refused(record)
    assert error.code == code
    assert word in error.message


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"max_tokens": -1}, "max_tokens is -1; it must be"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens is 1.5; it must be"),
        ({"max_new_tokens": "8"}, "max_new_tokens is '8'; it must be"),
        ({"top_k": -2}, "top_k is -2; it must be"),
        ({"seed": 2.0**64}, "seed is 18446744073709551616; it must be"),
        ({"skip_special_tokens": 0}, "skip_special_tokens is 0; it must be"),
        ({"add_special_tokens": 1}, "add_special_tokens is 1; it must be"),
        ({"cache_salt": ""}, 'cache_salt is ""; it must be a text of 1 to 256 characters'),
        ({"cache_salt": "\ud800"}, "cache_salt is "),
        ({"cache_salt": 7}, "cache_salt is 7; it must be a text of 1 to 256 characters"),
        ({"cache_salt": "x" * 257}, 'cache_salt is "xxx'),
        ({"add_special_tokens": "no"}, 'add_special_tokens is "no"; it must be'),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; it must be a number from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3; it must be a number from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be a number from 0.000001 to 1000000"),
        ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram_size is 1.5; it must be"),
        ({"no_repeat_ngram_size": 65}, "no_repeat_ngram_size is 65; it must be an integer from 0 to 64"),
        ({"logit_bias": {"7": 101}}, "logit_bias[7] is 101; it must be a number from -100 to 100"),
        ({"logit_bias": {"-7": 1}}, "a key of logit_bias is '-7'; it must be"),
        ({"logit_bias": [7]}, "logit_bias is 7; it must be"),
        ({"logit_bias": {str(one): 1 for one in range(1025)}}, "the length of logit_bias is 1025; it must be at most"),
        ({"sequence_bias": {"7": 1.0}}, 'sequence_bias is {"7": 1.0}; it must be a list of pairs'),
        ({"allowed_token_ids": []}, "allowed_token_ids is []; it must be a list of at least one token id"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids[1] is -1; it must be a token id"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0] is True; it must be a token id"),
        ({"stop_token_ids": 3}, "stop_token_ids is 3; it must be a list of token ids"),
        ({"suppress_tokens": ["3"]}, "suppress_tokens[0] is '3'; it must be a token id"),
        ({"bad_words": "damn"}, "bad_words is 'damn'; it must be a list of non-empty strings"),
        ({"bad_words": [" "]}, "bad_words[0] is ' '; it must be a string that is not only white space"),
        ({"bad_words": ["a"] * 1025}, "the length of bad_words is 1025; it must be at most 1024"),
        ({"bad_words": ["a", "b" * 1001]}, "the length of bad_words[1] is 1001; it must be at most 1000 characters"),
        ({"bad_words_ids": [3]}, "bad_words_ids[0] is 3; it must be a list of token ids"),
        ({"bad_words_ids": [[]]}, "bad_words_ids[0] is []; it must be a list of at least one token id"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1; it must be true or false"),
        ({"typical_p": 0}, "typical_p is 0; it must be a number in (0, 1]"),
        ({"epsilon_cutoff": 1}, "epsilon_cutoff is 1; it must be a number in [0, 1)"),
        ({"eta_cutoff": -0.5}, "eta_cutoff is -0.5; it must be a number in [0, 1)"),
    ],
)
def test_a_wrong_value_is_named_by_the_key_that_the_line_has(setting, says):
    for record in ({"prompt": "a", **setting}, chat_line(**setting)):
        error = refused(record)
        assert error.code == "invalid_parameter" and error.message.startswith(says)
        quoted = (read(record).summary or "").partition("; it must be")[0]
        assert not any(character.isdigit() for character in quoted)


@pytest.mark.parametrize(
    ("key", "value", "field", "kept"),
    [
        ("min_tokens", 3.0, "min_new_tokens", 3),
        ("min_new_tokens", 3, "min_new_tokens", 3),
        ("min_length", 3, "min_length", 3),
        ("stop_strings", "END", "stop", ("END",)),
        ("stop_token_ids", [5, 3], "stop_token_ids", (5, 3)),
        ("include_stop_str_in_output", True, "include_stop_str_in_output", True),
        ("presence_penalty", -2, "presence_penalty", -2),
        ("frequency_penalty", 1.5, "frequency_penalty", 1.5),
        ("repetition_penalty", 1.05, "repetition_penalty", 1.05),
        ("no_repeat_ngram_size", 3.0, "no_repeat_ngram_size", 3),
        ("logit_bias", {"10": -100, "9": 1.5}, "logit_bias", ((9, 1.5), (10, -100.0))),
        ("sequence_bias", [[[10], -2.0], [[9], 1]], "logit_bias", ((9, 1.0), (10, -2.0))),
        ("allowed_token_ids", [5], "allowed_token_ids", (5,)),
        ("bad_words", ["a", "b c"], "bad_words", ("a", "b c")),
        ("bad_words_ids", [[1], [2, 3]], "bad_words_ids", ((1,), (2, 3))),
        ("suppress_tokens", [1], "suppress_tokens", (1,)),
        ("begin_suppress_tokens", [1], "begin_suppress_tokens", (1,)),
        ("typical_p", 0.5, "typical_p", 0.5),
        ("epsilon_cutoff", 0.1, "epsilon_cutoff", 0.1),
        ("eta_cutoff", 0.1, "eta_cutoff", 0.1),
    ],
)
def test_the_names_of_vllm_openai_and_transformers_set_a_parameter(key, value, field, kept):
    for record in ({"prompt": "a", key: value}, chat_line(**{key: value})):
        parsed = parse(record)
        assert list(parsed.overrides) == [field]
        assert SamplingParams(**parsed.overrides) == SamplingParams(**{field: kept})
    assert parse({"prompt": "a", key: None}).overrides == {}, "null is not given"


NUMBERS = st.integers(-3, 2000) | st.sampled_from([0.5, 1e300, 10**400, -0.0, 2.0**64]) | st.booleans()
SCALARS = NUMBERS | st.none() | st.text("5 a-", max_size=3)
ITEMS = SCALARS | st.lists(SCALARS, max_size=2) | st.lists(st.lists(NUMBERS, max_size=2) | NUMBERS, max_size=2)
VALUES = ITEMS | st.lists(ITEMS, max_size=3) | st.dictionaries(st.text("5a-", max_size=2), SCALARS, max_size=3)


@given(st.sampled_from(sorted(SAMPLING_KEYS)), VALUES)
def test_any_value_of_a_sampling_key_is_legal_or_an_error_of_the_line(key, value):
    parsed = read({"prompt": "a", key: value})
    if parsed.error is not None:
        assert parsed.error.code in ("invalid_parameter", "unsupported_parameter")
        return
    params = SamplingParams(**parsed.overrides)
    assert SamplingParams(**json.loads(json.dumps(asdict(params)))) == params
    assert len({params, SamplingParams(**parsed.overrides)}) == 1


def test_every_sampling_parameter_has_a_key_of_its_name():
    assert set(SAMPLING_KEYS.values()) == {one.name for one in fields(SamplingParams)}
    assert all(SAMPLING_KEYS[name] == name for name in SAMPLING_KEYS.values())
    assert SAMPLING_ALIASES.items() <= SAMPLING_KEYS.items()


def test_values_as_tables_and_other_engines_write_them():
    overrides = parse({"prompt": "a", "max_tokens": 16.0, "seed": 1.0, "top_k": 5.0}).overrides
    assert overrides == {"max_new_tokens": 16, "seed": 1, "top_k": 5}
    assert all(type(value) is int for value in overrides.values())
    assert SamplingParams(**parse({"prompt": "a", "top_k": -1}).overrides) == SamplingParams(top_k=0)
    assert parse({"prompt": "a", "skip_special_tokens": False}).overrides == {"skip_special_tokens": False}


def test_a_line_says_with_which_requests_it_shares_pages():
    assert parse({"prompt": "a"}).cache_salt == parse({"prompt": "a", "cache_salt": None}).cache_salt == ""
    assert parse({"prompt": "a", "cache_salt": "x" * 256}).cache_salt == "x" * 256
    assert parse(chat_line(cache_salt="tenant")).cache_salt == "tenant"
    assert parse({"prompt_token_ids": [1], "cache_salt": "b"}).cache_salt == "b"


def test_a_line_says_whether_its_prompt_gets_special_tokens():
    assert parse({"prompt": "a"}).add_special_tokens
    assert parse({"prompt": "a", "add_special_tokens": None}).add_special_tokens
    assert parse({"prompt": "a", "add_special_tokens": True}).add_special_tokens
    assert not parse({"prompt": "a", "add_special_tokens": False}).add_special_tokens
    completion = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "a", "add_special_tokens": False}}
    assert not parse(completion).add_special_tokens
    # A row without text has none to add; a template writes its own.
    assert parse(chat_line(add_special_tokens=False)).messages
    assert refused(chat_line(add_special_tokens=True)).code == "unsupported_parameter"
    assert refused({"prompt_token_ids": [1], "add_special_tokens": True}).code == "unsupported_parameter"


def test_a_line_switches_off_what_the_model_asks_for():
    for setting, off in UNSUPPORTED.items():
        for value in off:
            assert parse({"prompt": "a", setting: value}).switched_off >= {setting}
            assert parse(chat_line(**{setting: value})).switched_off >= {setting}
        assert refused({"prompt": "a", setting: 77.5}).code == "unsupported_parameter"
    assert parse({"prompt": "a", "use_beam_search": False}).switched_off == {"num_beams"}
    assert parse({"prompt": "a", "num_beams": None}).switched_off == set(), "null is not given"
    assert refused({"prompt": "a", "num_beams": True}).code == "unsupported_parameter"


OWN = {"label": 3, "split": "train", "text": "", "prompt_id": 1, "metadata": {"a": [None]}, "idx": 0, "\ud800": 1.0}


def test_keys_of_the_users_own_are_kept_and_change_nothing():
    plain, labelled = parse({"prompt": "a", "seed": 1}), parse({"prompt": "a", **OWN, "seed": 1})
    assert json.loads(labelled.extra) == OWN and plain.extra == b""
    assert replace(labelled, extra=b"") == plain
    assert json.loads(parse({**chat_line(), "label": 3}).extra) == {"label": 3}


@pytest.mark.parametrize(
    "key",
    ["prompt_tokens", "completion_tokens", "num_output_tokens", "output_tokens", "n_tokens", "message", "tool"]
    + ["function", "prompts", "prompt1", "prompt_1", "prompt_a", "seed1", "seed_2"]
    + [
        "step",
        "shop",
        "stow",
        "top",
        "need",
        "feed",
        "seek",
        "send",
        "see",
        "speed",
        "top_1",
        "top_5",
        "top_n",
        "min_d",
    ],
)
def test_a_column_of_ordinary_data_is_no_misspelt_parameter(key):
    assert json.loads(parse({"prompt": "a", key: 1}).extra) == {key: 1}


def test_an_error_keeps_the_users_own_keys():
    assert json.loads(read({"prompt": 5, "label": 3}).extra) == {"label": 3}


@pytest.mark.parametrize(
    "key",
    ["max_token", "temprature", "top_pp", "ignore_oes", "max_tokns", "stops", "seeed"]
    + ["esed", "topp", "top_kk", "Seed"],
)
def test_a_summary_names_the_key_and_quotes_no_value(key):
    said = read({"prompt": "secret", key: "secret"}).summary
    assert f'"{key}"' in said and "did you mean" in said and "secret" not in said
    said = read(chat_line(**{"a secret of \n the user": 1})).summary
    assert "secret" not in said and "unknown key" in said
    assert "17" not in read({"prompt": "a", "n": 177}).summary


def test_an_error_carries_the_id_and_form_of_its_line():
    parsed = read({**chat_line(n=0), "custom_id": "mine"})
    assert parsed.error is not None and (parsed.line, parsed.id, parsed.form) == (7, "mine", "openai-chat")
    assert read({"id": 4, "prompt": 5}).id == 4
    assert read(b"{").id == "7"


def test_only_a_line_whose_id_cannot_be_read_is_nameless():
    assert read(b"{").nameless and read(b'{"id": "\xff", "prompt": ""}').nameless
    assert not read({"prompt": 5}).nameless and not read({"prompt": "a"}).nameless
    assert not parse_line(7, b"\xff", plain_text=True).nameless, "no line of text has an id of its own"


def test_no_depth_is_more_than_an_error_of_the_line():
    """Reading, showing and writing a line need different depths of the stack."""
    codes = {refused(b'{"prompt": "x", "tools": ' + b"[" * n + b"]" * n + b"}").code for n in range(2, 1200)}
    assert codes == {"unsupported_parameter", "invalid_json"}
    broken = {refused(b'{"prompt": "\xff", "id": ' + b"[" * n + b"]" * n + b"}").code for n in range(2, 1200)}
    assert broken == {"invalid_utf8"}


@pytest.mark.parametrize("id", [b"1e999", b"[" * 40 + b"]" * 40])
def test_an_id_that_could_not_be_written_and_read_again_is_neither_taken_nor_recovered(id):
    assert refused(b'{"id": %s, "prompt": "x"}' % id).code == "invalid_parameter"
    assert read(b'{"id": %s, "prompt": "\xff"}' % id).id == "7"
    assert read(b'{"id": [[1]], "prompt": "\xff"}').id == [[1]]


def test_invalid_utf8_keeps_an_id_that_can_be_read():
    damaged = b'{"id": "a", "prompt": "\xff"}'
    error = refused(damaged)
    assert (error.code, read(damaged).id) == ("invalid_utf8", "a")
    assert "byte 23" in error.message
    assert read(b'{"id": "\xff", "prompt": ""}').id == "7"
    assert "byte 0" in str(parse_line(1, b"\xff", plain_text=True).error)


def test_plain_text_is_one_prompt_a_line_as_it_stands():
    assert parse_line(3, b' {"prompt": 1}  ', plain_text=True).prompt == ' {"prompt": 1}  '


def test_lines_with_bom_crlf_blanks_and_no_final_newline():
    data = b"\xef\xbb\xbf{1}\r\n\n  \r\n{2}\nlast"
    assert list(read_lines(io.BytesIO(data))) == [(1, b"{1}"), (4, b"{2}"), (5, b"last")]
    assert list(read_lines(io.BytesIO(b"\xef\xbb\xbf"))) == []


class _Meter(io.BytesIO):
    """A stream that records the longest requested piece."""

    longest = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        data = super().readline(size)
        self.longest = max(self.longest, len(data))
        return data


def test_a_line_over_the_cap_is_cut_and_skipped_without_being_held():
    stream = _Meter(b"x" * 1_000_000 + b"\nnext\n" + b"y" * 100 + b"\r\n" + b"z" * 101)
    lines = list(read_lines(stream, max_line_bytes=100))
    assert [(number, len(data)) for number, data in lines] == [(1, 100 + 2), (2, 4), (3, 100), (4, 101)]
    assert stream.longest <= 64 * 2**10
    error = parse_line(*lines[0], plain_text=False, max_line_bytes=100).error
    assert error is not None and error.code == "line_too_long" and "100 bytes" in error.message


@given(st.lists(st.binary(max_size=12).filter(lambda b: b"\n" not in b)), st.integers(min_value=1, max_value=8))
def test_every_line_that_is_not_blank_is_seen_once_under_its_number(bodies, cap):
    lines = list(read_lines(io.BytesIO(b"\n".join([b"first", *bodies])), max_line_bytes=cap))
    expected = [
        (number, body.removesuffix(b"\r"))
        for number, body in enumerate([b"first", *bodies], start=1)
        if body.strip() or len(body.removesuffix(b"\r")) > cap
    ]
    assert [number for number, _ in lines] == [number for number, _ in expected]
    for (_, data), (_, body) in zip(lines, expected, strict=True):
        assert data == body if len(body) <= cap else cap < len(data) <= cap + 2 and body.startswith(data.rstrip(b"\r"))


def test_ids_compare_by_type_and_value():
    seen = SeenIds()
    names = [1, "1", True, 1.0, {"a": 1, "b": 2}, [1]]
    assert [seen.first_line(name, line) for line, name in enumerate(names)] == [None] * 6
    assert seen.first_line("1", 9) == 1
    assert seen.first_line({"b": 2, "a": 1}, 10) == 4


def peak_bytes(data: bytes) -> int:
    tracemalloc.start()
    try:
        parse_line(1, data, plain_text=False)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def filled(size: int, unit: str, begin: str = '{"prompt_token_ids": [', end: str = "0]}") -> bytes:
    return (begin + unit * (size // len(unit)) + end).encode()


@pytest.mark.parametrize("unit", ["{},", "[],", '"",', '"\u00e9\u00e8",', "[[[]]],", '{"a":1},', '"\\\\",'])
def test_what_a_line_takes_is_bounded_by_its_bytes(unit):
    """Empty objects would take 27 times their length."""
    size = 4 * 2**20
    assert peak_bytes(filled(size, unit)) < 8 * size
    assert refused(filled(size, unit)).code == "line_too_long"


def test_names_are_bounded_too():
    pairs = "".join(f'"{number:x}":1,' for number in range(400_000))
    line = f'{{"id": {{{pairs}"last":1}}, "prompt": ""}}'.encode()
    assert peak_bytes(line) < 8 * len(line)


def test_a_long_line_of_ordinary_parts_is_none_of_that():
    """The lines are token ids, a text of braces and quotes, and a conversation."""
    million = parse_line(1, filled(7_000_000, "123456,"), plain_text=False)
    assert len(million.prompt_token_ids) == 1_000_001
    text = '{["\\' * 500_000
    assert parse({"prompt": text}).prompt == text
    messages = [{"role": "user", "content": "word " * 20}] * 20_000
    assert len(parse({"messages": messages}).messages) == 20_000


def test_a_long_line_without_an_end_is_read_once():
    """Any part of the line may look like the start of a string."""
    for tail in ('\\"' * 4_000_000, '"' + "\\" * 4_000_001, "\\" * 4_000_001):
        began_s = time.monotonic()
        assert refused(('{"prompt": "' + tail).encode()).code == "invalid_json"
        assert time.monotonic() - began_s < patient(3 * 3.0)


def echo_line(**keys):
    body = {"prompt": "p", "echo": True, **keys}
    return json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}).encode()


def test_a_completion_may_repeat_its_prompt():
    assert parse(echo_line()).echo and parse(echo_line(logprobs=1)).overrides == {"logprobs": 1}
    assert not parse(echo_line(echo=False)).echo and not parse(echo_line(echo=None)).echo


@pytest.mark.parametrize(
    "line, code, message",
    [
        (echo_line(echo=1), "invalid_parameter", "echo is 1; it must be true or false"),
        (echo_line(prompt_logprobs=1), "invalid_parameter", "echo and prompt_logprobs are both given; keep one"),
        (echo_line(logprobs_from=1), "invalid_parameter", "echo and logprobs_from are both given; keep one"),
        (chat_line(echo=True), "unsupported_parameter", "remove echo, or use prompt_logprobs"),
        (chat_line(prompt_logprobs=21), "invalid_parameter", "prompt_logprobs is 21; it must be an integer from 0 to"),
        (chat_line(prompt_logprobs=True), "invalid_parameter", "prompt_logprobs is True; it must be an integer from"),
        (chat_line(logprobs_from=-1), "invalid_parameter", "logprobs_from is -1; it must be an integer of at least 0"),
    ],
)
def test_what_echoes_and_log_probabilities_of_prompts_refuse(line, code, message):
    error = refused(line)
    assert error.code == code and message in error.message


@pytest.mark.parametrize(
    "keys, wanted",
    [
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"top_logprobs": 5, "logprobs": True}, 5),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": 4}, 4),
        ({"logprobs": 0}, 0),
        ({"logprobs": None}, None),
    ],
)
def test_log_probabilities_as_chats_and_completions_want_them(keys, wanted):
    parsed = parse(chat_line(**keys))
    assert parsed.error is None and SamplingParams(**parsed.overrides).logprobs == wanted
