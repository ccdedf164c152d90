import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.core.plan import Chunk, MicroBatch

chunks = st.builds(
    lambda sequence, epoch, start, num, decode: Chunk(sequence, epoch, start, 1 if decode else num, decode),
    st.integers(0, 10**6) | st.integers(0, 127 << 32),
    st.integers(0, 5),
    st.integers(0, 10**6),
    st.integers(1, 10**5),
    st.booleans(),
)


@given(st.integers(0, 10**9), st.lists(chunks, max_size=8))
def test_text_form_round_trips(index, parts):
    ordered = tuple(sorted(parts, key=lambda chunk: chunk.decode))
    microbatch = MicroBatch(index, ordered)
    assert MicroBatch.parse(str(microbatch)) == microbatch


def test_text_form_is_the_documented_one():
    text = "m7[s3:256+128 s4.1:0+8 | d s1:300 s2/5:17]"
    microbatch = MicroBatch.parse(text)
    assert str(microbatch) == text
    assert (microbatch.num_tokens, microbatch.num_decodes) == (138, 2)


@pytest.mark.parametrize("text", ["", "m7", "m[s1:0+1]", "m1[s1:0]", "m1[d s1:0+2]", "m1[x]", "m1[s1:0+1 | s2:0+1]"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError):
        MicroBatch.parse(text)
