"""Read the traces of a run: compute each stage's bubble, and compare it with the report.

    sarathi-pp generate --model examples/tiny-adder --input examples/prompts.jsonl --output answers.jsonl --stages 2
    python examples/read_trace.py answers.jsonl.run

Each stage has a trace, a file of JSON Lines such as `{"e": "compute", ...}`. sarathi_pp/trace/events.py has all events.
Without an argument the script makes a run and reads it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from sarathi_pp.analysis.timeline import Alignment
from sarathi_pp.trace.events import Compute, Head, Issued, Returned, TraceEnd, TraceStart
from sarathi_pp.trace.recorder import read_trace

EXAMPLES = Path(__file__).parent


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(sys.argv[1]) if len(sys.argv) > 1 else make_run(Path(folder))
        traces = [list(read_trace(path)) for path in sorted((run / "attempt-0000").glob("trace-*.jsonl"))]
        report = json.loads((run / "report.json").read_text())

    # All stages have the same window, from the first microbatch that rank 0 issued to the last result that it got. Only
    # the trace of rank 0 has these events.
    begin = min(event.at_s for event in traces[0] if isinstance(event, Issued))
    end = max(event.at_s for event in traces[0] if isinstance(event, Returned))
    print(f"{sum(isinstance(event, Issued) for event in traces[0])} microbatches in {end - begin:.3f} s")
    print("the first:", next(event.text for event in traces[0] if isinstance(event, Issued)))

    for stage, events in enumerate(traces):
        # A stage's times are on its own clock. Its offset to rank 0's clock was measured at both ends of the trace.
        [start] = [event for event in events if isinstance(event, TraceStart)]
        [last] = [event for event in events if isinstance(event, TraceEnd)]
        clock = Alignment.of(start, last)

        # The first stage may also compute LM heads instead of the last one, so that both take equally long.
        compute_s = 0.0
        for event in events:
            if isinstance(event, Compute | Head):
                span = clock.to_rank0(event.start_s), clock.to_rank0(event.end_s)
                compute_s += max(0.0, min(span[1], end) - max(span[0], begin))

        by_hand, reported = 1 - compute_s / (end - begin), report["per_stage"][stage]["bubble_ratio"]
        print(f"stage {stage}, layers {start.layers}: computed {compute_s:.3f} s, bubble {by_hand:.2%}")
        assert abs(by_hand - reported) < 1e-6, f"the report says {reported:.2%}"
    print("the same as in report.json")


def make_run(folder: Path) -> Path:
    output = folder / "answers.jsonl"
    files = ("--model", EXAMPLES / "tiny-adder", "--input", EXAMPLES / "prompts.jsonl", "--output", output)
    more = ("--stages", "2", "--device", "cpu", "--kv-cache-memory", "16MiB", "--quiet")
    subprocess.run((sys.executable, "-P", "-m", "sarathi_pp", "generate", *map(str, files), *more), check=True)
    return folder / "answers.jsonl.run"


if __name__ == "__main__":
    main()
