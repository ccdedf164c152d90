"""Compare the figures of lm-eval's tasks with those of lm-eval's own `hf` model, which calls transformers.

    bash launch/peers.sh lm-eval
    .peers/lm-eval/bin/python examples/benchmarks/compare_lm_eval.py --model examples/tiny-adder \
        --include-path examples/lm_eval --task sums_choice --task sums_text --task sums_written \
        --output docs/benchmarks/results/lm-eval.json

The document has the figures of each task with both, and the largest difference between answers to the same sample: of
log probabilities, or the number of texts that differ. Both models compute in float32 on CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from record import Record


@click.command()
@click.option("--model", type=click.Path(exists=True), required=True)
@click.option("--task", "tasks", multiple=True, required=True)
@click.option("--include-path", type=click.Path(exists=True), help="Directory with files of tasks.")
@click.option("--stages", type=int, multiple=True, default=(1, 2, 3), show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(
    model: str, tasks: tuple[str, ...], include_path: str | None, stages: tuple[int, ...], output: Path | None
) -> None:
    from lm_eval import simple_evaluate  # not in the environment in which this file is checked
    from lm_eval.tasks import TaskManager

    from sarathi_pp.lm_eval.model import SarathiLM

    record = Record.begin()
    arguments = {"pretrained": model, "dtype": "float32"}
    manager = TaskManager(include_path=include_path)
    common = {"tasks": list(tasks), "task_manager": manager, "device": "cpu", "log_samples": True}
    theirs = simple_evaluate(model="hf", model_args=arguments, **common)
    found: dict[str, Any] = {"hf": _figures(theirs)}
    for number in stages:
        ours = SarathiLM(model, device="cpu", dtype="float32", stages=number)
        results = simple_evaluate(model=ours, **common)
        ours.llm.close()
        found[f"{number} stages"] = {**_figures(results), "differences": _differences(theirs, results)}
    print(json.dumps(record.write(output, {"model": model, "results": found}), indent=1))


def _figures(results: Mapping[str, Any]) -> dict[str, Any]:
    return {
        task: {name.removesuffix(",none"): value for name, value in figures.items() if isinstance(value, float)}
        for task, figures in results["results"].items()
    }


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return for each task the number of answers, and how they differ."""
    found = {}
    for task, samples in theirs["samples"].items():
        pairs = [pair for both in zip(samples, ours["samples"][task], strict=True) for pair in _answers(*both)]
        numbers = [(one, other) for one, other in pairs if not isinstance(one, str)]
        found[task] = {
            "answers": len(pairs),
            "largest difference": max((abs(one[0] - other[0]) for one, other in numbers), default=0.0),
            "other choice of greedy decoding": sum(one[1:] != other[1:] for one, other in numbers),
            "other text": sum(one != other for one, other in pairs if isinstance(one, str)),
        }
    return found


def _answers(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the answers to the requests of one sample: a text, or a list that begins with a log probability."""
    return [(_answer(one), _answer(other)) for one, other in zip(theirs["resps"], ours["resps"], strict=True)]


def _answer(responses: Sequence[Any]) -> Any:
    (response,) = responses
    return response if isinstance(response, str) else [response] if isinstance(response, float) else list(response)


if __name__ == "__main__":
    main()
