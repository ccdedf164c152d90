"""Grammars that are meant to take for ever, or to end the process: the keys of one input line each."""

from __future__ import annotations

from functools import reduce
from typing import Any

NESTED: dict[str, Any] = reduce(lambda inner, _: {"type": "array", "items": inner}, range(50), {"type": "null"})
WIDE = {"anyOf": [{"const": f"{number}"} for number in range(3000)]}
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
TREE = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 2}}}
# The library follows both by nested calls. They need more than the usual stack of a thread.
CHAIN = "start: r0\n" + "".join(f"r{number}: r{number + 1}\n" for number in range(4000)) + 'r4000: "a"'
CHAINED = {
    "$ref": "#/$defs/0",
    "$defs": {
        **{f"{number}": {"type": "array", "items": {"$ref": f"#/$defs/{number + 1}"}} for number in range(900)},
        "900": {"type": "null"},
    },
}
HOSTILE: tuple[dict[str, Any], ...] = (
    {"guided_regex": "(((a{1,100}){1,100}){1,100}){1,100}"},
    {"guided_regex": "(x+x+)+y"},
    {"guided_regex": "(a|b|ab)*(c|abc){50}[^a]{1000}(.*a.{20})"},
    {"guided_regex": "(.*a){20}.{100}"},
    {"guided_regex": "[a&&b]"},
    {"guided_grammar": "start: start"},
    {"guided_grammar": 'start: start start | "a"'},
    {"guided_grammar": "start: a*\na: b*\nb: c*\nc:"},
    {"guided_grammar": 'start: (("a"?)*)*'},
    {"guided_grammar": 'start: "a"{1000000000}'},
    {"guided_grammar": CHAIN},
    {"guided_json": CHAINED},
    {"guided_json": NESTED},
    {"guided_json": WIDE},
    {"guided_json": LOOP},
    {"guided_json": TREE},
    {"guided_json": {"type": "string", "minLength": 10**9}},
    {"guided_json": {"type": "string", "pattern": "^(a+)+$", "minLength": 5000}},
    {"guided_json": {"type": "integer", "minimum": 5, "maximum": 4}},
    {"guided_json": {"type": "number", "multipleOf": 1e-300}},
    {"guided_json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    {"guided_json": {"$ref": "https://example.com/schema.json"}},
    {"guided_json": {"type": "array", "uniqueItems": True, "minItems": 10**6}},
)
