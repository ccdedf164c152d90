"""Names of states, causes and latencies, the same in the terminal, on the pages and in the docs.

A name is its key in a report, without the unit: `recv_wait_s` is "recv wait". One name differs: the cause `host_s` is
"host delay", because a state has the name "host".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The states of a stage: it computes, or it is idle for one of four reasons.
STATES = {
    "compute_s": "the stage computes a microbatch",
    "recv_wait_s": "a microbatch is issued, and its input has not arrived",
    "send_wait_s": "no send buffer is free",
    "host_s": "the input is here, and Python has not started it yet",
    "no_work_s": "no microbatch is issued",
}
CAUSES = {
    "ramp_s": "the pipeline fills and drains",
    "prefill_variance_s": "prompt chunks of unequal time follow each other",
    "prefill_decode_s": "microbatches with and without prompt chunks follow each other",
    "decode_context_s": "decodes read KV of unequal length",
    "stage_imbalance_s": "stages take unequal time for the same microbatch",
    "communication_s": "activations and tokens travel",
    "host_s": "inputs wait for the host to start them",
    "starvation_s": "nothing can be issued",
    "unexplained_s": "measured beyond what the model of the run accounts for",
}
# If the fitted cost model is off by more than this share on average, the causes are only rough.
_ROUGH_FIT = 0.2
LATENCIES = {
    "ttft_s": "time to the first token",
    "tpot_s": "time per output token after the first",
    "itl_s": "gap between neighbouring tokens",
    "e2el_s": "time to the last token",
}


def name_of(key: str) -> str:
    """Return the name of a key of a report: `prefill_decode_s` is "prefill decode"."""
    return key.removesuffix("_s").replace("_", " ")


def cause_name(key: str) -> str:
    """Return the name of a cause from its key in `causes` of a report."""
    return "host delay" if key == "host_s" else name_of(key)


def doubt(report: Mapping[str, Any]) -> str:
    """Return a warning if the causes in a report are rough; an empty text if they can be trusted."""
    error = report.get("cost_error") or 0.0
    if error <= _ROUGH_FIT:
        return ""
    return f"These causes are rough: they come from fitted costs, which are off by {error:.0%} on average."


def prefix_cache_mode(report: Mapping[str, Any]) -> str:
    """Return the mode of a run's prefix cache. Reports of earlier versions have none."""
    cache = report.get("prefix_cache")
    return str(cache["mode"]) if cache else "off"


def kv_cache_dtype(report: Mapping[str, Any]) -> str | None:
    """Return the float type of keys and values. In earlier versions it was always that of the computation."""
    stored: str | None = report.get("kv_cache_dtype") or report.get("dtype")
    return stored


def setup_of(report: Mapping[str, Any]) -> str:
    """Return the model, dtype and device of a report. A report made only from traces has only the device."""
    device = "emulated stages" if report["device"] == "emulated" else report["device"]
    if "model" not in report:
        return f"device {device}"
    return f"model {report['model']}, {report.get('dtype', 'unknown dtype')} on {device}"
