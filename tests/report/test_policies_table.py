import json

import pytest
from click.testing import CliRunner
from rich.console import Console

from sarathi_pp.cli.main import cli
from sarathi_pp.report.policies import bubble_floor, render_policies

ARGUMENTS = ["simulate", "--preset", "gpt3-a100-tp8pp8", "--workload", "zipf:n=12,min=200,max=400,pd=4"]


def simulated(*options):
    done = CliRunner().invoke(cli, [*ARGUMENTS, *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_every_policy_and_chunk_size_is_a_run_with_a_report_s_keys():
    policies = ("--policy", "sarathi", "--policy", "orca", "--chunk-size", "64", "--chunk-size", "128")
    document = json.loads(simulated(*policies, "--json"))
    assert document["schema"] == "sarathi-pp/runs/1"
    runs = document["runs"]
    assert [(run["policy"], run["chunk_size"]) for run in runs] == [
        ("sarathi", 64),
        ("sarathi", 128),
        ("orca", 64),
        ("orca", 128),
    ]
    assert all(run["completed"] == 12 and run["stages"] == 8 for run in runs)
    assert runs[2]["wall_s"] == runs[3]["wall_s"]  # whole prompts: the size is not used
    assert runs[0]["wall_s"] != runs[1]["wall_s"]


def test_a_policy_without_a_size_takes_its_own():
    runs = json.loads(simulated("--policy", "sarathi", "--policy", "balanced", "--json"))["runs"]
    assert [run["chunk_size"] for run in runs] == [256, 2048]


def test_the_same_command_prints_the_same():
    noisy = ("--jitter-cv", "0.1", "--slow-stage", "3:1.5", "--stages", "4", "--json")
    assert simulated(*noisy) == simulated(*noisy) != simulated(*noisy, "--seed", "1")


def test_a_slow_stage_shows_as_the_floor():
    runs = json.loads(simulated("--slow-stage", "0:2", "--policy", "orca", "--json"))["runs"]
    assert 0.4 < runs[0]["bubble_floor"] < 0.45  # 7 stages of 1 and one of 2: 1 - 9 / 16


def test_the_floor_of_equal_stages_is_nothing_and_of_no_compute_unknown():
    assert bubble_floor({"per_stage": [{"compute_s": 2.0}, {"compute_s": 2.0}]}) == 0
    assert bubble_floor({"per_stage": [{"compute_s": 0.0}]}) is None


def test_replicas_share_the_requests_and_their_floor_is_of_each():
    runs = json.loads(simulated("--replicas", "2", "--stages", "4", "--json"))["runs"]
    assert runs[0]["replicas"] == 2 and runs[0]["completed"] == 12
    assert [(one["replica"], one["stage"]) for one in runs[0]["per_stage"]] == [
        (r, s) for r in (0, 1) for s in range(4)
    ]
    assert sum(one["requests"] for one in runs[0]["per_replica"]) == 12
    per_stage = [{"replica": r, "compute_s": s} for r, s in ((0, 2.0), (0, 2.0), (1, 1.0), (1, 1.0))]
    assert bubble_floor({"per_stage": per_stage}) == 0
    assert bubble_floor({"per_stage": [*per_stage[:3], {"replica": 1, "compute_s": 3.0}]}) == pytest.approx(0.2)


def table(document):
    console = Console(width=80, record=True)
    console.print(render_policies(document))
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    return text


def test_the_table_fits_80_columns_with_the_longest_name():
    document = json.loads(simulated("--policy", "fastertransformer", "--policy", "sarathi:even=1", "--json"))
    text = table(document)
    assert "fastertransformer" in text and "sarathi:even=1" in text and "\u2026" not in text and "req " not in text


def test_a_bound_between_tokens_is_told_to_who_keeps_it_and_the_rate_within_it_found_for_all():
    policies = ("--policy", "balanced", "--policy", "sarathi", "--stages", "2", "--json")
    work = ("--workload", "fixed:n=16,prompt=3000,output=12")
    document = json.loads(simulated(*policies, *work, "--tbt-slo", "0.15"))
    balanced, sarathi = document["runs"]
    assert [balanced["policy"], sarathi["policy"]] == ["balanced:tbt_slo=0.15", "sarathi"]
    assert all(run["capacity"]["rate"] > 0 and run["capacity"]["tbt_p99_s"] <= 0.15 for run in (balanced, sarathi))
    free, same = json.loads(simulated(*policies, *work))["runs"]
    assert balanced["itl_s"]["p99"] < free["itl_s"]["p99"] and sarathi["itl_s"] == same["itl_s"]
    assert "capacity" not in free
    text = table(document)
    assert "req per s: the highest request rate within the bound" in text and "\u2026" not in text
    assert f"{sarathi['capacity']['rate']:.1f}" in next(line for line in text.splitlines() if "sarathi" in line)


def test_a_bound_of_nothing_is_refused():
    refused = CliRunner().invoke(cli, [*ARGUMENTS, "--tbt-slo", "0"])
    assert refused.exit_code == 2 and "--tbt-slo" in refused.output


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--slow-stage", "8:1.5"], "slow stage 8: there are stages 0 to 7"),
        (["--slow-stage", "3:1.5", "--slow-stage", "3:1.1"], "given twice for one stage"),
        (["--jitter-cv", "nan"], "'nan' is not a number"),
        (["--tbt-slo", "nan"], "'nan' is not a number"),
    ],
)
def test_an_option_that_would_do_nothing_or_nonsense_is_refused(wrong, message):
    refused = CliRunner().invoke(cli, [*ARGUMENTS, *wrong])
    assert message in (refused.output or "") + str(refused.exception) and refused.exit_code != 0


def test_neither_or_both_pipelines_is_refused():
    assert (
        "either --profile FILE or --preset NAME" in CliRunner().invoke(cli, ["simulate", "--workload", "zipf"]).output
    )
    wrong = CliRunner().invoke(cli, [*ARGUMENTS, "--slow-stage", "three"])
    assert wrong.exit_code == 2 and "not a stage and a factor like 3:1.1" in wrong.output


def test_columns_are_named_as_in_a_report_and_unequal_chunk_sizes_are_said():
    document = json.loads(simulated("--policy", "orca", "--policy", "balanced", "--json"))
    text = table(document)
    heading = " ".join(text.split("policy")[0].split() + text.split("\u2500")[0].split())
    assert all(word in heading for word in ("tokens/s", "steady", "bubble", "ttft", "itl", "request"))
    assert "the chunk sizes differ: use --chunk-size" in text
    document["runs"] = document["runs"][:1]
    assert "chunk sizes differ" not in table(document)
