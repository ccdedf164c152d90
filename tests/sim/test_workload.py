import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from sarathi_pp.errors import ConfigError
from sarathi_pp.sim.workload import parse_workload


def prompts(spec):
    return [tuple(request.prompt_token_ids) for request in parse_workload(spec).requests()]


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
        ("fixed:prompt=9,shared=9", "shared is 9, and the shortest prompt has 9 tokens"),
        ("uniform:min=40,max=90,shared=40", "shared is 40, and the shortest prompt has 40 tokens"),
        ("zipf:min=40,max=90,pd=3,shared=30", "shared is 30, and the shortest prompt has 30 tokens"),
        ("then:fixed:n=3+fixed:prompt=9,shared=10", "fixed:prompt=9,shared=10: shared is 10"),
        ("fixed:shared=-1", "shared is -1; it must be a whole number from 0"),
        ("fixed:shared=1.5", "shared is 1.5; it must be"),
        ("fixed:shared=1,groups=0", "groups is 0; it must be a whole number from 1"),
        ("fixed:groups=2", "groups is 2, and nothing is shared; give shared=TOKENS too"),
        ("fixed:output_max=2", "'output_max=2' is not one of its parameters"),
        ("uniform:output_max=9", "output_max is 9 and output is 0"),
        ("uniform:output=10,output_max=9", "output_max is 9 and output is 10"),
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


@pytest.mark.parametrize(
    "spec", ["uniform:n=40,min=21,max=60,seed=5", "zipf:n=40,min=24,max=60,seed=5", "fixed:n=40,prompt=21,seed=5"]
)
def test_the_prompts_of_a_group_begin_with_the_same_tokens_and_keep_their_lengths(spec):
    shared = f"{spec},shared=20,groups=8"
    drawn = prompts(shared)
    assert drawn == prompts(shared)
    assert list(map(len, drawn)) == list(map(len, prompts(spec)))
    groups = Counter(prompt[:20] for prompt in drawn)
    assert sorted(groups.values()) == [5] * 8
    assert len({prefix[0] for prefix in groups}) > 1, "groups have nothing in common"
    assert len({prompt[20] for prompt in drawn}) > 30, "and the next token is each prompt's own"
    order = [list(groups).index(prompt[:20]) for prompt in drawn]
    assert order not in (sorted(order), [index % 8 for index in range(40)])
    assert prompts(shared.replace("seed=5", "seed=6"))[0][:20] not in groups


def test_groups_of_unequal_numbers_differ_by_one_request():
    sizes = Counter(prompt[:3] for prompt in prompts("fixed:n=11,prompt=4,shared=3,groups=4"))
    assert sorted(sizes.values()) == [2, 3, 3, 3]
    alone = Counter(prompt[:3] for prompt in prompts("fixed:n=3,prompt=4,shared=3,groups=1000000000000"))
    assert list(alone.values()) == [1, 1, 1]


def test_a_workload_that_shares_nothing_has_the_tokens_that_it_always_had():
    ids = random.Random(5 + 1)
    assert prompts("fixed:n=3,prompt=7,seed=5") == [tuple(ids.choices(range(32_000), k=7)) for _ in range(3)]
    assert prompts("fixed:n=3,prompt=7,seed=5,shared=0,groups=1") == prompts("fixed:n=3,prompt=7,seed=5")


def test_token_ids_are_within_the_vocabulary_or_all_0():
    workload = parse_workload("fixed:n=9,prompt=30,shared=20")
    assert max(max(request.prompt_token_ids) for request in workload.requests(vocabulary=11)) == 10
    assert [list(one.prompt_token_ids) for one in workload.requests(token_ids=False)] == [[0] * 30] * 9


def test_shared_requests_are_drawn_when_they_are_asked_for_and_fewer_are_the_same():
    endless = parse_workload("fixed:n=1000000000,prompt=9,shared=8,groups=1000000")
    assert len(list(itertools.islice(endless.requests(), 3))) == 3
    workload = parse_workload("fixed:n=100,prompt=9,shared=8,groups=9")
    assert list(replace(workload, num_requests=30).requests()) == list(workload.requests())[:30]


def test_parts_of_a_workload_share_what_each_of_them_says():
    first, second = "fixed:n=4,prompt=9,shared=6,seed=1", "uniform:n=3,min=7,max=9,shared=4,seed=1"
    drawn = prompts(f"poisson:rate=4,then:{first}+fixed:n=2,prompt=5+{second}")
    assert len({prompt[:6] for prompt in drawn[:4]}) == 1
    assert len({prompt[:4] for prompt in [*drawn[:4], *drawn[6:]]}) == 1, "with one seed, they have the same groups"
    assert len({prompt[:4] for prompt in drawn}) == 3
    assert not parse_workload("then:fixed:n=4+uniform:n=3").shares_prefixes


def test_tokens_are_repeated_from_the_second_prompt_of_a_group_on():
    spec = "fixed:n=3,prompt=9,shared=6,seed=1+fixed:n=2,prompt=5+fixed:n=2,prompt=9,shared=8,seed=1"
    assert list(parse_workload(f"then:{spec}").repeated_tokens()) == [0, 6, 6, 0, 0, 6, 8]
    first, second = "fixed:n=2,prompt=9,shared=8", "fixed:n=2,prompt=9,shared=6"
    assert list(parse_workload(f"then:{first}+{second}+{first}").repeated_tokens()) == [0, 8, 6, 6, 8, 8]
    groups = parse_workload("fixed:n=40,prompt=9,shared=6,groups=8")
    assert Counter(groups.repeated_tokens()) == {0: 8, 6: 32} and groups.shares_prefixes
    plain = parse_workload("fixed:n=4,prompt=9")
    assert list(plain.repeated_tokens()) == [0] * 4 and not plain.shares_prefixes


@pytest.mark.parametrize("pd", [0.001, 0.5, 1, 1.5, 7])
@pytest.mark.parametrize("low", [3, 8, 21])
def test_the_shortest_zipf_prompt_bounds_what_is_shared(low, pd):
    spec = f"zipf:n=300,min={low},max={low + 5},pd={pd}"
    shortest = min(prompt for prompt, _ in parse_workload(spec).lengths())
    if shortest > 1:
        parse_workload(f"{spec},shared={shortest - 1}")
    with pytest.raises(ConfigError, match=f"the shortest prompt has {shortest} tokens"):
        parse_workload(f"{spec},shared={shortest}")


def test_outputs_of_uniform_prompts_may_have_lengths_of_their_own():
    workload = parse_workload("uniform:n=500,min=50,max=60,output=3,output_max=9")
    assert {output for _, output in workload.lengths()} == set(range(3, 10))
    assert workload.max_tokens == 69
