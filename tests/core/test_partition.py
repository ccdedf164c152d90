import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_pp.core.partition import partition
from sarathi_pp.errors import PartitionError


@given(st.integers(1, 200), st.data())
def test_even_split_covers_every_layer_once_and_the_head_gets_no_extra(num_layers, data):
    stages = data.draw(st.integers(1, num_layers))
    ranges = partition(num_layers, stages)
    assert [layer for first, end in ranges for layer in range(first, end)] == list(range(num_layers))
    sizes = [end - first for first, end in ranges]
    assert max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)


def test_given_split():
    assert partition(32, 4, (8, 8, 9, 7)) == ((0, 8), (8, 16), (16, 25), (25, 32))


@pytest.mark.parametrize(
    ("layers", "stages", "split", "says"),
    [
        (3, 4, None, "more than the model's 3 layers"),
        (8, 2, (4, 3), "adds up to 7"),
        (8, 2, (8, 0), "at least 1"),
        (8, 2, (4, 2, 2), "names 3 stages"),
    ],
)
def test_errors_name_the_numbers(layers, stages, split, says):
    with pytest.raises(PartitionError, match=says):
        partition(layers, stages, split)
