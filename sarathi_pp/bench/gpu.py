"""Everything that a GPU runs, checked and measured on one: `sarathi-pp bench gpu`.

    machine -> rates -> exact -> logits -> microbatches -> piggyback -> attention -> profile -> contest

Each part is a function of its own and leaves its figures, or the error that ended it, in one document; what a part
promises is a check with what was wanted and what was seen. A part that there is no time left for says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

import sarathi_pp
from sarathi_pp.bench.gpu_stage import LLAMA_3_8B, Extents, GpuStage, ModelShape, attention_call, seconds
from sarathi_pp.core.estimate import DeviceSpeed, estimate_cost
from sarathi_pp.errors import ConfigError
from sarathi_pp.model.attention import BACKENDS, Needs, choose_backend
from sarathi_pp.runtime.place import inherited
from sarathi_pp.trace.clock import Clock

SCHEMA = "sarathi-pp/gpu/1"

Say = Callable[[str], None]
Figures = dict[str, Any]

# What is promised of a GPU.
_PREFILL_SHARE, _DECODE_SHARE, _PIGGYBACK_FACTOR, _ATTENTION_SHARE, _CONTEST_FACTOR = 0.6, 0.7, 10.0, 0.8, 2.0
# Of one layer's attention.
_SHAPES: dict[str, Extents] = {
    "chunk 512 at 0": ((0, 512),),
    "chunk 512 at 4096": ((4096, 512),),
    "64 decodes at 1024": ((1024, 1),) * 64,
    "4 decodes at 8000": ((8000, 1),) * 4,
    "chunk 448 at 1024, 64 decodes at 512": ((1024, 448), *(((512, 1),) * 64)),
}
_COMMAND = (sys.executable, "-P", "-m", "sarathi_pp", "generate", "--ignore-eos", "--quiet")
# What cannot be told from it costs this.
_NOTHING_S = 1e-7
_NEW_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Sizes:
    """large: what is timed. small: what is compared with transformers. rows: prompts of that comparison.

    middle: what answers `requests` mixed requests, with up to `longest` tokens of prompt, here and in transformers.
    prefill: tokens of a microbatch. decodes: of another, each behind `context` tokens. chunk: tokens of those in which
    decodes ride along, the numbers `piggybacked`. attention: sequences of a microbatch, by what it is called.
    """

    large: ModelShape = LLAMA_3_8B
    small: ModelShape = ModelShape(512, 1536, 4, 8, 4, 2048)
    middle: ModelShape = ModelShape(2048, 8192, 16, 32, 8, 128256)
    rows: int = 12
    requests: int = 64
    longest: int = 1024
    matrix: int = 8192
    array_bytes: int = 4 << 30
    prefill: int = 2048
    decodes: int = 64
    context: int = 1024
    chunk: int = 512
    piggybacked: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    attention: Mapping[str, Extents] = field(default_factory=lambda: _SHAPES)
    repeats: int = 20

    @property
    def kv_tokens(self) -> int:
        """What the microbatches take, at pages of any backend's size."""
        return self.decodes * (self.context + 256)


@dataclass(slots=True)
class Bench:
    """device: where. dtype: of what is timed. say: told of each part. checks: of all parts so far."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    clock: Clock
    end_s: float
    say: Say
    checks: list[Figures] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    stage: GpuStage | None = None

    def check(self, what: str, seen: float | bool, wanted: float | bool) -> None:
        """wanted: the least that is to be seen."""
        self.checks.append({"what": what, "seen": seen, "wanted": wanted, "met": seen >= wanted})

    def large(self) -> GpuStage:
        """Made when the first part asks."""
        if self.stage is None:
            self.stage = GpuStage(self.sizes.large, self.dtype, self.device, self.sizes.kv_tokens)
        return self.stage


def bench_gpu(device: torch.device, clock: Clock, budget_s: float, say: Say, sizes: Sizes | None = None) -> Figures:
    """The document. Raises ConfigError where there is no such device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench gpu: torch finds no CUDA device here")
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    bench = Bench(device, dtype, sizes or Sizes(), clock, clock.now() + budget_s, say)
    begin_s = clock.now()
    document: Figures = {"schema": SCHEMA, "machine": _machine(device)}
    for part in (_rates, _exact, _logits, _microbatches, _piggyback, _attention, _profile, _contest):
        name = part.__name__.removeprefix("_")
        if clock.now() > bench.end_s:
            document[name] = {"left_out": f"the {budget_s:g} s were over"}
            continue
        say(name)
        part_begin_s = clock.now()
        try:
            document[name] = part(bench)
        except Exception as error:  # the other parts are measured all the same, and this one's error is a result
            document[name] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            bench.check(f"{name} runs", False, True)
        document[name]["took_s"] = clock.now() - part_begin_s
    return {**document, "checks": bench.checks, "took_s": clock.now() - begin_s}


def _machine(device: torch.device) -> Figures:
    found: Figures = {"device": "cpu", "sarathi_pp": sarathi_pp.__version__, "torch": torch.__version__}
    for name in ("transformers", "triton", "flash_attn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "processors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    found["attention"] = {name: _why_not(name, device) for name in BACKENDS}
    return found


def _why_not(name: str, device: torch.device) -> str | None:
    try:
        choose_backend(name, device, None)
    except ConfigError as error:
        return str(error)
    return None


def _rates(bench: Bench) -> Figures:
    """What the device sustains: large products in the dtype, and reading memory."""
    size, device = bench.sizes.matrix, bench.device
    left, right = (torch.randn(size, size, device=device, dtype=bench.dtype) for _ in range(2))
    (product_s,) = seconds(device, lambda: functional.linear(left, right), repeats=bench.sizes.repeats)
    array = torch.ones(bench.sizes.array_bytes // 4, device=device)
    (read_s,) = seconds(device, array.sum, repeats=bench.sizes.repeats)
    bench.rates = {"flops": 2 * size**3 / product_s, "bytes_per_s": bench.sizes.array_bytes / read_s}
    return dict(bench.rates)


def _exact(bench: Bench) -> Figures:
    """Greedy tokens of whole pipelines in float32 against transformers, on the same device."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = _write_small(bench.sizes.small, folder / "model").to(bench.device)
        prompts = [
            [(13 * row + 7 * place) % 2000 + 3 for place in range(5 + 23 * row)] for row in range(bench.sizes.rows)
        ]
        expected = [_greedy(model, prompt, bench.device) for prompt in prompts]
        del model
        lines = [json.dumps({"prompt_token_ids": prompt}) for prompt in prompts]
        (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
        runs = []
        for stages, options in _pipelines(bench.device):
            runs.append(
                {"stages": stages, "options": options, **_generate(folder, bench.device, stages, options, expected)}
            )
            same = runs[-1]["rows_equal"] == len(prompts)
            bench.check(f"{stages} stages {' '.join(options)}: tokens equal transformers'", same, True)
    return {"rows": len(prompts), "new_tokens": _NEW_TOKENS, "runs": runs}


def _pipelines(device: torch.device) -> list[tuple[int, list[str]]]:
    if device.type == "cpu":
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
    # Larger than usual, so that one token is far likelier than the next: rounding decides nothing.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return model.eval()


@torch.inference_mode()
def _greedy(model: Any, prompt: Sequence[int], device: torch.device) -> list[int]:
    ids = torch.tensor([prompt], device=device)
    out = model.generate(ids, max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=0)
    return [int(token) for token in out[0, len(prompt) :]]


def _generate(
    folder: Path, device: torch.device, stages: int, options: list[str], expected: list[list[int]]
) -> Figures:
    output = folder / f"out-{stages}-{'-'.join(options).replace('--', '')}.jsonl"
    # Little KV: the ranks share one device, and what they need is known.
    more = ["--dtype", "float32", "--max-new-tokens", str(_NEW_TOKENS), "--chunk-size", "64"]
    more += ["--kv-cache-memory", "256MiB", "--stages", str(stages), *options]
    done = _run([*_COMMAND, *_files(folder, output), "--device", device.type, *more])
    if done.returncode:
        return {"rows_equal": 0, "exit_code": done.returncode, "said": done.stderr[-2000:]}
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


def _logits(bench: Bench) -> Figures:
    """Of a small model in half precision, by each backend: how far from float32, beside transformers' own distance."""
    shape, dtype = bench.sizes.small, torch.bfloat16
    needs = Needs(dtype, shape.head_dim, softcap=False, sinks=False)
    extents: Extents = [(0, 100)]
    ids = [(7 * position + 3) % shape.vocab_size for position in range(100)]
    exact = GpuStage(shape, torch.float32, bench.device, 512, "sdpa").microbatch(extents)()
    torch.manual_seed(0)
    with torch.device(bench.device):
        theirs = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype)
    with torch.inference_mode():
        found = theirs(torch.tensor([ids], device=bench.device)).logits[0, -1:]

    def distance(logits: torch.Tensor) -> float:
        return float((logits.float() - exact.float()).norm() / exact.float().norm())

    figures: Figures = {"transformers": distance(found)}
    for name in BACKENDS:
        try:
            choose_backend(name, bench.device, None, needs)
        except ConfigError:
            continue
        figures[name] = distance(GpuStage(shape, dtype, bench.device, 512, name).microbatch(extents)())
        bench.check(f"{name}: nearer to float32 than transformers by", figures["transformers"] / figures[name], 0.5)
    return figures


def _microbatches(bench: Bench) -> Figures:
    """A prompt chunk against the products' rate, and decodes against the rate of reading."""
    stage, sizes = bench.large(), bench.sizes
    shape = sizes.large
    prefill: Extents = [(0, sizes.prefill)]
    decodes: Extents = [(sizes.context, 1)] * sizes.decodes
    calls = [stage.microbatch(prefill), stage.microbatch(decodes)]
    if bench.device.type == "cuda":
        calls.append(stage.captured(decodes))
    taken = seconds(bench.device, *calls, repeats=bench.sizes.repeats)
    figures: Figures = {
        "prefill": {"tokens": sizes.prefill, "s": taken[0]},
        "decode": {
            "decodes": sizes.decodes,
            "context": sizes.context,
            "eager_s": taken[1],
            "graph_s": (taken + [None])[2],
        },
    }
    share = shape.flops(prefill, 1) / taken[0] / bench.rates["flops"]
    read = shape.read_bytes(decodes, bench.dtype.itemsize) / min(taken[1:]) / bench.rates["bytes_per_s"]
    figures["prefill"]["share_of_flops"], figures["decode"]["share_of_bandwidth"] = share, read
    bench.check(f"{sizes.prefill} prompt tokens: share of the products' rate", share, _PREFILL_SHARE)
    bench.check(f"{sizes.decodes} decodes: share of the rate of reading", read, _DECODE_SHARE)
    return figures


def _piggyback(bench: Bench) -> Figures:
    """What a decode costs beside a chunk that it fills up to its size, and in a microbatch of decodes (SARATHI 3)."""
    stage, sizes, curve = bench.large(), bench.sizes, []
    for count in sizes.piggybacked:
        decodes: Extents = [(sizes.context, 1)] * count
        chunk: Extents = [(0, sizes.chunk - count)]
        alone_s, chunk_s, both_s = seconds(
            bench.device,
            stage.microbatch(decodes),
            stage.microbatch(chunk),
            stage.microbatch([*chunk, *decodes]),
            repeats=bench.sizes.repeats,
        )
        cost_s = max((both_s - chunk_s) / count, _NOTHING_S)
        saved = alone_s / count / cost_s
        curve.append({"decodes": count, "alone_s": alone_s, "chunk_s": chunk_s, "both_s": both_s, "factor": saved})
        if count <= 8:
            bench.check(f"{count} decodes beside a chunk cost less by", saved, _PIGGYBACK_FACTOR)
    return {"chunk": sizes.chunk, "context": sizes.context, "curve": curve}


def _attention(bench: Bench) -> Figures:
    """One layer's attention by every backend that runs, each over the pages that it takes."""
    shapes = bench.sizes.attention
    needs = Needs(bench.dtype, bench.sizes.large.head_dim, softcap=False, sinks=False)
    bench.stage = None  # its weights are not needed here, and each backend has pages of its own
    torch.cuda.empty_cache()
    layer = ModelShape(**{**asdict(bench.sizes.large), "num_layers": 1})
    taken: dict[str, dict[str, float]] = {name: {} for name in shapes}
    for name in BACKENDS:
        try:
            backend = choose_backend(name, bench.device, None, needs)
        except ConfigError:
            continue
        stage = GpuStage(layer, bench.dtype, bench.device, bench.sizes.kv_tokens, name)
        for what, extents in shapes.items():
            (taken[what][name],) = seconds(bench.device, attention_call(backend, stage, extents), repeats=bench.sizes.repeats)
    for what, by_name in taken.items():
        if "triton" in by_name:
            share = min(by_name.values()) / by_name["triton"]
            bench.check(f"{what}: Triton beside the best backend", share, _ATTENTION_SHARE)
    return {"s": taken}


def _profile(bench: Bench) -> Figures:
    """What `simulate` needs of this device: its speed as measured, and what that makes of the large model's stages."""
    shape = bench.sizes.large
    itemsize = bench.dtype.itemsize
    # Shares that the parts before have measured; those of estimates where they have failed.
    met = {check["what"]: check["seen"] for check in bench.checks}
    product_share = met.get(f"{bench.sizes.prefill} prompt tokens: share of the products' rate", _PREFILL_SHARE)
    read_share = met.get(f"{bench.sizes.decodes} decodes: share of the rate of reading", _DECODE_SHARE)
    speed = DeviceSpeed(
        {itemsize: product_share * bench.rates["flops"], 2: product_share * bench.rates["flops"]},
        read_share * bench.rates["bytes_per_s"],
        tile=128 if bench.device.type == "cuda" else 1,
        layer_s=0.0,  # inside of both shares
    )
    cost = estimate_cost(
        [(0, shape.num_layers)],
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        weight_bytes=itemsize,
        speed=speed,
    )
    return {
        "flops": speed.flops[2],
        "bytes_per_s": speed.bytes_per_s,
        "tile": speed.tile,
        "stages": [asdict(stage) for stage in cost.stages],
    }


def _contest(bench: Bench) -> Figures:
    """Mixed requests, greedy and to their length, here and by transformers' continuous batching, on the same model."""
    bench.stage = None
    torch.cuda.empty_cache()
    dtype = str(bench.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with torch.device(bench.device):
            model = AutoModelForCausalLM.from_config(bench.sizes.middle.config(), dtype=bench.dtype)
        model.save_pretrained(folder / "model")
        vocabulary = bench.sizes.middle.vocab_size
        del model
        torch.cuda.empty_cache()
        requests: list[Figures] = []
        for row in range(bench.sizes.requests):
            length = bench.sizes.longest // 16 + (row * 37) % (bench.sizes.longest * 15 // 16)
            prompt = [(13 * row + 7 * place) % (vocabulary - 3) + 3 for place in range(length)]
            requests.append({"prompt_token_ids": prompt, "output_tokens": 16 + (row * 29) % 112})
        lines = [{"prompt_token_ids": one["prompt_token_ids"], "max_tokens": one["output_tokens"]} for one in requests]
        (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        output = folder / "out.jsonl"
        ours = _run([*_COMMAND, *_files(folder, output), "--device", bench.device.type, "--dtype", dtype])
        if ours.returncode:
            raise RuntimeError(f"generate ended with {ours.returncode}: {ours.stderr[-2000:]}")
        report = json.loads(Path(f"{output}.run/report.json").read_text())
        asked = {"model": str(folder / "model"), "dtype": dtype, "device": bench.device.type, "requests": requests}
        (folder / "asked.json").write_text(json.dumps({**asked, "parameters": {"batching": "continuous", "pp": 1}}))
        program = Path(__file__).with_name("peers") / "transformers_program.py"
        theirs = _run([sys.executable, "-P", str(program), str(folder / "asked.json")])
        if theirs.returncode:
            raise RuntimeError(
                f"generate_batch, after {report['total_tokens_per_s']:.0f} of ours: {theirs.stderr[-2000:]}"
            )
        wall_s = json.loads(theirs.stdout.splitlines()[-1])["wall_s"]
    tokens = sum(len(one["prompt_token_ids"]) + one["output_tokens"] for one in requests)
    factor = report["total_tokens_per_s"] / (tokens / wall_s)
    bench.check(f"{len(requests)} requests: tokens a second, times generate_batch's", factor, _CONTEST_FACTOR)
    hits = [stage["graph_hit_rate"] for stage in report["per_stage"]]
    rates = {"ours": report["total_tokens_per_s"], "generate_batch": tokens / wall_s}
    return {"requests": len(requests), "tokens": tokens, **rates, "factor": factor, "graph_hit_rate": hits}


def _files(folder: Path, output: Path) -> tuple[str, ...]:
    return ("--model", str(folder / "model"), "--input", str(folder / "in.jsonl"), "--output", str(output))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = inherited({"HF_HUB_OFFLINE": "1"})
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
