import json
from dataclasses import replace

import pytest

from sarathi_pp.core.request import Completion, Request
from sarathi_pp.errors import RowError
from sarathi_pp.inputs.row import Row, choice_seed
from sarathi_pp.outputs.finished_row import EndedRequest, RowCollector, row_error
from sarathi_pp.sampling_params import SamplingParams
from tests.outputs.test_sink import opened


def choices(line: int = 1, n: int = 3, form: str = "own") -> list[Row]:
    request = Request(line - 1, (5, 6), SamplingParams(seed=9, n=n, temperature=1.0))
    return list(Row(line, f"r{line}", form, request=request).choices())


def test_choices_share_the_prompt_and_differ_in_name_and_seed():
    rows = choices(n=128)
    assert [row.request.index for row in rows] == [choice << 32 for choice in range(128)]
    assert [row.choice for row in rows] == list(range(128))
    assert len({row.request.sampling.seed for row in rows}) == 128
    assert rows[0].request.sampling.seed == 9
    assert all(row.request.prompt_token_ids is rows[0].request.prompt_token_ids for row in rows)


def test_the_seeds_of_choices_stay_what_they_are():
    assert [choice_seed(9, choice) for choice in range(3)] == [9, 7344865671606121565, 6860078453971115732]


def test_a_line_without_a_request_has_one_choice():
    row = Row(1, "r", "own", error=RowError("invalid_json", "not JSON"))
    assert list(row.choices()) == [row]


def test_a_line_ends_with_its_last_choice_and_lists_them_in_order():
    collector = RowCollector()
    first, second, third = [EndedRequest(row) for row in choices()]
    (other,) = [EndedRequest(row) for row in choices(2, 1)]
    assert collector.add(third) == collector.add(first) == []
    assert collector.add(other) == [other]
    assert collector.add(second) == [first, second, third]
    assert collector.add(third) == [], "the same line may come again"


def test_the_error_of_a_line_names_its_first_failed_choice():
    ended = [EndedRequest(row) for row in choices()]
    assert row_error(ended) is None
    ended[1] = replace(ended[1], error=RowError("non_finite_logits", "token 1 had NaN"))
    ended[2] = replace(ended[2], error=RowError("no_allowed_token", "none"))
    error = row_error(ended)
    assert (error.code, error.message) == ("non_finite_logits", "choice 1 of 3: token 1 had NaN")


@pytest.mark.parametrize("form", ["openai-chat", "openai-completion"])
def test_openai_lines_have_all_choices_and_their_sum(form, tmp_path):
    sink = opened(tmp_path / "out.jsonl")
    rows = choices(form=form)
    for row, ids, cached in ((rows[2], (3,), 2), (rows[0], (1, 2, 0), 1), (rows[1], (2,), 2)):
        sink.finish(row, Completion(row.request, ids, "length", cached_tokens=cached), {})
    sink.close()
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    body = json.loads(line)["response"]["body"]
    texts = [choice["message"]["content"] if form == "openai-chat" else choice["text"] for choice in body["choices"]]
    assert ([choice["index"] for choice in body["choices"]], texts) == ([0, 1, 2], ["bca", "c", "d"])
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_line_is_written_when_all_choices_have_ended_and_counts_each(tmp_path):
    sink = opened(tmp_path / "out.jsonl")
    for row in choices(1):
        sink.finish(row, Completion(row.request, (1,), "length"), {})
    failed = choices(2)
    for row in failed[:2]:
        sink.finish(row, Completion(row.request, (1,), "length"), {})
    sink.fail(failed[2], RowError("non_finite_logits", "NaN"))
    for row in choices(3)[:2]:  # its third choice is withdrawn by a signal
        sink.finish(row, Completion(row.request, (1,), "length"), {})
    sink.close()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["id"], "outputs" in line, "error" in line) for line in lines] == [
        ("r1", True, False),
        ("r2", False, True),
    ]
    assert lines[1]["error"] == {"code": "non_finite_logits", "message": "choice 2 of 3: NaN"}
    assert (sink.num_finished, sink.num_failed, sink.num_lines, sink.num_error_lines) == (5, 1, 2, 1)
