import itertools
from collections import Counter

import pytest

from sarathi_pp.errors import ConfigError
from sarathi_pp.sim.workload import parse_workload


def test_zipf_lengths_follow_their_law():
    lengths = list(parse_workload("zipf:n=20000,min=1024,max=1027,theta=0.4,pd=10,seed=3").lengths())
    counts = Counter(prompt + output for prompt, output in lengths)
    assert set(counts) == {1024, 1025, 1026, 1027}
    weights = [k**-0.4 for k in (1, 2, 3, 4)]
    for k, weight in enumerate(weights):
        assert counts[1024 + k] / 20000 == pytest.approx(weight / sum(weights), abs=0.015)
    assert all(output == round((prompt + output) / 11) for prompt, output in lengths)


def test_uniform_and_fixed_lengths():
    uniform = list(parse_workload("uniform:n=500,min=256,max=1024,pd=8").lengths())
    assert min(uniform)[0] >= 256 and max(uniform)[0] <= 1024 and len(uniform) == 500
    assert all(output == prompt // 8 for prompt, output in uniform)
    assert list(parse_workload("fixed:n=3,prompt=7,output=2").lengths()) == [(7, 2)] * 3
    assert parse_workload("fixed:n=3,prompt=7,output=2").prompt_to_output == 3.5


def test_requests_are_the_same_every_time_and_hold_what_lengths_say():
    workload = parse_workload("poisson:rate=4,uniform:n=50,min=2,max=9,pd=3,seed=5")
    first, again = list(workload.requests()), list(workload.requests())
    assert first == again
    assert [(len(r.prompt_token_ids), r.sampling.max_new_tokens) for r in first] == list(workload.lengths())
    assert all(r.sampling.ignore_eos for r in first)
    assert list(parse_workload("uniform:n=50,min=2,max=9,pd=3,seed=6").lengths()) != list(workload.lengths())


def test_poisson_arrivals_have_their_rate_and_else_all_are_there_at_0():
    arrivals = [r.arrival_s for r in parse_workload("poisson:rate=4,fixed:n=2000,prompt=1,output=1").requests()]
    assert arrivals == sorted(arrivals) and 2000 / arrivals[-1] == pytest.approx(4, rel=0.1)
    assert {r.arrival_s for r in parse_workload("fixed:n=9,prompt=1,output=1").requests()} == {0.0}


def test_workloads_are_joined_in_order():
    spec = "then:fixed:n=2,prompt=8,output=4+fixed:n=1,prompt=80,output=2"
    workload = parse_workload(spec)
    assert list(workload.lengths()) == [(8, 4), (8, 4), (80, 2)]
    assert (workload.num_requests, workload.max_tokens) == (3, 82)
    arriving = parse_workload(f"poisson:rate=4,{spec}")
    assert list(arriving.lengths()) == list(workload.lengths()) and arriving.rate == 4


def test_requests_are_drawn_when_they_are_asked_for():
    endless = parse_workload("zipf:n=1000000000,min=10,max=20")
    assert len(list(itertools.islice(endless.requests(), 3))) == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("zip:n=3", "'zip:n=3' is not known"),
        ("zipf:n=3,pdd=4", "'pdd=4' is not one of its parameters: n, min, max, theta, pd, seed"),
        ("zipf:n", "'n' is not one of its parameters"),
        ("zipf:n=many", "n is 'many'; it must be a number"),
        ("zipf:n=0", "n is 0; it must be"),
        ("uniform:n=1.5", "n is 1.5; it must be"),
        ("zipf:min=9,max=4", "min is 9, above max, which is 4"),
        ("zipf:n=nan", "n is nan; it must be"),
        ("zipf:n=inf", "n is inf; it must be"),
        ("poisson:rate=0,zipf", "rate is 0; it must be at least 1e-09"),
        ("poisson:rate=1e-320,zipf", "it must be at least 1e-09"),
        ("zipf:n=1,max=10000000000", "max is 1e+10; it must be a whole number from 1 to 1e+07"),
        ("zipf:pd=0", "pd is 0; it must be a number from 0.001"),
        ("uniform:pd=1e300", "pd is 1e+300; it must be a number from 0.001 to 1e+07"),
        ("poisson:zipf", "is not one of its parameters: rate"),
        ("poisson:rate=4", "the workload '' is not known"),
        ("poisson:rate=1,poisson:rate=9,zipf", "rate is given twice, 1 and 9; leave one of them out"),
        ("fixed:n=3,n=5", "n is given twice, 3 and 5; leave one of them out"),
        ("then:poisson:rate=2,fixed:n=3+fixed:n=4", "poisson:rate=2,fixed:n=3 has arrivals of its own"),
        ("then:fixed:n=3+poisson:rate=2,fixed:n=4", "before all parts: poisson:rate=2,then:..."),
        ("then:fixed:n=3+then:poisson:rate=2,fixed:n=4", "has arrivals of its own"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_part_that_is_wrong(spec, message):
    with pytest.raises(ConfigError) as caught:
        parse_workload(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["zipf", "uniform"])
def test_outputs_may_be_longer_than_their_prompts(kind):
    workload = parse_workload(f"{kind}:n=50,min=100,max=200,pd=0.5")
    assert workload.prompt_to_output == pytest.approx(0.5, rel=0.02)
    assert max(map(sum, workload.lengths())) <= workload.max_tokens
