from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.core.pages import KVUse
from sarathi_pp.core.plan import Chunk, MicroBatch
from sarathi_pp.core.request_index import NEXT_CHOICE
from sarathi_pp.errors import InputError
from sarathi_pp.trace.events import KINDS, SCHEMA, Compute, Event, Issued, RequestFinished, SendWait, decode, encode
from tests.analysis.schedules import start


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    if hint is int:
        return st.integers(1 - 2**63, 2**63 - 1)
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is Sequence:  # tuples, after they are read
        return st.lists(values_of(*get_args(hint))).map(tuple)
    if get_origin(hint) is tuple:
        members = get_args(hint)
        if members[-1] is Ellipsis:
            return st.lists(values_of(members[0])).map(tuple)
        return st.tuples(*map(values_of, members))
    if type(None) in get_args(hint):
        return st.none() | values_of(next(arg for arg in get_args(hint) if arg is not type(None)))
    return st.from_type(hint)


def events_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    hints = get_type_hints(kind)
    given_fields = {f.name: values_of(hints[f.name]) for f in fields(kind)}
    if "schema" in given_fields:
        given_fields["schema"] = st.just(SCHEMA)
    return st.builds(kind, **given_fields)


@given(st.one_of([events_of(kind) for kind in KINDS.values()]))
def test_decode_inverts_encode(event: Event) -> None:
    line = encode(event)
    assert decode(line) == event
    assert decode(line.encode()) == event
    assert line.isascii() and "\n" not in line


def test_every_event_has_a_kind() -> None:
    assert set(KINDS.values()) == set(get_args(Event))


def test_line_form() -> None:
    assert encode(Compute(7, 1.0, 1.25, 1.5, 2.0, 0.5)) == (
        '{"e":"compute","m":7,"i":1.0,"a":1.25,"b":1.5,"f":2.0,"c":0.5,"o":null}'
    )


def test_short_keys_do_not_collide() -> None:
    for kind in KINDS.values():
        blank = dict.fromkeys((f.name for f in fields(kind)), 1)
        assert len(json.loads(encode(kind(**blank)))) == len(blank) + 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"e":"lunch"}', "unknown trace event 'lunch'; known: start, issued"),
        ('{"e":["compute"]}', "unknown trace event"),
        ('{"b":1.0,"f":2.0}', "unknown trace event None"),
        ('{"e":"send_wait","b":1.0}', r"has the keys \['b'\]; expected \['b', 'f'\]"),
        ('{"e":"send_wait","b":1.0,"f":2.0,"g":3}', "has the keys"),
        ('{"e":"send_wait","b"', "not a line of JSON"),
        ("[1, 2]", "not a trace event"),
        ('{"e":"send_wait","b":1.0,"f":"soon"}', r"'send_wait' has 'soon' as 'f' \(end_s\), which is not legal"),
        ('{"e":"send_wait","b":1.0,"f":NaN}', "has nan as 'f'"),
        ('{"e":"send_wait","b":1e999,"f":2}', "has inf as 'b'"),
        ('{"e":"send_wait","b":true,"f":2}', "has True as 'b'"),
        ('{"e":"send_wait","b":1' + "0" * 400 + ',"f":2}', "as 'b'"),
        ('{"e":"returned","m":"x","t":1.0}', "has 'x' as 'm'"),
        ('{"e":"returned","m":1.0,"t":1.0}', "has 1.0 as 'm'"),
        ('{"e":"returned","m":9223372036854775808,"t":1.0}', "as 'm'"),
        ('{"e":"starved","t":1.0,"reason":"lunch"}', "has 'lunch' as 'reason'"),
        ('{"e":"starved","t":1.0,"reason":["full"]}', "as 'reason'"),
        (encode(start(0, 1)).replace("{", '{"prefix_cache":"auto",', 1), "has 'auto' as 'prefix_cache'"),
        ("\xff".encode("latin-1"), "not a line of JSON"),
    ],
)
def test_anything_else_is_refused(line: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode(line)


def test_other_schema_is_refused_with_the_remedy() -> None:
    line = encode(start(0, 1)).replace(SCHEMA, "sarathi-pp/trace/99").replace("{", '{"new": 1,', 1)
    with pytest.raises(InputError, match=r"trace/99.*reads.*trace/2.*version that wrote it"):
        decode(line)


def test_times_must_be_finite() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode(SendWait(0.0, float("nan")))


def test_issued_holds_the_counts_of_its_microbatch() -> None:
    chunks = (Chunk(3, 0, 256, 128), Chunk(4, 1, 0, 16), Chunk(1, 0, 300, 1, decode=True))
    event = Issued.of(MicroBatch(7, chunks, issued_s=1.5), KVUse(9, 130))
    assert event.text == "m7[s3:256+128 s4.1:0+16 | d s1:300]"
    assert (event.at_s, event.num_tokens, event.num_chunks) == (1.5, 145, 2)
    assert (event.decode_context, event.prefill_attention) == (301, 128 * 256 + 8192 + 128)


def test_issued_names_the_sequences_of_further_choices() -> None:
    second, third = 3 + NEXT_CHOICE, 11 + 12 * NEXT_CHOICE
    chunks = (Chunk(3, 0, 0, 16), Chunk(second, 2, 16, 8), Chunk(1, 0, 9, 1, decode=True))
    event = Issued.of(MicroBatch(7, (*chunks, Chunk(third, 0, 300, 1, decode=True))), KVUse(9, 130))
    assert event.text == "m7[s3:0+16 s3/1.2:16+8 | d s1:9 s11/12:300]"
    assert event.sequences == [3, second, 1, third]
    assert decode(encode(event)) == event


def test_figures_of_the_prefix_cache_are_written_only_if_it_did_something() -> None:
    """Without a prefix cache, a trace has the form that it had before there was one."""
    microbatch = MicroBatch(7, (Chunk(3, 0, 32, 8),), issued_s=1.5)
    plain, found = Issued.of(microbatch, KVUse(9, 130)), Issued.of(microbatch, KVUse(9, 130, 4, 32, 16, 2))
    ended = RequestFinished(3, 0.0, 1.0, 2.0, 2.0, 40, 1, "length")
    names = ("ki", "cached_tokens", "resumed_tokens", "evictions", "prefix_cache")
    for event in (plain, ended, start(0, 1)):
        assert not json.loads(encode(event)).keys() & set(names)
        assert decode(encode(event)) == event
    written = json.loads(encode(found))
    assert [written[name] for name in names[:4]] == [4, 32, 16, 2]
    assert (found.idle_pages, found.cached_tokens, found.resumed_tokens, found.evictions) == (4, 32, 16, 2)
