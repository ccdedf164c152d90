"""The environment variables that torchrun, a launcher or a user gave this process. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sarathi_pp.config import RunConfig
from sarathi_pp.errors import ConfigError
from sarathi_pp.process.host import usable_cpus
from sarathi_pp.wire.mesh import Mesh

# Path of the file in which ranks find each other. Our own launcher sets it.
STORE_VARIABLE = "SARATHI_PP_STORE"
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE_VARIABLE = "NCCL_SOCKET_IFNAME"
# Process id of our own launcher, which sets it.
LAUNCHER_VARIABLE = "SARATHI_PP_LAUNCHER"
# torchrun's variable. Our own launcher counts restarts in it too.
RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """This process's rank, and how it reaches the other ranks.

    Attributes:
        local_rank: index of this process among the ranks of its host, from 0.
        local_world_size: number of ranks on this host.
        store: path of the file in which ranks find each other (a FileStore); None if our own launcher did not start
            this process.
        restart: number of earlier starts of the run.
        launch_id: the same for all starts of one launcher or agent, and different for any other.
        master: host and port at which the other ranks reach rank 0.
        agent_store: True if torchrun's agent, and not rank 0, listens at `master`.
        interface: the network interface on which the user wants ranks to talk; None if the user named none.
        nccl_interface: the interfaces for NCCL, if the user named them separately.
        launcher: pid of our own launcher, or of torchrun's agent if the agent started this process. It is read when
            this process starts, because a process gets another parent after its own has ended.
        attempt_dir: torchrun's folder for the error files of this start, one per host.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    store: str | None = None
    restart: int = 0
    launch_id: str = ""
    master: tuple[str, int] | None = None
    agent_store: bool = False
    interface: str | None = None
    nccl_interface: str | None = None
    launcher: int | None = None
    attempt_dir: str | None = None

    @property
    def under_torchrun(self) -> bool:
        """Return whether this is one of several ranks that our own launcher did not start."""
        return self.world_size > 1 and self.store is None

    def num_threads(self, environment: Mapping[str, str] = os.environ) -> int:
        """Return the number of compute threads: OMP_NUM_THREADS, otherwise an equal share of the usable CPUs.

        If a node has several processes, torchrun sets OMP_NUM_THREADS=1 without asking the user. So a 1 is ignored
        there.
        """
        wish = environment.get("OMP_NUM_THREADS", "")
        if wish.isdigit() and int(wish) > 0 and not (wish == "1" and self.under_torchrun and self.local_world_size > 1):
            return int(wish)
        return max(1, usable_cpus() // self.local_world_size)


def let_threads_sleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let idle OpenMP threads sleep. Call it before torch is imported, because OpenMP reads the variable then.

    A value that the user has set stays. By default, torch's OpenMP threads keep looking for work for a while. They
    occupy cores that the kernels' own threads (kernels/sarathi_pp_kernels/cpu/threads.py) need next.

    The measurement: eight layers of the 254M model, a chunk of 360 tokens, two cores of a Zen 5. Two threads took
    128 ms, and 78 ms with this setting. One thread took 149 ms.
    """
    environment.setdefault("OMP_WAIT_POLICY", "passive")


def find_environment(environment: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """Return the environment that torchrun or our launcher gave this process; None if neither started it.

    Empty variables count as unset. A pod or a job script may set RANK=0 and WORLD_SIZE=1 for its only process. Without
    torchrun, that process is not a rank of a run. It starts the number of ranks that the user asks for.

    Raises:
        ConfigError: a variable has a wrong value.
    """
    environment = _set(environment)
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    try:
        env = RankEnvironment(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
            store=environment.get(STORE_VARIABLE),
            restart=int(environment.get(RESTART_VARIABLE, "0")),
            launch_id=_launch_id(environment),
            master=_master(environment),
            agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            interface=environment.get(INTERFACE_VARIABLE) or None,
            nccl_interface=environment.get(NCCL_INTERFACE_VARIABLE) or None,
            launcher=_launcher(environment),
            attempt_dir=_attempt_dir(environment),
        )
    except ValueError as error:
        names = f"RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_PORT and {LAUNCHER_VARIABLE}"
        raise ConfigError(f"{names} must be integers: {error}") from None
    if not 0 <= env.rank < env.world_size:
        raise ConfigError(
            f"RANK is {env.rank} and WORLD_SIZE is {env.world_size}; ranks are numbers from 0 to WORLD_SIZE - 1"
        )
    alone = env.world_size == 1 and env.store is None and "TORCHELASTIC_RUN_ID" not in environment
    return None if alone else env


def speaks_for_host(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process shows the user an error that occurs before the ranks have joined.

    torchrun gives all ranks of a host the same options and files, so they get the same error. Only the first rank of
    the host shows it.
    """
    return "RANK" not in environment or STORE_VARIABLE in environment or environment.get("LOCAL_RANK", "0") == "0"


def expected_environment(environment: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Return the environment of this process. If nothing has started it as a rank, return that of a run of two ranks.

    This process is then rank 0. Rank 1 is on another host if MASTER_ADDR and MASTER_PORT are set, otherwise on this
    one.
    """
    environment = _set(environment)
    master = _master(environment)
    env = RankEnvironment(
        world_size=2,
        local_world_size=2 if master is None else 1,
        master=master,
        interface=environment.get(INTERFACE_VARIABLE) or None,
    )
    return find_environment(environment) or env


def _set(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that are not empty."""
    return {name: value for name, value in environment.items() if value}


def _master(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the host and port at which ranks reach rank 0; None if they are not set, or our launcher's file is used.

    Raises:
        ConfigError: the port is out of range.
        ValueError: the port is not a number.
    """
    if STORE_VARIABLE in environment or "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        return None
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    if not 0 < port < 1 << 16:
        raise ConfigError(f"MASTER_PORT is {port}; ports are numbers from 1 to 65535")
    return host, port


def _launcher(environment: Mapping[str, str]) -> int | None:
    """Return the process id of our launcher or torchrun's agent; None if neither started this process.

    This process must end when the launcher or agent ends, even if that was killed and could send no signal.
    """
    if LAUNCHER_VARIABLE in environment:
        return int(environment[LAUNCHER_VARIABLE])
    parent = os.getppid()
    return parent if _is_agent(environment, parent) else None


def _is_agent(environment: Mapping[str, str], parent: int) -> bool:
    """Return whether the parent is torchrun's agent itself, and not a program that the agent has started.

    The agent sets TORCHELASTIC_RUN_ID only for its children, so a parent that was started with it is not the agent.
    """
    try:
        inherited = b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{parent}/environ").read_bytes()
    except OSError:
        return False
    return "TORCHELASTIC_RUN_ID" in environment and not inherited


def _attempt_dir(environment: Mapping[str, str]) -> str | None:
    """Return torchrun's folder for the error files of this start; None without torchrun."""
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")  # .../attempt_0/<rank>/error.json
    return str(Path(error_file).parent.parent) if error_file else None


def _launch_id(environment: Mapping[str, str]) -> str:
    """Return the id of the launcher or agent that started this process, the same for all starts by it.

    It is the directory of our launcher, or it names torchrun's agent, which is this process's parent. It is empty
    without either.
    """
    store = environment.get(STORE_VARIABLE)
    if store is not None:
        return str(Path(store).parent)
    if "TORCHELASTIC_RUN_ID" not in environment:
        return ""
    parent = Path(f"/proc/{os.getppid()}")
    if not _is_agent(environment, os.getppid()):
        return ""  # the parent is a program of the agent, which may start us any number of times
    try:
        # The agent's start time, because pids are used again. It is field 22 of the file. Field 2 is a name in
        # brackets, which may contain spaces.
        started = (parent / "stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    # The folder of one agent, above the folders of the attempt and the rank. A program may run several agents in turn.
    folder = Path(environment.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent.parent
    name = quote(environment["TORCHELASTIC_RUN_ID"], safe="")
    return f"{name} {os.uname().nodename} {parent.name} {started} {folder}"


def rendezvous_of(launch_id: str) -> str:
    """Return torchrun's rendezvous id, which all agents of a run share; empty if the user gave none.

    torchrun's default is "none", which any number of jobs may have. The launch id of our own launcher is a path.

    Args:
        launch_id: launch id of one agent.
    """
    name = launch_id.partition(" ")[0]
    return "" if name == "none" or name.startswith("/") else name


def mesh_of(config: RunConfig) -> Mesh:
    """Return the replicas, stages and shards of a run's ranks, before the hosts of the ranks are known."""
    return Mesh(config.replicas, config.stages, config.tensor_parallel_size)


def heeded_mark(store: str | Path) -> Path:
    """Return the path of a file next to our launcher's store, which exists once rank 0 handles signals."""
    return Path(f"{store}.heeded")


def begun_mark(store: str | Path) -> Path:
    """Return the path of a file next to our launcher's store, which exists once all ranks are set up.

    From then on, the loss of one of several replicas does not end the run.
    """
    return Path(f"{store}.begun")


def stopped_mark(store: str | Path) -> Path:
    """Return the path of a file next to our launcher's store, which exists once a signal stops the run.

    It does not exist if the ranks end because a stage was lost.
    """
    return Path(f"{store}.stopped")


def inherited(additions: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for a child process, with some variables added or replaced."""
    return {**os.environ, **additions}


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the block, for a library that reads it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
