"""Ranks on two hosts: a network that swallows packets, ranks that do not come, addresses that do not fit."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands.processes import COMMAND, TORCHRUN, Files, console_script, environment, free_port, run
from tests.exact.references import Tokens
from tests.faults.jobs import Started, answers, num_lines, wait_for_lines
from tests.faults.test_security import listeners
from tests.hosts import Hosts, hosts_of
from tests.machine import patient

pytestmark = pytest.mark.timeout(200)

PROMPTS: list[Tokens] = [tuple(range(3, 4 + row % 40)) for row in range(300)]
OPTIONS = ("--max-new-tokens", "24", "--ignore-eos", "--max-num-seqs", "16", "--chunk-size", "32", "--quiet")
PORT = 29500
ADDRESSES = ("10.213.7.1", "10.213.7.2")
INTERFACES = ("wire0", "wire1")
PEER_TIMEOUT_S, JOIN_TIMEOUT_S = 4.0, 3.0
# Three times the promise: a timeout and the time to end.
SILENT_END_S = 3 * (PEER_TIMEOUT_S + 5.0)
JOIN_END_S = 3 * (JOIN_TIMEOUT_S + 2.0 + 5.0)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path)
    files.write_prompts(PROMPTS)
    return files


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_of(2) as hosts:
        yield hosts


@dataclass(frozen=True, slots=True)
class Ranks:
    """Started processes, in the order of ranks."""

    processes: list[subprocess.Popen[str]]
    began_s: float

    def end(self, timeout_s: float = 100) -> list[str]:
        """Return the output of each rank at its end."""
        return [process.communicate(timeout=patient(timeout_s))[1] for process in self.processes]

    @property
    def codes(self) -> list[int]:
        return [process.returncode for process in self.processes]


@contextmanager
def started(
    files: Files, emulated: Path, ranks: dict[int, tuple[str, ...]], *options: str, **place: str
) -> Iterator[Ranks]:
    """Start those ranks manually, as a batch system does; each with the words that run a command on its host."""
    processes = []
    for rank, on in ranks.items():
        mine = {"RANK": str(rank), "WORLD_SIZE": "2", **place}
        own = () if rank == 0 else ("--run-dir", str(files.folder / f"run-of-{rank}"))
        command = (*on, *COMMAND, *files.options(emulated, *OPTIONS, *own, *options))
        processes.append(
            subprocess.Popen(
                command, cwd=files.folder, env={**environment(), **mine}, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        yield Ranks(processes, time.monotonic())
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def on_both(hosts: Hosts) -> dict[int, tuple[str, ...]]:
    return {host: hosts.on(host) for host in range(2)}


MEET = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}


@pytest.fixture(scope="module")
def undisturbed(hosts, emulated, tmp_path_factory):
    files = Files(tmp_path_factory.mktemp("undisturbed"))
    files.write_prompts(PROMPTS)
    with started(files, emulated, on_both(hosts), **MEET) as ranks:
        said = ranks.end()
        assert ranks.codes == [0, 0], said
    found = answers(files)
    assert len(found) == len(PROMPTS)
    return found


@pytest.mark.parametrize("unplugged", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_network_that_swallows_packets_ends_both_and_the_run_can_be_gone_on_with(
    unplugged, hosts, files, emulated, undisturbed
):
    timeout = ("--peer-timeout", str(PEER_TIMEOUT_S))
    try:
        with started(files, emulated, on_both(hosts), *timeout, **MEET) as ranks:
            wait_for_lines(ranks.processes[0], files, 30)
            hosts.unplug(unplugged)
            began_s = time.monotonic()
            said = ranks.end()
            assert time.monotonic() - began_s < SILENT_END_S
            assert ranks.codes == [75, 75], said
    finally:
        hosts.plug(unplugged)
    for rank, text in enumerate(said):
        assert f"PeerLostError: stage {1 - rank} (rank {1 - rank}, " in text
        assert "has been silent for longer than --peer-timeout" in text
    assert files.exit_code() == 75
    assert 30 <= len(answers(files)) < len(PROMPTS)
    with started(files, emulated, on_both(hosts), "--resume", *timeout, **MEET) as ranks:
        said = ranks.end()
        assert ranks.codes == [0, 0], said
    assert answers(files) == undisturbed


@pytest.fixture(scope="module")
def answers_of_the_model(model, tmp_path_factory):
    files = Files(tmp_path_factory.mktemp("alone"))
    files.write_prompts(PROMPTS)
    run((*COMMAND, *files.options(model, *OPTIONS)), files.folder)
    return answers(files)


def test_a_network_that_comes_back_in_time_costs_no_answer(hosts, files, model, answers_of_the_model):
    with started(files, model, on_both(hosts), **MEET) as ranks:
        wait_for_lines(ranks.processes[0], files, 30)
        hosts.unplug(1)
        try:
            time.sleep(0.5)
            before = num_lines(files.output)
            time.sleep(1.5)
            assert num_lines(files.output) == before < len(PROMPTS)
        finally:
            hosts.plug(1)
        said = ranks.end()
        assert ranks.codes == [0, 0], said
    assert answers(files) == answers_of_the_model


def test_ranks_listen_at_the_one_address_where_they_meet_and_say_so(hosts, files, emulated):
    with started(files, emulated, on_both(hosts), **MEET) as ranks:
        wait_for_lines(ranks.processes[0], files, 5)
        for process, address in zip(ranks.processes, ADDRESSES, strict=True):
            found = listeners(Started(process, files))
            assert set(found) == {socket.inet_aton(address)[::-1].hex().upper()}
        ranks.processes[0].terminate()
        said = ranks.end()
    assert f"stages talk over {INTERFACES[0]} ({ADDRESSES[0]}), neither encrypted nor authenticated" in said[0]
    assert "encrypted" not in said[1]


def test_one_agent_of_torchrun_on_each_host_makes_one_run(hosts, files, emulated, undisturbed, tmp_path):
    script = console_script(tmp_path)
    agents = []
    for host in range(2):
        rdzv = ("--nnodes", "2", "--node-rank", str(host), "--master-addr", ADDRESSES[0], "--master-port", str(PORT))
        own = () if host == 0 else ("--run-dir", str(tmp_path / "elsewhere"))
        command = (str(TORCHRUN), "--nproc-per-node", "1", *rdzv, str(script), *files.options(emulated, *OPTIONS, *own))
        agents.append(
            subprocess.Popen(
                (*hosts.on(host), *command), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
            )
        )
    try:
        said = [agent.communicate(timeout=patient(150))[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert answers(files) == undisturbed


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, "1 of 2 ranks have come within --join-timeout, missing: 1; start all ranks"),
        (1, "rank 1 of 2 could not reach MASTER_ADDR=127.0.0.1"),
    ],
)
def test_a_rank_that_never_comes_is_missed_in_time(rank, message, files, emulated):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with started(files, emulated, {rank: ()}, "--join-timeout", str(JOIN_TIMEOUT_S), **place) as ranks:
        said = ranks.end()
        assert time.monotonic() - ranks.began_s < JOIN_END_S
        assert ranks.codes == [2] and message in said[0], said
    assert not files.output.exists()


def test_ranks_that_were_told_of_other_numbers_are_refused(files, emulated):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with started(files, emulated, {0: ()}, **place) as first:
        with started(files, emulated, {1: ()}, **{**place, "WORLD_SIZE": "3"}) as second:
            said = [*first.end(), *second.end()]
        assert [*first.codes, *second.codes] == [2, 2], said
    for text in said:
        assert "rank 1 was started as one of 3 ranks, rank 0 as one of 2" in text


def test_an_address_where_rank_0_cannot_be_met_is_refused(hosts, files, emulated):
    """The addresses are a port in use, and one of the other host."""
    on = hosts.on(0)
    program = f"import socket, sys; s = socket.create_server(('{ADDRESSES[0]}', {PORT})); print(flush=True); input()"
    with subprocess.Popen(
        (*on, sys.executable, "-c", program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        for address, message in (
            (ADDRESSES[0], "another process listens there; give another MASTER_PORT"),
            (ADDRESSES[1], "that is not an address of rank 0's host; give one that all ranks reach"),
        ):
            with started(files, emulated, {0: on}, **{**MEET, "MASTER_ADDR": address}) as ranks:
                said = ranks.end()
                assert ranks.codes == [2], said
            assert f"MASTER_ADDR={address} MASTER_PORT={PORT}: {message}" in said[0] and "Traceback" not in said[0]
        other.communicate("\n")


def test_a_start_that_was_refused_is_in_nobodys_way(hosts, files, emulated):
    """A bad address is reported before the run directory is claimed."""
    for _ in range(2):
        with started(files, emulated, {0: hosts.on(0)}, **MEET, GLOO_SOCKET_IFNAME="nosuch0") as ranks:
            said = ranks.end()
            assert ranks.codes == [2], said
        assert "GLOO_SOCKET_IFNAME=nosuch0: no such interface with an address; name one of lo, wire0" in said[0]
        assert files.exit_code() == 2


@pytest.mark.parametrize("without", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_host_without_the_model_is_named_on_all_and_holds_nobody(without, hosts, files, model):
    there, nowhere = ({host: hosts.on(host)} for host in (1 - without, without))
    with started(files, model, there, **MEET) as one:
        with started(files, files.folder / "nosuch", nowhere, **MEET) as other:
            said = [*one.end(), *other.end()]
            assert [*one.codes, *other.codes] == [66, 66], said
        assert time.monotonic() - one.began_s < JOIN_END_S
    errors = [[line for line in text.splitlines() if line.startswith("MissingError")] for text in said]
    # Rank 0 reports the owner of the directory; another rank does not.
    where = ["MissingError: rank 1 on host1: "] if without else []
    assert [error[: len(begin)] for error, begin in zip(errors[0], where, strict=True)] == where, said
    assert len(errors[1]) == 1 and "nosuch" in errors[1][0] and "rank" not in errors[1][0]
    assert files.exit_code() == 66
    assert not files.output.exists()


def test_loopback_leads_to_no_other_host(hosts, files, emulated):
    place = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)}
    with started(files, emulated, {0: hosts.on(0)}, **place) as first:
        with started(files, emulated, {1: hosts.on(1)}, **place, GLOO_SOCKET_IFNAME="lo") as second:
            said = [*first.end(), *second.end()]
        assert [*first.codes, *second.codes] == [2, 2], said
    for text in said:
        assert f"rank 0 talks on wire0 ({ADDRESSES[0]}), rank 1 on lo (127.0.0.1), and they do not reach" in text


def test_an_interface_that_rank_0_names_is_where_it_talks_and_not_where_it_is_met(hosts, files, emulated, undisturbed):
    """Clusters name one interface for data and a master address on another; here its own loopback is the other one."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    with started(files, emulated, {0: hosts.on(0), 1: hosts.on(0)}, **place, GLOO_SOCKET_IFNAME="wire0") as both:
        said = both.end()
        assert both.codes == [0, 0], said
    assert f"stages talk over wire0 ({ADDRESSES[0]})" in said[0]
    assert answers(files) == undisturbed
