"""Messages between rank 0 and other leaders survive the wire, and nothing else is taken for one."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.core.plan import TokenLogprobs
from sarathi_pp.core.prompt_logprobs import PromptLogprobs
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.engine.messages import Abort, RequestError, Result, Stop, Submit, decode, encode
from sarathi_pp.engine.progress import Progress
from sarathi_pp.errors import ProtocolError
from sarathi_pp.sampling_params import SamplingParams

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
    **{name: st.floats(-2, 2) for name in ("presence_penalty", "frequency_penalty")},
    repetition_penalty=st.floats(1e-6, 1e6),
    no_repeat_ngram_size=st.integers(0, 64),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100), max_size=20),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1),
    bad_words=st.lists(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)),
    bad_words_ids=st.lists(st.lists(ids, min_size=1)),
    **{name: st.lists(ids) for name in ("suppress_tokens", "begin_suppress_tokens", "stop_token_ids")},
    min_new_tokens=st.integers(0, 2**40),
    include_stop_str_in_output=st.booleans(),
    typical_p=st.floats(1e-300, 1),
    **{name: st.floats(0, 1, exclude_max=True) for name in ("epsilon_cutoff", "eta_cutoff")},
    **{name: st.none() | st.integers(0, 20) for name in ("logprobs", "prompt_logprobs")},
    logprobs_from=ids,
)


@st.composite
def prompt_logprobs(draw):
    num_top, own = draw(st.integers(0, 3)), draw(st.lists(finite, max_size=3))
    most = num_top * len(own)
    top_ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=most, max_size=most))
    tops = draw(st.lists(finite, min_size=most, max_size=most))
    return PromptLogprobs(draw(ids), num_top, array("d", own), array("i", top_ids), array("d", tops))


logprobs = st.builds(TokenLogprobs, finite, st.lists(st.tuples(ids, finite)).map(tuple))
rules = st.builds(
    DrawRules,
    num_prompt=ids,
    logit_bias=st.lists(st.tuples(ids, st.floats(-100, 100))).map(tuple),
    repetition_penalty=st.floats(1e-6, 1e6),
    allowed_token_ids=st.none() | st.lists(ids).map(tuple),
    bad_words=st.lists(st.lists(ids).map(tuple)).map(tuple),
    min_tokens=ids,
    end_token_ids=st.lists(ids).map(tuple),
    eta_cutoff=st.floats(0, 1),
    logprobs=st.none() | ids,
)
requests = st.builds(
    Request,
    ids,
    st.lists(ids, min_size=1).map(tuple),
    samplings,
    finite,
    st.lists(st.integers(0, 99)).map(tuple),
    st.none() | rules,
    st.text(st.characters(codec="utf-8")),
)
progress = st.builds(
    Progress,
    **{name: finite for name in ("elapsed_s", "window_s")},
    **{name: ids for name in ("requests_done", "requests_failed", "running", "waiting")},
    **{name: ids for name in ("prompt_tokens", "output_tokens", "chunks_done")},
    **{name: st.lists(finite).map(tuple) for name in ("stage_busy", "stage_compute_s")},
    kv_fragmentation=st.none() | finite,
)
messages = st.one_of(
    st.builds(Submit, requests),
    st.builds(Stop, st.integers(1, 64), st.none() | finite),
    st.builds(Abort),
    st.builds(
        Result,
        ids,
        st.lists(ids).map(tuple),
        st.sampled_from(["stop", "length"]),
        ids,
        st.dictionaries(st.text(), finite | st.none()),
        st.none() | st.lists(logprobs).map(tuple),
        st.none() | prompt_logprobs(),
        ids,
    ),
    st.builds(RequestError, ids, st.text(), st.text()),
    progress,
)


@given(messages)
def test_what_is_sent_is_what_is_read(message):
    assert decode(encode(message)) == message


@given(st.binary() | st.text().map(str.encode) | messages.map(lambda message: encode(message)[:-1]))
def test_anything_else_is_refused(text):
    with pytest.raises(ProtocolError, match="is not a message"):
        decode(text)


@pytest.mark.parametrize(
    "text", [b"[]", b"[1, 2]", b'["submit", {}]', b'["stop", {"number": 1}]', b'["dance", {}]', b"[" * 100_000]
)
def test_json_of_another_form_is_refused(text):
    with pytest.raises(ProtocolError):
        decode(text)


def test_rules_of_another_form_are_refused():
    sent = encode(Submit(Request(5, (1, 2), SamplingParams(seed=1), rules=DrawRules(num_prompt=2))))
    assert decode(sent).request.rules == DrawRules(num_prompt=2)
    with pytest.raises(ProtocolError, match="are not the rules of a request"):
        decode(sent.replace(b"num_prompt", b"num_promise"))


def test_each_kind_has_its_name_on_the_wire():
    request = Request(5, (1, 2), SamplingParams(seed=1))
    kinds = {
        "submit": Submit(request),
        "stop": Stop(15, None),
        "abort": Abort(),
        "result": Result(5, (7,), "length", 0, {}, (TokenLogprobs(-0.5, ((3, -0.25), (4, -1.0))),)),
        "error": RequestError(5, "non_finite_logits", "no"),
        "progress": Progress.nothing(2),
    }
    assert [json.loads(encode(message))[0] for message in kinds.values()] == list(kinds)


def test_a_completion_comes_back_with_the_request_that_the_receiver_knows():
    request = Request(5, (1, 2), SamplingParams(seed=1))
    logprobs = (TokenLogprobs(-0.5), TokenLogprobs(-1.5, ((3, -0.25),)))
    completion = Completion(request, (7, 8), "length", num_preemptions=2, logprobs=logprobs)
    answer = decode(encode(Result.of(completion, {"ttft_s": 0.5})))
    assert isinstance(answer, Result) and answer.completion(request) == completion
