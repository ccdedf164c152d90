"""The public interface: the names of the package, the commands and the options. Changing them is a decision."""

from __future__ import annotations

import ast
from pathlib import Path

import click

import sarathi_pp
from sarathi_pp.cli.generate import generate
from sarathi_pp.cli.main import cli

ROOT = Path(__file__).parents[2]

NAMES = ["LLM", "CompletionOutput", "RequestOutput", "RowError", "RunConfig", "SamplingParams", "SarathiError"]
COMMANDS = {"bench", "generate", "report", "compare", "simulate", "profile", "plan", "doctor", "check"}
GENERATE_OPTIONS = {
    *("--model", "--input", "-i", "--input-format", "--output", "-o", "--run-dir", "--overwrite"),
    *("--stages", "--pipeline-parallel-size", "--pp-size", "--layer-split"),
    *("--replicas", "--data-parallel-size", "--tensor-parallel-size", "--tp-size"),
    *("--policy", "--chunk-size", "--max-num-batched-tokens", "--max-num-seqs", "--inflight", "--prefix-cache"),
    *("--max-new-tokens", "--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--stop", "--ignore-eos"),
    *("--min-new-tokens", "--min-tokens", "--stop-token-ids", "--include-stop-str-in-output", "--bad-words"),
    *("--presence-penalty", "--frequency-penalty", "--repetition-penalty", "--no-repeat-ngram-size", "--logprobs"),
    *("--prompt-logprobs", "--logprobs-from", "--n"),
    "--override-generation-config",
    "--default-chat-template-kwargs",
    *(
        "--seed",
        "--request-rate",
        "--order",
        "--order-window",
        "--prefix-cache",
        "--tbt-slo",
        "--dtype",
        "--weights",
        "--device",
        "--attention",
        "--max-model-len",
    ),
    *("--kv-cache-memory", "--kv-cache-dtype", "--gpu-memory-utilization", "--page-size", "--block-size"),
    *("--peer-timeout", "--join-timeout"),
    *("--json", "--quiet", "-q", "--emulate", "--metrics-port", "--profile"),
    *(
        "--resume",
        "--retry-errors",
        "--force",
        "--max-restarts",
        "--strict",
        "--verify",
        "--debug-nan",
        "--enforce-eager",
        "--head",
        "--transport",
    ),
}


def test_the_public_names() -> None:
    assert sarathi_pp.__all__ == NAMES


def test_names_that_load_torch_on_first_use_are_really_there() -> None:
    """The sources are read, not imported: these tests stay free of torch."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "sarathi_pp" / "api").glob("*.py")]
    defined = {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    assert {name for name in NAMES if name not in vars(sarathi_pp)} - {"LLM"} <= defined
    assert "LLM" in defined


def test_the_commands() -> None:
    context = click.Context(cli)
    assert {*cli.list_commands(context)} == COMMANDS
    assert all(cli.get_command(context, name) is not None for name in COMMANDS)
    assert cli.get_command(context, "generat") is None


def test_the_options_of_generate() -> None:
    found = {name for option in generate.params for name in (*option.opts, *option.secondary_opts)}
    assert found == GENERATE_OPTIONS
