"""Outputs that must match a grammar, through the command line, over stages and replicas."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict
from typing import Any

import jsonschema
import pytest

from sarathi_pp import LLM, SamplingParams
from tests.commands.processes import COMMAND, Files, environment, run
from tests.text.grammar_model import write_grammar_model
from tests.text.test_tokenizer import BYTES

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "more": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
    },
    "required": ["name", "age", "tags", "more"],
    "additionalProperties": False,
    "$defs": {"pair": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}},
    "x-guidance": {"whitespace_flexible": False},
}
LARK = 'start: "<" word ">"\nword: /[a-c]{1,3}/'
SEVENS = [token for token in range(len(BYTES)) if "7" in BYTES.decode(token)]
CHOICES = ['yes "quoted"', "no\nway", "gr\u00fc\u00df", "back\\slash"]
KEYS: tuple[dict[str, Any], ...] = (
    {"guided_json": SCHEMA},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
    {"guided_regex": r"\d{3}-[a-f]{2,4}"},
    {"guided_choice": CHOICES},
    {"guided_grammar": LARK},
    {"structured_outputs": {"choice": CHOICES}, "temperature": 1.0, "seed": 3},
    {"guided_json": SCHEMA, "temperature": 1.0, "seed": 4},
    {"structured_outputs": {"regex": "[xyz]{4}"}, "repetition_penalty": 1.5, "logit_bias": {"1": -50}},
    {"response_format": {"type": "text"}, "max_tokens": 20},
    {"ignore_eos": True, "max_tokens": 20},
)
REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"guided_regex": "(("}, "invalid_grammar", "unclosed group"),
    ({"guided_regex": "(?=a)b"}, "invalid_grammar", "look-around"),
    ({"guided_grammar": "start: foo"}, "invalid_grammar", "unknown name"),
    ({"guided_json": {"type": "frob"}}, "invalid_grammar", "frob"),
    ({"guided_json": False}, "invalid_grammar", "schema is false"),
    ({"guided_json": {"not": {"type": "string"}}}, "invalid_grammar", "not"),
    ({"guided_json": SCHEMA, "guided_regex": "a"}, "invalid_parameter", "given twice"),
    ({"guided_regex": "a", "ignore_eos": True}, "invalid_parameter", "ignore_eos"),
    ({"structured_outputs": {"regex": "a", "start_after": "</none>"}}, "invalid_parameter", "</none>"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "invalid_parameter", "exactly one of"),
    ({"response_format": {"type": "structural_tag"}}, "invalid_parameter", "json_schema"),
    ({"guided_regex": "77", "suppress_tokens": SEVENS}, "no_allowed_token", "ban every token"),
    ({"guided_regex": "a" * 70000}, "invalid_parameter", "the limit is 65536"),
)
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_grammar_model(tmp_path_factory.mktemp("model"))


def answers(model, folder, rows, *shape: str) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    files = Files(folder)
    files.input.write_text("".join(json.dumps({"prompt": f"hello {n}", **row}) + "\n" for n, row in enumerate(rows)))
    command = (*COMMAND, *files.options(model, "--max-new-tokens", "120", "--chunk-size", "16", "--quiet", *shape))
    run(command, folder)
    return files.rows()


def test_every_key_gives_outputs_that_match_over_stages_and_replicas(model, tmp_path):
    one = answers(model, tmp_path / "one", KEYS)
    for row in one[:9]:
        assert row["finish_reason"] == "stop", row
    for number in (0, 1, 2, 7):
        jsonschema.validate(json.loads(one[number]["text"]), SCHEMA)
    assert re.fullmatch(r"\d{3}-[a-f]{2,4}", one[3]["text"])
    assert one[4]["text"] in CHOICES and one[6]["text"] in CHOICES
    assert re.fullmatch("<[a-c]{1,3}>", one[5]["text"])
    assert re.fullmatch("[xyz]{4}", one[8]["text"])
    for name, shape in (("two", ("--stages", "2")), ("replicas", ("--replicas", "2", "--stages", "2"))):
        found = answers(model, tmp_path / name, KEYS, *shape)
        assert [row["token_ids"] for row in found] == [row["token_ids"] for row in one], name
    alone = answers(model, tmp_path / "alone", [{**KEYS[10]}] * 11)
    assert alone[10]["token_ids"] == one[10]["token_ids"]


def test_what_is_no_grammar_is_an_error_of_its_row(model, tmp_path):
    rows = [*(row for row, _, _ in REFUSED), {"max_tokens": 2}]
    folder = tmp_path / "refused"
    folder.mkdir()
    files = Files(folder)
    files.input.write_text("".join(json.dumps({"prompt": "hello", **row}) + "\n" for row in rows))
    subprocess.run((*COMMAND, *files.options(model, "--quiet")), cwd=folder, env=environment(), check=False, timeout=90)
    found = files.rows()
    for row, (given, code, words) in zip(found, REFUSED, strict=False):
        assert row["error"]["code"] == code, (given, row)
        assert words in row["error"]["message"], row
    assert len(found[-1]["token_ids"]) == 2


def test_a_python_program_names_grammars_too(model):
    """Parameters go through `asdict` and back, and choices share a grammar."""
    regex = SamplingParams(20, structured_outputs={"regex": "[0-9]{3}"})
    choice = SamplingParams(20, 1.0, n=3, seed=1, structured_outputs={"choice": ["yes", "no\x7f"], "start_after": None})
    copied = SamplingParams(**asdict(regex))
    assert copied == regex
    with LLM(str(model)) as llm:
        first, again, several = llm.generate(["hello"] * 3, [regex, copied, choice])
    assert first.error is None and re.fullmatch("[0-9]{3}", first.outputs[0].text or "")
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert several.error is None and {output.text for output in several.outputs} <= {"yes", "no\x7f"}
