"""Nodes of a run as processes of this machine that connect over loopback."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.commands.processes import ROOT, environment
from tests.machine import patient

ADDER = ROOT / "examples" / "tiny-adder"
PROMPTS = ROOT / "examples" / "prompts.jsonl"
# Sizes that tests can afford.
SMALL = ("--device", "cpu", "--kv-cache-memory", "16MiB", "--quiet")
# Stages that compute nothing: their processes start in half the time.
EMULATED = ("--emulate", str(ROOT / "examples" / "emulated.json"), "--quiet")


def write_token_ids(path: Path, rows: int) -> None:
    """Write prompts that need no tokenizer, numbered by their ids."""
    asked = ({"id": str(row), "prompt_token_ids": [7] * 12, "max_new_tokens": 8} for row in range(rows))
    path.write_text("".join(json.dumps(one) + "\n" for one in asked))


@dataclass(frozen=True, slots=True)
class Node:
    process: subprocess.Popen[str]

    def end(self, timeout_s: float = 120) -> tuple[int, str]:
        """Return its exit code and its output."""
        said = self.process.communicate(timeout=patient(timeout_s))[1]
        return self.process.returncode, said

    def family(self) -> list[psutil.Process]:
        """Return all processes that it has started."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


@contextmanager
def started(command: Sequence[str], folder: Path, **more: str) -> Iterator[Node]:
    """Start a node; none of its processes is left afterwards. more: additions to its environment."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment(), "HF_HUB_OFFLINE": "1", **more},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    node = Node(process)
    try:
        yield node
    finally:
        family = node.family()
        process.kill()
        for member in family:
            if member.is_running():
                member.send_signal(signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
