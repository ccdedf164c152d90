"""Whole pipelines on a GPU, as a user starts them, compared with transformers: their tokens and their speed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from sarathi_pp.bench.family import family
from sarathi_pp.bench.gpu.document import Figures
from sarathi_pp.bench.gpu.plan import CONTEST_FACTOR, Bench, OutOfTimeError
from sarathi_pp.bench.gpu.stage import ModelShape
from sarathi_pp.distributed.environment import inherited

_COMMAND = (sys.executable, "-P", "-m", "sarathi_pp", "generate", "--ignore-eos", "--quiet")
_NEW_TOKENS = 24
# Least difference between the two best logits. If it is smaller, rounding may decide, and the token proves nothing.
_LEAST_GAP = 1e-3
# Most seconds of one pipeline, so that one that hangs leaves time for the next ones.
_MOST_S = 60.0
# Most seconds per side of the contest.
_CONTEST_S = 95.0
# A run is repeated with another option if this many times its seconds are left.
_SPARE = 2.0


def exact(bench: Bench, figures: Figures) -> None:
    """Compare greedy float32 tokens of whole pipelines with those of transformers, on the same device.

    Raises:
        OutOfTimeError: a pipeline had not enough time. It has no check, and the pipelines after it do not run.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = _write_small(bench.sizes.small, folder / "model").to(bench.device)
        drawn = [[(13 * row + 7 * at) % 2000 + 3 for at in range(5 + 23 * row)] for row in range(bench.sizes.rows)]
        answered = [(prompt, *_greedy(model, prompt, bench.device)) for prompt in drawn]
        del model
        expected = [(prompt, tokens) for prompt, tokens, gap in answered if gap >= _LEAST_GAP]
        runs: list[Figures] = []
        smallest = min(gap for _, _, gap in answered)
        figures |= {"rows": len(expected), "near_ties": len(drawn) - len(expected), "smallest_gap": smallest}
        figures |= {"new_tokens": _NEW_TOKENS, "runs": runs}
        lines = [json.dumps({"prompt_token_ids": prompt}) for prompt, _ in expected]
        (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
        for stages, options in _pipelines(bench):
            run: Figures = {"stages": stages, "options": options}
            runs.append(run)
            try:
                run |= _generate(bench, folder, stages, options, [tokens for _, tokens in expected])
            except OutOfTimeError as error:
                run["left_out"] = str(error)
                raise
            same = run["rows_equal"] == len(expected) > 0
            bench.check(f"{stages} stages {' '.join(options)}: tokens equal transformers'", same, True)


def _pipelines(bench: Bench) -> list[tuple[int, list[str]]]:
    if not bench.on_gpu:
        return [(2, ["--attention", "sdpa"])]
    return [
        (1, ["--attention", "sdpa", "--enforce-eager"]),
        (1, ["--attention", "triton", "--enforce-eager"]),
        (1, ["--attention", "triton"]),
        (2, ["--attention", "triton"]),
        (4, ["--attention", "triton"]),
    ]


def _write_small(shape: ModelShape, folder: Path) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape.config(tie_word_embeddings=False), dtype=torch.float32)
    # Larger weights than usual, so that each layer changes the logits.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return model.eval()


@torch.inference_mode()
def _greedy(model: Any, prompt: Sequence[int], device: torch.device) -> tuple[list[int], float]:
    """Return the output tokens of transformers, and the smallest difference between the two best logits of a token."""
    settings = {"max_new_tokens": _NEW_TOKENS, "eos_token_id": None, "do_sample": False, "pad_token_id": 0}
    outputs = {"return_dict_in_generate": True, "output_logits": True}
    found = model.generate(torch.tensor([prompt], device=device), **settings, **outputs)
    best = torch.stack([logits[0] for logits in found.logits]).float().topk(2).values
    return found.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def _generate(bench: Bench, folder: Path, stages: int, options: list[str], expected: list[list[int]]) -> Figures:
    output = folder / f"out-{stages}-{'-'.join(options).replace('--', '')}.jsonl"
    # A small KV cache: the ranks share one device, and the lengths are known.
    more = ["--dtype", "float32", "--max-new-tokens", str(_NEW_TOKENS), "--chunk-size", "64", "--max-num-seqs", "16"]
    more += ["--kv-cache-memory", "256MiB", "--stages", str(stages), *options]
    try:
        _run(bench, [*_COMMAND, *_files(folder, output), "--device", bench.device.type, *more], folder, _MOST_S)
    except OutOfTimeError:
        raise
    except RuntimeError as error:
        return {"rows_equal": 0, "said": str(error)}
    answers = {int(row["id"]): row["token_ids"] for row in map(json.loads, output.read_text().splitlines())}
    report = json.loads(Path(f"{output}.run/report.json").read_text())
    run = json.loads(Path(f"{output}.run/run.json").read_text())
    return {
        "rows_equal": sum(answers.get(row + 1) == tokens for row, tokens in enumerate(expected)),
        "attention": run["attention"],
        "transport": run["transport"],
        "graph_hit_rate": [stage["graph_hit_rate"] for stage in report["per_stage"]],
        "closing_error": report["closing_error"],
    }


def contest(bench: Bench, figures: Figures) -> None:
    """Compare the speed of one pipeline with that of transformers' continuous batching.

    Both get the same model and requests of mixed lengths, decode greedily, and ignore the end-of-sequence token.
    """
    sizes, dtype = bench.sizes, str(bench.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with torch.device(bench.device):
            model = AutoModelForCausalLM.from_config(sizes.middle.config(), dtype=bench.dtype)
        model.save_pretrained(folder / "model")
        del model
        bench.forget()
        requests = _mixed(sizes.requests, sizes.longest, sizes.middle.vocab_size)
        lines = [{"prompt_token_ids": one["prompt_token_ids"], "max_tokens": one["output_tokens"]} for one in requests]
        (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        device = bench.device.type
        serving = ("--device", device, "--dtype", dtype, *sizes.serving)
        begin_s = bench.clock.now()
        report = _serve(bench, folder, "out.jsonl", serving)
        took_s = bench.clock.now() - begin_s
        tokens = sum(len(one["prompt_token_ids"]) + one["output_tokens"] for one in requests)
        hits = [stage["graph_hit_rate"] for stage in report["per_stage"]]
        figures |= {"requests": len(requests), "tokens": tokens, "ours": report["total_tokens_per_s"]}
        figures |= {"graph_hit_rate": hits, "bubble_ratio": report["bubble_ratio"]}
        bench.save()
        asked = {"model": str(folder / "model"), "dtype": dtype, "device": device, "requests": requests}
        (folder / "asked.json").write_text(json.dumps({**asked, "parameters": {"batching": "continuous", "pp": 1}}))
        program = Path(__file__).parents[1] / "peers" / "transformers_program.py"
        said = _run(bench, [sys.executable, "-P", str(program), str(folder / "asked.json")], folder, _CONTEST_S)
        theirs = json.loads(said.splitlines()[-1])
        figures |= {"generate_batch": tokens / theirs["wall_s"], "their_attention": theirs["attention"]}
        figures["factor"] = figures["ours"] / figures["generate_batch"]
        what = f"{len(requests)} requests: tokens per second, relative to generate_batch"
        bench.check(what, figures["factor"], CONTEST_FACTOR)
        bench.save()
        if bench.end_s - bench.clock.now() > _SPARE * took_s:
            # Each microbatch is issued after the tokens of the one before are known.
            report = _serve(bench, folder, "waited.jsonl", (*serving, "--inflight", "1"))
            figures |= {"not_ahead": report["total_tokens_per_s"], "not_ahead_bubble_ratio": report["bubble_ratio"]}


def _serve(bench: Bench, folder: Path, name: str, options: Sequence[str]) -> Figures:
    """Answer the requests in the folder with our pipeline, and return the report."""
    output = folder / name
    _run(bench, [*_COMMAND, *_files(folder, output), *options], folder, _CONTEST_S)
    report: Figures = json.loads(Path(f"{output}.run/report.json").read_text())
    return report


def _mixed(count: int, longest: int, vocabulary: int) -> list[Figures]:
    requests: list[Figures] = []
    for row in range(count):
        length = longest // 16 + (row * 37) % (longest * 15 // 16)
        prompt = [(13 * row + 7 * place) % (vocabulary - 3) + 3 for place in range(length)]
        requests.append({"prompt_token_ids": prompt, "output_tokens": 16 + (row * 29) % 112})
    return requests


def _files(folder: Path, output: Path) -> tuple[str, ...]:
    return ("--model", str(folder / "model"), "--input", str(folder / "in.jsonl"), "--output", str(output))


def _run(bench: Bench, command: Sequence[str], folder: Path, most_s: float) -> str:
    """Run a command and return its standard output.

    Args:
        folder: for the files of its standard output and its standard error.
        most_s: seconds after which it is killed.

    Raises:
        OutOfTimeError: the time of the part was over before `most_s`.
        RuntimeError: the command failed or took too long. The message has the end of its standard error.
    """
    environment = inherited({"HF_HUB_OFFLINE": "1"})
    left_s = max(bench.end_s - bench.clock.now(), 1.0)
    printed, said = folder / "printed", folder / "said"
    with printed.open("wb") as out, said.open("wb") as error, family(command, environment, out, error) as process:
        try:
            code = process.wait(min(most_s, left_s))
        except subprocess.TimeoutExpired:
            if left_s < most_s:
                why = f"the time of the part was over after {left_s:.0f} s of this run: {_end_of(said)}"
                raise OutOfTimeError(why) from None
            raise RuntimeError(f"still running after {most_s:.0f} s: {_end_of(said)}") from None
    if code:
        raise RuntimeError(f"ended with code {code}: {_end_of(said)}")
    return printed.read_text()


def _end_of(path: Path) -> str:
    return path.read_text(errors="replace")[-2000:]
