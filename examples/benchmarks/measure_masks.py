"""Measure what a grammar costs: the time of a mask, and the bubble of runs with a JSON schema and without.

    python examples/benchmarks/measure_masks.py --output docs/benchmarks/results/masks.json

Make a Llama with random weights and a byte-level tokenizer of 131,072 tokens. The time of a mask is measured in this
process, after every token of some random outputs. Then runs of `generate` take turns in every round: all rows have a
nested JSON schema, or none has. There are two stages with one compute thread each. All outputs have the same length,
since the schema asks for a longer array. It takes less than 3 minutes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
from awake import awake
from record import Record, spread

from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.drawing.grammar import GrammarThread
from sarathi_pp.stages.tokenizer_files import TokenizerFiles
from sarathi_pp.structured_outputs import StructuredOutputs
from sarathi_pp.text.grammar import grammar_text
from sarathi_pp.trace.clock import SystemClock

VOCABULARY = 131_072
EOS = 0
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "home": {"type": "object", "properties": {"street": {"type": "string"}, "number": {"type": "number"}}},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}
KINDS: dict[str, dict[str, Any]] = {"guided": {"guided_json": SCHEMA}, "unguided": {"ignore_eos": True}}
KEPT = ("total_tokens_per_s", "bubble_ratio", "bubble_ratio_steady", "wall_s")
MASKED_TOKENS = 100


def tokens() -> Iterator[str]:
    """Yield the special token, all bytes, and then random words, numbers and punctuation, some twice."""
    from tokenizers import pre_tokenizers

    draw = random.Random(0)
    yield "</s>"
    yield from sorted(pre_tokenizers.ByteLevel.alphabet())
    yield from (f"{number:03d}" for number in range(1000))
    while True:
        word = "".join(draw.choices("etaoinshrdlcumwfgypbvk", k=draw.randint(2, 9)))
        yield draw.choice(["", "\u0120", "\u0120", '"', "_"]) + word + draw.choice(["", "", "", '"', '":', '",', "."])


def make_model(directory: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary: dict[str, int] = {}
    for token in tokens():
        vocabulary.setdefault(token, len(vocabulary))
        if len(vocabulary) == VOCABULARY:
            break
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def mask_times(directory: Path, outputs: int) -> tuple[float, list[float]]:
    """Return the seconds to load the tokenizer and its vocabulary, and those of each mask of some random outputs."""
    clock, grammars = SystemClock(), GrammarThread(TokenizerFiles(directory))
    start_s = clock.now()
    grammars.warm_up()
    read_s, times, draw = clock.now() - start_s, [], np.random.default_rng(0)
    grammar = grammar_text(StructuredOutputs.read({"json": SCHEMA}))
    rules = DrawRules(num_prompt=1, grammar=grammar, end_token_ids=(EOS,))
    for _ in range(outputs):
        guide = grammars.guide(rules)
        grammars.compute([]).result()  # it is compiled
        for _ in range(MASKED_TOKENS):
            mask = guide.next_mask()
            assert mask is not None, "the grammar begins at once"
            start_s = clock.now()
            mask.compute()  # the grammar thread has nothing to do
            times.append(clock.now() - start_s)
            assert mask.value is not None, "the array goes on"
            allowed = np.flatnonzero(np.unpackbits(mask.value.view(np.uint8), bitorder="little"))
            guide.add(int(draw.choice(allowed)))
    return read_s, times


def run(model: Path, folder: Path, kind: str, rows: int, length: int) -> dict[str, Any]:
    """Return the report of one run."""
    draw, given = random.Random(1), folder / f"{kind}.jsonl"
    prompts = [[draw.randrange(1, VOCABULARY) for _ in range(draw.randint(32, 128))] for _ in range(rows)]
    lines = ({"prompt_token_ids": prompt, "max_new_tokens": length, **KINDS[kind]} for prompt in prompts)
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-P", "-m", "sarathi_pp", "generate", "--model", str(model), "--stages", "2"]
    command += ["--dtype", "float32", "--chunk-size", "512", "--max-num-seqs", "16", "--input", str(given)]
    command += ["--output", str(folder / "out.jsonl"), "--overwrite", "--quiet", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    report: dict[str, Any] = json.loads(printed)
    return report


@click.command()
@click.option("--rows", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--length", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens of each output.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(rows: int, length: int, rounds: int, output: Path | None) -> None:
    record = Record.begin()
    with TemporaryDirectory() as scratch, awake():
        model = Path(scratch) / "model"
        make_model(model)
        read_s, times = mask_times(model, rows)
        reports: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        for number in range(rounds):
            for kind in KINDS:
                report = run(model, Path(scratch), kind, rows, length)
                reports[kind].append(report)
                print(number, kind, *(f"{name} {report[name] or 0:.4g}" for name in KEPT), file=sys.stderr, flush=True)
    median_s, p99_s = np.quantile(times, [0.5, 0.99])
    waits = [sum(stage["mask_s"] or 0.0 for stage in report["per_stage"]) for report in reports["guided"]]
    figures = {
        "vocabulary": VOCABULARY,
        "vocabulary_s": read_s,
        "mask_s": {"median": float(median_s), "p99": float(p99_s), "count": len(times)},
        "waits_s": spread(waits),
        "runs": {
            kind: {name: spread([one[name] for one in of]) for name in KEPT if None not in [one[name] for one in of]}
            for kind, of in reports.items()
        },
    }
    print(json.dumps(record.write(output, {"rows": rows, "length": length, "rounds": rounds, **figures})))


if __name__ == "__main__":
    main()
