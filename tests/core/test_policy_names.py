import pytest

from sarathi_pp.core.policy import make_policy
from sarathi_pp.core.policy.sarathi import Sarathi
from sarathi_pp.errors import ConfigError


def test_parameters_reach_the_policy():
    assert make_policy("sarathi:even=1") == Sarathi(even=1)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("fifo", "choose one of orca, sarathi"),
        ("sarathi:odd=1", "no parameter 'odd'; it takes: even"),
        ("orca:x=1", "it takes: none"),
        ("sarathi:even=x", "must be an integer"),
    ],
)
def test_unknown_names_keys_and_values_are_errors(spec, says):
    with pytest.raises(ConfigError, match=says):
        make_policy(spec)
