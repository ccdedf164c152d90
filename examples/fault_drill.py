"""A fault drill: kill a stage and resume the run, then kill a replica and see that no answer is lost.

    python examples/fault_drill.py

The processes and the transport are real. Only the computing is replaced by sleeping (examples/emulated.json), so that
there is time to kill a process. Answers are drawn by request and position, so every run has the same.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

PROFILE = Path(__file__).parent / "emulated.json"
ROWS = 150


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = ({"prompt_token_ids": [7] * (8 + row % 40), "max_new_tokens": 12} for row in range(ROWS))
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        print("1. A pipeline of two stages loses the second.")
        run = generate(folder, "resumed", "--stages", "2")
        kill(run, folder / "resumed.jsonl", rank=1)
        print(f"   code {run.wait(60)}, {len(answers(folder / 'resumed.jsonl'))} of {ROWS} answers are on disk")
        # 75 means that the same command with --resume continues. `--max-restarts 1` would have done that alone.
        assert run.returncode == 75
        assert generate(folder, "resumed", "--stages", "2", "--resume").wait(60) == 0
        print(f"   resumed: {len(answers(folder / 'resumed.jsonl'))} answers")

        print("2. Two replicas of two stages; the second loses a stage.")
        run = generate(folder, "shared", "--stages", "2", "--replicas", "2")
        kill(run, folder / "shared.jsonl", rank=3)  # replica 0 has ranks 0 and 1, replica 1 has ranks 2 and 3
        print(f"   code {run.wait(60)}, {len(answers(folder / 'shared.jsonl'))} of {ROWS} answers")
        report = json.loads((folder / "shared.jsonl.run" / "report.json").read_text())
        print(f"   replicas that were lost: {report['lost_replicas']}")
        # The other replica answered the rows of the lost one, with the same tokens.
        assert run.returncode == 0 and answers(folder / "shared.jsonl") == answers(folder / "resumed.jsonl")
        print("   the same answers as in the first run")


def generate(folder: Path, name: str, *more: str) -> subprocess.Popen[bytes]:
    """Start the command that a user would type. Its messages go to standard error."""
    files = ("--emulate", PROFILE, "--input", folder / "prompts.jsonl", "--output", folder / f"{name}.jsonl")
    return subprocess.Popen((sys.executable, "-P", "-m", "sarathi_pp", "generate", *map(str, files), "--quiet", *more))


def kill(run: subprocess.Popen[bytes], output: Path, rank: int) -> None:
    """Wait until a fifth of the rows is answered, then kill that rank as if its machine were lost."""
    while run.poll() is None and not (output.exists() and output.read_bytes().count(b"\n") >= ROWS // 5):
        time.sleep(0.02)
    [process] = [child for child in psutil.Process(run.pid).children() if child.environ().get("RANK") == str(rank)]
    process.send_signal(signal.SIGKILL)


def answers(output: Path) -> dict[str, list[int]]:
    """Return the token ids of each row. Fail if a row has two lines, or if a line is incomplete."""
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    found = {line["id"]: line["token_ids"] for line in lines}
    assert len(found) == len(lines), "a row was answered twice"
    return found


if __name__ == "__main__":
    main()
