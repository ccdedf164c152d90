import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sarathi_pp.core.draw_rules import MOST_MICROBATCH_BYTES, Failure
from sarathi_pp.core.pages import MOST_SHARED_PAGES
from sarathi_pp.core.plan import (
    Chunk,
    ChunkLogprobs,
    MicroBatch,
    SampledToken,
    SamplingRow,
    Scored,
    StageTime,
    StepResult,
    TokenLogprobs,
)
from sarathi_pp.errors import ProtocolError
from sarathi_pp.sampling_params import MOST_LOGPROBS
from sarathi_pp.wire import codec
from tests.thinning import examples

int64 = st.integers(-(2**63), 2**63 - 1)
reals = st.floats(allow_nan=False)
ids = st.lists(st.integers(0, 2**40), max_size=5).map(tuple)
rows = st.builds(SamplingRow, st.integers(0, 10**6), reals, st.integers(0, 10**6), reals, reals, int64)
chunks = st.builds(
    Chunk,
    int64,
    st.integers(0, 9),
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    st.booleans(),
    ids,
    ids,
    st.none() | rows,
    st.booleans(),
    st.just(b"") | st.binary(min_size=1, max_size=40),
    st.none() | st.builds(Scored, int64, int64, int64, int64),
    st.just(-1) | st.integers(0, 2**40),
)
microbatches = st.builds(
    MicroBatch, st.integers(0, 2**62), st.lists(chunks, max_size=5).map(tuple), ids, reals, st.booleans()
)
tops = st.lists(st.tuples(int64, reals), max_size=3).map(tuple)
logprobs = st.none() | st.builds(TokenLogprobs, reals, tops)
drawn = st.builds(SampledToken, int64, int64, int64, st.sampled_from(Failure), int64, logprobs)
times = st.lists(st.builds(StageTime, st.integers(0, 2**53), reals), max_size=8).map(tuple)


@st.composite
def scores(draw):
    num_top, own = draw(st.integers(0, 3)), draw(st.lists(reals, max_size=3).map(tuple))
    most = len(own) * num_top
    top_ids, tops = (draw(st.lists(one, min_size=most, max_size=most).map(tuple)) for one in (int64, reals))
    return ChunkLogprobs(draw(int64), draw(int64), draw(int64), num_top, own, top_ids, tops)


bad = st.lists(st.tuples(int64, int64), max_size=3).map(tuple)
frames = st.one_of(
    st.builds(codec.MicroBatchFrame, microbatches, times, bad, st.booleans()),
    st.builds(
        StepResult,
        st.integers(0, 2**62),
        st.lists(drawn, max_size=5).map(tuple),
        times,
        st.booleans(),
        st.lists(scores(), max_size=3).map(tuple),
    ),
    st.builds(codec.HeadFrame, st.integers(0, 2**62), st.integers(0, 2**31), times, bad, st.booleans()),
    st.builds(codec.Heartbeat, st.integers(0, 2**62), st.booleans()),
    st.just(codec.Goodbye()),
)


@given(frames, st.integers(0, 2**64 - 1), st.integers(0, 4096))
def test_round_trip(frame, number, payload_bytes):
    head = codec.encode(frame, number, payload_bytes)
    assert len(head) % codec.ALIGNMENT == 0
    behind = b"x" * payload_bytes + codec.trailer(number) if payload_bytes else b""
    envelope = codec.decode(head + behind + b"tail of an older, longer message")
    assert envelope == codec.Envelope(frame, number, len(head), payload_bytes)


@settings(max_examples=examples(300))
@given(frames, st.data())
def test_any_damaged_byte_of_head_or_body_is_seen(frame, data):
    message = bytearray(codec.encode(frame, 3))
    used = codec.HEAD_BYTES + int.from_bytes(message[16:20], "little")
    place = data.draw(st.integers(0, used - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProtocolError):
        codec.decode(bytes(message))


@settings(max_examples=examples(300))
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(noise):
    with pytest.raises(ProtocolError):
        codec.decode(noise)


@settings(max_examples=examples(500))
@given(st.integers(0, 7), st.lists(int64, max_size=30), st.lists(reals, max_size=10))
def test_well_signed_nonsense_is_refused_or_read_back_as_written(kind, integers, floats):
    """The checksum does not protect against a peer with a bug: the body's own counts must hold too."""
    try:
        frame = codec._restore(kind, integers, floats)
    except (ValueError, IndexError):
        return
    assert codec._flatten(frame) == (kind, (integers, floats))


@pytest.mark.parametrize("num_stages", [-3.0, -1.0, -0.5, 0.5, 1.5])
def test_a_number_of_stages_that_there_cannot_be_is_refused(num_stages):
    """The message does hold that number of values, because those of two rows are read twice."""
    integers = [7, 0, 0, 2, 0, 0, 1, 2, 0, 0, 5, 6, 1, 1, 3, 3, 0, 0, 0, 0, 5, 6, 0, 0, 9, 9]
    assert codec._restore(1, integers, [0.5, 1.0, 7.0, *[0.25] * 7])
    with pytest.raises(ValueError):
        codec._restore(1, integers, [0.5, num_stages, *[0.25] * (int(2 * num_stages) + 6)])


@given(frames, st.integers(1, 64))
def test_a_cut_message_is_refused(frame, cut):
    message = codec.encode(frame, 0, payload_bytes=64) + b"p" * 64 + codec.trailer(0)
    with pytest.raises(ProtocolError):
        codec.decode(message[:-cut])


@given(frames, st.integers(9, 72), st.integers(0, 1000))
def test_a_message_cut_over_what_an_earlier_one_left_is_refused(frame, cut, earlier):
    """A receiver knows only its buffer, not how much of it was written.

    A cut in the trailer leaves the payload whole.
    """
    head = codec.encode(frame, 1001, payload_bytes=64)
    message = head + b"p" * 64 + codec.trailer(1001)
    left = head + b"q" * 64 + codec.trailer(earlier)
    for before in (left, bytes(len(left))):
        with pytest.raises(ProtocolError, match="its payload of 64 bytes was cut"):
            codec.decode(message[:-cut] + before[-cut:])


def test_runs_without_states_send_no_number_for_a_slot():
    plain = Chunk(1, 0, 0, 2, False, (5, 6), (0,), None)
    with_slot = plain._replace(slot=0)
    sizes = [len(codec._flatten(codec.MicroBatchFrame(MicroBatch(0, (one,))))[1][0]) for one in (plain, with_slot)]
    assert sizes[1] == sizes[0] + 1


@pytest.mark.parametrize("slots", [(), (-1,), (-(2**63),)])
def test_a_slot_that_there_cannot_be_is_refused(slots):
    kind, (integers, reals) = codec._flatten(codec.MicroBatchFrame(MicroBatch(0, (Chunk(1, 0, 0, 1, slot=3),))))
    assert integers.pop() == 3
    with pytest.raises(ValueError, match="state slots"):
        codec._restore(kind, [*integers, *slots], reals)


def test_versions_do_not_mix():
    message = bytearray(codec.encode(codec.Goodbye(), 0))
    message[4] += 1
    with pytest.raises(ProtocolError, match=f"wire version {codec.VERSION + 1}, this rank {codec.VERSION}"):
        codec.decode(bytes(message))


@given(st.integers(1, 300), st.integers(1, 40), st.sampled_from([1, 16]), st.integers(1, 4), st.data())
def test_the_bound_on_message_size_holds(max_tokens, max_seqs, page_size, stages, data):
    count = data.draw(st.integers(1, min(max_tokens, max_seqs)))
    check_bound(count, max_tokens, max_seqs, page_size, stages, shares_pages=data.draw(st.booleans()))


def test_the_bound_on_message_size_holds_for_chunks_that_bring_all_they_can():
    check_bound(100, 100, 100, page_size=16, stages=2, shares_pages=False)


def check_bound(count, max_tokens, max_seqs, page_size, stages, *, shares_pages):
    """Check that the fullest possible microbatch of `count` chunks fits into the buffers that receivers post ahead."""
    lengths = [max_tokens // count] * count
    row = SamplingRow(1, 1.0, 1, 1.0, 0.0, 2**62)
    shared = tuple(range(MOST_SHARED_PAGES * shares_pages))
    # Rules of one byte more than whole words take the most room.
    size = max(1, MOST_MICROBATCH_BYTES // count // 8 * 8 - 7)
    rules = [size] * (count - 1) + [MOST_MICROBATCH_BYTES - size * (count - 1)]
    parts = tuple(
        Chunk(
            i,
            0,
            0,
            n,
            False,
            (1,) * n,
            (*shared[i::count], *range(-(-n // page_size))),
            row,
            rules=b"x" * rules[i],
            scored=Scored(1, n, 2, 3),
            slot=i,
        )
        for i, n in enumerate(lengths)
    )
    bad = tuple((i, 0) for i in range(count))
    microbatch = MicroBatch(2**40, parts, tuple(range(2 * max_seqs)), 1.0)
    head = codec.encode(codec.MicroBatchFrame(microbatch, (StageTime(0, 0.0),) * stages, bad), 0)
    bound = codec.max_frame_bytes(
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        page_size=page_size,
        num_stages=stages,
        shares_pages=shares_pages,
    )
    assert len(head) <= bound
    tops = ((1, -0.5),) * MOST_LOGPROBS
    tokens = tuple(SampledToken(i, 0, 1, logprobs=TokenLogprobs(-0.5, tops)) for i in range(count))
    found = tuple(
        ChunkLogprobs(i, 0, 1, MOST_LOGPROBS, (-0.5,) * n, (1,) * n * MOST_LOGPROBS, (-0.5,) * n * MOST_LOGPROBS)
        for i, n in enumerate(lengths)
    )
    result = StepResult(2**40, tokens, (StageTime(0, 0.0),) * stages, prompt_logprobs=found)
    assert len(codec.encode(result, 0)) <= bound
