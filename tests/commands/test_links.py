"""torchrun over several hosts whose network links have rates: the answers equal those of one process on any link."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks.hosts import Hosts
from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.cost.profile import EdgeLink, Profile
from tests import thinning
from tests.commands.processes import COMMAND, ROOT, Files, console_script, environment, run
from tests.hosts import hosts_of
from tests.machine import patient

pytestmark = pytest.mark.timeout(300)

MODEL = ROOT / "examples" / "tiny-adder"
# Enough rows to lose a host before they are all answered.
NUM_ROWS = 120
OPTIONS = ("--dtype", "float32", "--chunk-size", "32", "--max-num-seqs", "16", "--max-new-tokens", "12", "--ignore-eos")
RATES = {"unshaped": None, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
PEER_TIMEOUT_S = 4.0
# Three times the promise: a timeout, the time until ranks end, and torchrun's grace period.
LOST_END_S = 3 * (PEER_TIMEOUT_S + 5.0 + 5.0)

# Delay of a message from one host to the other.
DELAY_S = 2e-3

Answers = dict[str, list[int]]


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with hosts_of(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    with hosts_of(3) as hosts:
        yield hosts


def files_in(folder: Path, num_rows: int = NUM_ROWS) -> Files:
    files = Files(folder)
    rows = [
        {"prompt": "".join(f"{n + k}+{k}={n + 2 * k}\n" for k in range(n % 9)) + f"{n}+7="} for n in range(num_rows)
    ]
    files.input.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


@dataclass(frozen=True, slots=True)
class EmulatedFiles(Files):
    """Files of a run with two stages that sleep. added_s: extra delay of each message between them."""

    added_s: float = 0.0

    def options(self, model: Path, *more: str) -> tuple[str, ...]:
        stages = tuple(StageCost((stage, stage + 1), 1e-3, 0.0, 0.0, 0.0, 0.0) for stage in range(2))
        profile = Profile(
            model="synthetic",
            device="cpu",
            dtype="float32",
            hidden_size=64,
            num_layers=2,
            cost=CostModel(1, stages),
            link_latency_s=0.0,
            link_bytes_per_s=1e9,
            jitter_cv=0.0,
            pages=1000,
            max_num_seqs=16,
            links=(EdgeLink(0.0, 1e9, self.added_s),) * 2 if self.added_s else (),
        )
        path = self.folder / "profile.json"
        path.write_text(json.dumps(profile.to_json()))
        return ("generate", "--emulate", str(path), "--input", str(self.input), "--output", str(self.output), *more)


def answers(files: Files) -> Answers:
    """Return the answers by id; each id must have exactly one line."""
    rows = [json.loads(line) for line in files.output.read_text().splitlines()]
    found = {row["id"]: row["token_ids"] for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    files = files_in(tmp_path_factory.mktemp("one-process"))
    run((*COMMAND, *files.options(MODEL, *OPTIONS, "--quiet")), files.folder, timeout_s=200)
    found = answers(files)
    assert len(found) == NUM_ROWS
    return found


@dataclass
class Agents:
    """One torchrun per host; each host writes into a directory of its own."""

    files: Files
    processes: list[subprocess.Popen[str]]

    def end(self, timeout_s: float = 200) -> list[str]:
        return [process.communicate(timeout=timeout_s)[1] for process in self.processes]

    def run_of(self, host: int) -> Path:
        return own_run(self.files, host)

    def wait_for_lines(self, count: int) -> None:
        deadline_s = time.monotonic() + patient(150)
        while not self.files.output.exists() or self.files.output.read_bytes().count(b"\n") < count:
            assert self.processes[0].poll() is None, self.processes[0].communicate()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def own_run(files: Files, host: int) -> Path:
    return files.run if host == 0 else files.folder / f"run-of-host{host}"


class Started:
    """Agents from entering to leaving the context; on leaving, agents that still run are ended."""

    def __init__(
        self, hosts: Hosts, files: Files, processes: Sequence[int], *options: str, elastic: bool = False
    ) -> None:
        script = str(console_script(files.folder))
        self._agents = Agents(files, [])
        for host, count in enumerate(processes):
            own = () if host == 0 else ("--run-dir", str(own_run(files, host)))
            command = (*hosts.torchrun(host, count, elastic=elastic), script)
            command += files.options(MODEL, *OPTIONS, "--quiet", *own, *options)
            self._agents.processes.append(
                subprocess.Popen(
                    command,
                    cwd=files.folder,
                    env={**environment(), "GLOO_SOCKET_IFNAME": hosts.interface(host)},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def __enter__(self) -> Agents:
        return self._agents

    def __exit__(self, *error: object) -> None:
        for process in self._agents.processes:
            process.kill()
            process.communicate()


def finished(agents: Agents) -> dict[str, Any]:
    """Return the content of run.json after all processes ended well."""
    said = agents.end()
    assert [process.returncode for process in agents.processes] == [0] * len(agents.processes), said
    found: dict[str, Any] = json.loads((agents.files.run / "run.json").read_text())
    return found


@pytest.mark.parametrize(
    ("link", "elastic"),
    [
        ("100 Mbit/s", True),
        pytest.param("1 Gbit/s", False, marks=pytest.mark.full),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [("unshaped", True), ("1 Gbit/s", True)]),
        *(pytest.param(*case, marks=pytest.mark.full) for case in [("unshaped", False), ("100 Mbit/s", False)]),
    ],
)
def test_two_hosts_of_two_stages_answer_as_one_process(link, elastic, two, expected, tmp_path):
    files = files_in(tmp_path)
    two.shape(bits_per_s=RATES[link])
    try:
        with Started(two, files, (2, 2), elastic=elastic) as agents:
            known = finished(agents)
    finally:
        two.shape()
    assert answers(files) == expected
    assert known["hosts"] == ["host0", "host0", "host1", "host1"]
    assert len(files.traces()) == 4 and not list(agents.run_of(1).glob("attempt-*/trace-00000-*"))
    report = files.report()
    assert 0 < report["clock_uncertainty_s"] < 0.1
    assert [(stage["stage"], stage["host"]) for stage in report["per_stage"]] == list(enumerate(known["hosts"]))
    assert [link["hosts"] for link in report["links"] if link["between_hosts"]] == [
        ["host0", "host1"],
        ["host1", "host0"],
    ]
    assert all(link["transfer_s"]["p50"] > -report["clock_uncertainty_s"] for link in report["links"])


def test_three_hosts_of_one_stage_answer_as_one_process(three, expected, tmp_path):
    """Both edges of the middle stage cross hosts."""
    files = files_in(tmp_path, num_rows := NUM_ROWS if thinning.full else 6)
    with Started(three, files, (1, 1, 1)) as agents:
        known = finished(agents)
    found = answers(files)
    assert len(found) == num_rows and found.items() <= expected.items()
    assert known["hosts"] == ["host0", "host1", "host2"]
    assert sorted(path.name for path in files.traces()) == [f"trace-0000{stage}-of-00003.jsonl" for stage in range(3)]
    for host in (1, 2):
        assert [path.name for path in agents.run_of(host).glob("attempt-*/trace-*")] == [
            f"trace-0000{host}-of-00003.jsonl"
        ]


def test_a_delay_between_hosts_changes_no_answer_and_is_communication(two, tmp_path):
    """One request at a time: every token goes to the other host and back.

    If the kernel cannot delay packets, the channel delays messages instead, and the same checks hold.
    """
    by_kernel = two.can_delay()
    files, alone = EmulatedFiles(tmp_path / "two", 0.0 if by_kernel else DELAY_S), EmulatedFiles(tmp_path / "one")
    for each in (files, alone):
        each.folder.mkdir()
        each.write_prompts([(7,) * (8 + row) for row in range(8)])
    run((*COMMAND, *alone.options(MODEL, *OPTIONS, "--stages", "1", "--quiet")), alone.folder)
    two.shape(delay_s=DELAY_S if by_kernel else 0.0)
    try:
        with Started(two, files, (1, 1), "--max-num-seqs", "1") as agents:
            finished(agents)
    finally:
        two.shape()
    assert answers(files) == answers(alone)
    report = files.report()
    there, back = report["links"]
    assert there["between_hosts"] and back["between_hosts"]
    # Both directions together, because a clock error adds to one direction what it takes from the other.
    assert there["transfer_s"]["p50"] + back["transfer_s"]["p50"] >= 2 * DELAY_S
    # Each token goes once around while two stages wait, so any machine shows at least one stage's wait.
    assert report["causes"]["communication_s"] >= 2 * DELAY_S * report["microbatches"]


@pytest.mark.full
def test_unequal_hosts_share_the_layers_by_measured_speed(two, expected, tmp_path):
    """Two processes run on one host and one on the other, which takes three times as long per layer."""
    files = files_in(tmp_path)
    config = json.loads((MODEL / "config.json").read_text())
    layers = config["num_hidden_layers"]
    cuts = [0, layers // 3, 2 * layers // 3, layers]
    stages = tuple(
        StageCost((first, end), 0.0, (3e-4 if stage == 2 else 1e-4) * (end - first), 0.0, 0.0, 0.0)
        for stage, (first, end) in enumerate(zip(cuts, cuts[1:], strict=False))
    )
    profile = Profile(
        model=str(MODEL),
        device="cpu",
        dtype="float32",
        hidden_size=config["hidden_size"],
        num_layers=layers,
        cost=CostModel(1, stages),
        link_latency_s=1e-4,
        link_bytes_per_s=1e9,
        jitter_cv=0.0,
        pages=1000,
        max_num_seqs=16,
    )
    (tmp_path / "profile.json").write_text(json.dumps(profile.to_json()))
    with Started(two, files, (2, 1), "--profile", str(tmp_path / "profile.json")) as agents:
        known = finished(agents)
    assert answers(files) == expected
    assert known["hosts"] == ["host0", "host0", "host1"]
    sizes = [end - first for first, end in known["layers"]]
    assert sum(sizes) == layers and sizes[2] == min(sizes) < max(sizes)


def test_a_host_that_is_cut_off_ends_the_run_in_time_and_it_can_be_gone_on_with(two, expected, tmp_path):
    files = files_in(tmp_path)
    timeout = ("--peer-timeout", str(PEER_TIMEOUT_S))
    try:
        with Started(two, files, (2, 2), *timeout) as agents:
            agents.wait_for_lines(20)
            two.unplug(1)
            began_s = time.monotonic()
            first, _ = agents.end()
            assert time.monotonic() - began_s < LOST_END_S
            assert files.exit_code() == 75, first
            assert "has been silent for longer than --peer-timeout" in first and "host1" in first
    finally:
        two.plug(1)
    assert 20 <= len(answers(files)) < NUM_ROWS
    with Started(two, files, (2, 2), *timeout, "--resume") as agents:
        finished(agents)
    assert answers(files) == expected
