"""Add a policy: shortest prompts first, all in this file, on the simulator and on a real model.

    python examples/add_a_policy.py

A policy chooses how many tokens of which sequences run next, and nothing else. The coordinator keeps queues and pages,
and refuses an illegal grant. So a policy changes the speed of a run, but not its answers. To use your own:

1. Derive a class from Policy, as below. Its class attributes declare its needs: see sarathi_pp/core/policy/view.py.
2. Name it as Python imports it: --policy package.module:Class, or --policy package.module:Class:key=value with
   parameters. All ranks import it from installed packages, from PYTHONPATH, or last from their current directory.
   They import this whole file, so the script's own work is below `if __name__ == "__main__":`.
3. For a short name, register an entry point "sarathi_pp.policies" in the pyproject.toml of your package.

A policy of sarathi_pp itself is a file in sarathi_pp/core/policy/ and a line in registry.py there.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sarathi_pp.core.policy import Grant, Limits, Policy, View, parameter, parse_policy
from sarathi_pp.sim.experiment import Experiment, report_of
from sarathi_pp.sim.presets import preset
from sarathi_pp.sim.workload import parse_workload

EXAMPLES = Path(__file__).parent
BUILT_IN, OURS = "sarathi", "add_a_policy:ShortestFirst"


@dataclass(frozen=True, slots=True)
class ShortestFirst(Policy):
    """SARATHI's microbatch, filled with the prompts that have the fewest tokens left.

    Short prompts get their first token sooner, and long ones later.

    Args:
        among: number of the oldest prompts that are sorted by length. The other prompts follow in their order.
    """

    among: int = parameter(8, least=1)

    def pick(self, view: View) -> list[Grant]:
        limits = view.limits
        grants = [Grant(sequence, 1) for sequence in view.decodes[: min(limits.max_decodes, limits.chunk_size)]]
        budget = limits.chunk_size - len(grants)
        prompts = (*view.prefills, *view.waiting)
        for sequence in (*sorted(prompts[: self.among], key=lambda prompt: prompt.remaining), *prompts[self.among :]):
            if budget == 0:
                break
            grants.append(Grant(sequence, min(sequence.remaining, budget)))
            budget -= grants[-1].num_tokens
        return grants

    def max_tokens(self, limits: Limits) -> int:
        return limits.chunk_size


def main() -> None:
    for policy in (BUILT_IN, OURS, f"{OURS}:among=64"):
        report = simulate(policy)
        rate, first_s = report["total_tokens_per_s"], report["ttft_s"]["p50"]
        print(f"simulated, {policy}: {rate:.0f} tokens/s, median time to first token {first_s:.2f} s")
    with tempfile.TemporaryDirectory() as folder:
        expected = generate(BUILT_IN, Path(folder) / "built-in.jsonl")
        found = generate(OURS, Path(folder) / "ours.jsonl")
    same = sum(found[row] == tokens for row, tokens in expected.items())
    print(f"generated on two stages: {same} of {len(expected)} answers have the same tokens")
    assert same == len(expected) == len(found)


def simulate(policy: str) -> dict[str, Any]:
    """Simulate 64 requests that arrive at once, and return the report. The coordinator is the real one."""
    return report_of(
        Experiment(
            profile=preset("gpt3-a100-tp8pp8"),
            workload=parse_workload("uniform:n=64,min=64,max=4096,pd=20"),
            policy=parse_policy(policy),
            chunk_size=256,
            max_num_seqs=64,
        )
    )


def generate(policy: str, output: Path) -> dict[str, list[int]]:
    """Run the command as a user would, in the directory of the policy's module. Return the token ids of each row."""
    command = [sys.executable, "-P", "-m", "sarathi_pp", "generate", "--model", "tiny-adder", "--stages", "2"]
    command += ["--input", "prompts.jsonl", "--output", str(output), "--policy", policy, "--chunk-size", "64"]
    subprocess.run([*command, "--kv-cache-memory", "16MiB", "--device", "cpu", "--quiet"], cwd=EXAMPLES, check=True)
    return {row["id"]: row["token_ids"] for row in map(json.loads, output.read_text().splitlines())}


if __name__ == "__main__":
    main()
