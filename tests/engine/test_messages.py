"""What rank 0 and other leaders tell each other survives the way, and nothing else passes for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.config import SamplingParams
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.engine.messages import Abort, Answer, Ask, Failure, Stop, Watch, decode, encode
from sarathi_pp.engine.progress import Snapshot
from sarathi_pp.errors import ProtocolError

finite = st.floats(allow_nan=False, allow_infinity=False)
ids = st.integers(0, 2**31 - 1)
samplings = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(0, 2**40),
    temperature=st.floats(0, 1e300),
    top_k=st.integers(0, 10**9),
    top_p=st.floats(1e-300, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1)).map(tuple),
    ignore_eos=st.booleans(),
)
requests = st.builds(
    Request, ids, st.lists(ids, min_size=1).map(tuple), samplings, finite, st.lists(st.integers(0, 99)).map(tuple)
)
snapshots = st.builds(
    Snapshot,
    **{name: finite for name in ("elapsed_s", "window_s")},
    **{name: ids for name in ("requests_done", "requests_failed", "running", "waiting")},
    **{name: ids for name in ("prompt_tokens", "output_tokens", "chunks_done")},
    **{name: st.lists(finite).map(tuple) for name in ("stage_busy", "stage_compute_s")},
    kv_fragmentation=st.none() | finite,
)
errands = st.one_of(
    st.builds(Ask, requests),
    st.builds(Stop, st.integers(1, 64), st.none() | finite),
    st.builds(Abort),
    st.builds(
        Answer,
        ids,
        st.lists(ids).map(tuple),
        st.sampled_from(["stop", "length"]),
        ids,
        st.dictionaries(st.text(), finite | st.none()),
    ),
    st.builds(Failure, ids, st.text(), st.text()),
    st.builds(Watch, snapshots),
)


@given(errands)
def test_what_is_sent_is_what_is_read(errand):
    assert decode(encode(errand)) == errand


@given(st.binary() | st.text().map(str.encode) | errands.map(lambda errand: encode(errand)[:-1]))
def test_anything_else_is_refused(text):
    with pytest.raises(ProtocolError, match="is no errand"):
        decode(text)


@pytest.mark.parametrize(
    "text", [b"[]", b"[1, 2]", b'["ask", {}]', b'["stop", {"number": 1}]', b'["dance", {}]', b"[" * 100_000]
)
def test_json_of_another_form_is_refused(text):
    with pytest.raises(ProtocolError):
        decode(text)


def test_a_completion_comes_back_with_the_request_that_the_receiver_knows():
    request = Request(5, (1, 2), SamplingParams(seed=1))
    completion = Completion(request, (7, 8), "length", num_preemptions=2)
    answer = decode(encode(Answer.of(completion, {"ttft_s": 0.5})))
    assert isinstance(answer, Answer) and answer.completion(request) == completion
