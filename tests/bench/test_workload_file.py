"""Workloads from files, and as parts of named ones."""

import json
import math

import pytest

from sarathi_pp.bench.workload_file import read_workload
from sarathi_pp.cli.main import main
from sarathi_pp.core.request import Completion, Request
from sarathi_pp.errors import ConfigError, InputError, RowError
from sarathi_pp.inputs.row import Row
from sarathi_pp.outputs.journal import Journal
from sarathi_pp.outputs.sink import FileSink
from sarathi_pp.sampling_params import SamplingParams
from sarathi_pp.text.tokenizer import Tokenizer
from sarathi_pp.trace.clock import SystemClock


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def asked(prompt, output, **more):
    return {"num_prompt_tokens": prompt, "num_output_tokens": output, **more}


@pytest.mark.parametrize("form", ["own", "openai-chat", "openai-completion"])
def test_answers_are_a_workload(form, tmp_path):
    """Lines that asked nothing of the pipeline do not count."""
    answers = str(tmp_path / "answers.jsonl")
    sink = FileSink(
        Journal.open(answers), tokenizer=Tokenizer(None, vocab_size=64), clock=SystemClock(), model="a model"
    )
    for line, (prompt, output) in enumerate(((5, 2), (16, 0), (300, 40)), start=1):
        request = Request(line, (1,) * prompt, SamplingParams(max_new_tokens=output))
        sink.finish(Row(line, str(line), form, request), Completion(request, (7,) * output, "length"), {"ttft_s": 0.1})
    sink.fail(Row(4, "4", form, error=RowError("invalid_json", "not JSON")), RowError("invalid_json", "not JSON"))
    sink.close()
    with open(answers, "a") as file:  # like other servers that refuse a request
        file.write('{"response": {"status_code": 400, "body": {"error": {}}}, "error": null}\n')
    workload = read_workload(answers)
    assert list(workload.lengths()) == [(5, 2), (300, 40)] == list(workload.lengths())
    assert (workload.spec, workload.num_requests, workload.max_tokens) == (answers, 2, 340)
    assert not workload.has_arrivals
    requests = list(workload.requests())
    assert [len(one.prompt_token_ids) for one in requests] == [5, 300]
    assert [(one.sampling.max_new_tokens, one.arrival_s) for one in requests] == [(2, 0.0), (40, 0.0)]


def test_arrivals_are_taken_from_the_file(tmp_path):
    trace = write(tmp_path / "trace.jsonl", *(asked(8, 2, arrival_s=at) for at in (0, 0.5, 0.5, 7)))
    workload = read_workload(trace)
    assert workload.has_arrivals and math.isinf(workload.rate)
    assert [one.arrival_s for one in workload.requests()] == [0, 0.5, 0.5, 7]
    assert [one.arrival_s for one in workload.at_rate(math.inf).requests()] == [0] * 4


def test_a_file_stands_where_a_name_does(tmp_path):
    trace = write(tmp_path / "trace.jsonl", *(asked(8, 2, arrival_s=at) for at in (0, 100, 200)))
    again = read_workload(f"poisson:rate=4,{trace}")
    assert again.rate == 4 and list(again.lengths()) == [(8, 2)] * 3
    assert 0 < list(again.requests())[-1].arrival_s < 100
    plain = write(tmp_path / "plain.jsonl", asked(9, 3))
    joined = read_workload(f"then:{plain}+fixed:n=2,prompt=4,output=1")
    assert list(joined.lengths()) == [(9, 3), (4, 1), (4, 1)]
    with pytest.raises(ConfigError, match=r"trace.jsonl has arrivals of its own; put them before all parts: poisson"):
        read_workload(f"then:{plain}+{trace}")
    assert list(read_workload(f"poisson:rate=4,then:{plain}+{trace}").lengths()) == [(9, 3)] + [(8, 2)] * 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("[1, 2]", "line 2 is not an object"),
        ('{"prompt": "7+8="}', "line 2: num_output_tokens is None; it must be a whole number from 0"),
        ('{"num_output_tokens": 3}', "line 2: num_prompt_tokens is None; it must be a whole number from 1"),
        ('{"response": {"body": {"usage": {"completion_tokens": "3"}}}}', "completion_tokens is '3'"),
        ('{"response": {"body": {}}}', "completion_tokens is None"),
        (json.dumps(asked(5, False)), "num_output_tokens is False"),
        (json.dumps(asked(0, 1)), "num_prompt_tokens is 0"),
        (json.dumps(asked(True, 1)), "num_prompt_tokens is True"),
        (json.dumps(asked(5, 1.5)), "num_output_tokens is 1.5"),
        (json.dumps(asked(5, 10**8)), "num_output_tokens is 100000000; it must be a whole number from 0 to 10000000"),
        (json.dumps(asked(5, 1, arrival_s=10**400)), "line 2: arrival_s is 1000"),
        (json.dumps(asked(5, 1, arrival_s="soon")), "line 2: arrival_s is 'soon'"),
        (json.dumps(asked(5, 1, arrival_s=-1)), "arrival_s is -1"),
        ('{"num_prompt_tokens": 5, "num_output_tokens": 1, "arrival_s": NaN}', "arrival_s is nan"),
        (json.dumps(asked(5, 1)), "line 2: arrival_s must be on all lines or on none"),
        (json.dumps(asked(5, 1, arrival_s=1)), "line 2: arrival_s is 1, less than 2 in an earlier line"),
        ("\xff", "line 2 is not JSON"),
    ],
)
def test_a_line_that_is_no_request_is_named(line, message, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(json.dumps(asked(5, 1, arrival_s=2)).encode() + b"\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(InputError, match=message):
        read_workload(str(trace))


def test_a_file_without_requests_is_refused(tmp_path):
    empty = write(tmp_path / "empty.jsonl", {"id": "1", "error": {}})
    with pytest.raises(ConfigError, match="holds no answered request"):
        read_workload(empty)
    for name in (str(tmp_path / "none.jsonl"), str(tmp_path), "", "x" * 300, "a\0b"):
        with pytest.raises(ConfigError, match="is not known; give an existing file of requests, or one of zipf"):
            read_workload(name)


def test_simulate_takes_a_file(tmp_path, capsys):
    trace = write(tmp_path / "trace.jsonl", *(asked(600, 30, arrival_s=index / 10) for index in range(20)))
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--preset", "gpt3-a100-tp8pp8", "--workload", trace, "--policy", "sarathi", "--json"])
    assert not ended.value.code
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["requests"], run["prompt_tokens"], run["output_tokens"]) == (20, 12000, 600)


def test_bench_refuses_arrivals(tmp_path, capsys):
    trace = write(tmp_path / "trace.jsonl", asked(5, 1, arrival_s=0))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--model", "examples/tiny-adder", "--workload", trace])
    assert ended.value.code == 2
    assert "leave out poisson: and arrival_s" in capsys.readouterr().err
