"""A process that runs parts of `bench gpu`, one after the other. suite.py starts and watches it.

    python -P -m sarathi_pp.bench.gpu.worker REQUEST.json

Each part gets a file next to the request as soon as it begins. The process ends after a part with an error,
because an error of the device stays until its process ends.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from sarathi_pp.bench.gpu import device as of_device
from sarathi_pp.bench.gpu.attention import attention, logits
from sarathi_pp.bench.gpu.document import Figures
from sarathi_pp.bench.gpu.microbatches import kernels, microbatches, piggyback, sampling
from sarathi_pp.bench.gpu.pipelines import contest, exact
from sarathi_pp.bench.gpu.plan import Bench, OutOfTimeError, Sizes
from sarathi_pp.bench.gpu.tiles import tiles
from sarathi_pp.trace.clock import SystemClock

# Seconds that a part has to report after the end of its own commands, before its process is killed.
_REPORT_S = 3.0
PARTS: dict[str, Callable[[Bench, Figures], None]] = {
    "machine": of_device.machine,
    "rates": of_device.rates,
    "exact": exact,
    "microbatches": microbatches,
    "piggyback": piggyback,
    "kernels": kernels,
    "attention": attention,
    "sampling": sampling,
    "logits": logits,
    "tiles": tiles,
    "profile": of_device.profile,
    "nccl": of_device.nccl,
    "contest": contest,
}


def main(path: Path) -> None:
    """Run the parts of the request in a file.

    The request has the `device`, the `sizes` or None, the figures of the `parts` so far, the `limits` in seconds of the
    parts to run, by name, and `end_s`, the time at which all must have ended.
    """
    request = json.loads(path.read_text())
    bench = make_bench(torch.device(request["device"]), request["sizes"])
    bench.parts, bench.folder = request["parts"], path.parent
    run_parts(bench, request["limits"], request["end_s"])


def make_bench(device: torch.device, sizes: Figures | None) -> Bench:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Bench(device, dtype, Sizes.from_json(sizes) if sizes else Sizes(), SystemClock())


def run_parts(bench: Bench, limits: dict[str, float], end_s: float) -> None:
    """Run parts in this process until one of them has an error.

    Args:
        limits: most seconds per part, by name.
        end_s: time at which all parts must have ended, on the bench's clock.
    """
    for name, limit_s in limits.items():
        begin_s = bench.clock.now()
        bench.begin(name, min(begin_s + limit_s, end_s) - _REPORT_S)
        try:
            PARTS[name](bench, bench.figures)
        except OutOfTimeError as error:
            bench.figures["left_out"] = str(error)
        except Exception as error:  # an error is a result
            bench.figures |= {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            bench.check(f"{name} runs", False, True)
        bench.figures["took_s"] = bench.clock.now() - begin_s
        bench.save(ended=True)
        if "error" in bench.figures:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
