"""The environment variables that torchrun, a launcher or a user gave this process. Loads no torch."""

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

STORE_VARIABLE = "SARATHI_PP_STORE"
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE_VARIABLE = "NCCL_SOCKET_IFNAME"
LAUNCHER_VARIABLE = "SARATHI_PP_LAUNCHER"
# torchrun's; our own launcher counts in it too.
RESTART_VARIABLE = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """This process's rank, and how it reaches the other ranks.

    Attributes:
        store: path of the FileStore, if our own launcher started this process.
        restart: how often the run was started before.
        launch_id: the same for all starts of one launcher or agent, and different for any other.
        master: host and port at which the other ranks reach rank 0.
        agent_store: torchrun's agent listens at `master`, instead of rank 0 itself.
        interface: the network interface on which the user wants ranks to talk.
        nccl_interface: the interfaces for NCCL, if they are others.
        launcher: pid of our own launcher, or of torchrun's agent if that started this process. It is read at the start:
            a process whose parent has ended gets another parent.
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
        return self.world_size > 1 and self.store is None

    def num_threads(self, environment: Mapping[str, str] = os.environ) -> int:
        """Compute threads: the CPUs that this process may use shared out, unless OMP_NUM_THREADS says otherwise.

        torchrun sets OMP_NUM_THREADS=1 for several processes a node whether the user wants it or not, so a 1
        there is no wish of the user's.
        """
        wish = environment.get("OMP_NUM_THREADS", "")
        if wish.isdigit() and int(wish) > 0 and not (wish == "1" and self.under_torchrun and self.local_world_size > 1):
            return int(wish)
        return max(1, usable_cpus() // self.local_world_size)


def let_threads_sleep(environment: MutableMapping[str, str] = os.environ) -> None:
    """To be called before torch is imported, whose OpenMP reads it then; what a user has set stays.

    Its threads, as many as torch computes with, go on looking for work for a while after they had some, on cores that
    the kernels' own threads (kernels/sarathi_pp_kernels/cpu/threads.py) want next: eight layers of the 254M model then
    took two threads 128 ms for a chunk of 360 tokens, instead of 78 (one thread 149; two cores of a Zen 5).
    """
    environment.setdefault("OMP_WAIT_POLICY", "passive")


def find_environment(environment: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """Return the environment that torchrun or our launcher gave this process; None if neither started it.

    Empty variables count as unset. A pod or a job script may set RANK=0 and WORLD_SIZE=1 for its only process; without
    torchrun that is no rank of a run, and the process starts as many as it is asked for.
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
    """Return whether this process reports an error that it meets before the ranks have joined.

    torchrun gives all ranks of a host the same options and files, so they meet the same error. The first one says it.
    """
    return "RANK" not in environment or STORE_VARIABLE in environment or environment.get("LOCAL_RANK", "0") == "0"


def expected_environment(environment: Mapping[str, str] = os.environ) -> RankEnvironment:
    """Return the environment of this process; if it has none yet, that of a rank of a run of two.

    The other rank is on another host if MASTER_ADDR and MASTER_PORT are set, otherwise on this one.
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
    return {name: value for name, value in environment.items() if value}


def _master(environment: Mapping[str, str]) -> tuple[str, int] | None:
    if STORE_VARIABLE in environment or "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        return None
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    if not 0 < port < 1 << 16:
        raise ConfigError(f"MASTER_PORT is {port}; ports are numbers from 1 to 65535")
    return host, port


def _launcher(environment: Mapping[str, str]) -> int | None:
    """With it this process is to end, even where it was killed and could tell nobody."""
    if LAUNCHER_VARIABLE in environment:
        return int(environment[LAUNCHER_VARIABLE])
    parent = os.getppid()
    return parent if _is_agent(environment, parent) else None


def _is_agent(environment: Mapping[str, str], parent: int) -> bool:
    """Whether torchrun's agent is the parent itself, and not a program that it has started."""
    try:
        inherited = b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{parent}/environ").read_bytes()
    except OSError:
        return False
    return "TORCHELASTIC_RUN_ID" in environment and not inherited


def _attempt_dir(environment: Mapping[str, str]) -> str | None:
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")  # .../attempt_0/<rank>/error.json
    return str(Path(error_file).parent.parent) if error_file else None


def _launch_id(environment: Mapping[str, str]) -> str:
    """By our launcher's directory, or by torchrun's agent, which is this process's parent; empty without either."""
    store = environment.get(STORE_VARIABLE)
    if store is not None:
        return str(Path(store).parent)
    if "TORCHELASTIC_RUN_ID" not in environment:
        return ""
    parent = Path(f"/proc/{os.getppid()}")
    if not _is_agent(environment, os.getppid()):
        return ""  # a program that the agent has started, which may start us any number of times
    try:
        # The time at which it started, since numbers of processes come again: field 22, behind a name in brackets.
        started = (parent / "stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    # Of one agent run's processes, below the attempt and the rank: a program may run several, one after the other.
    folder = Path(environment.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent.parent
    name = quote(environment["TORCHELASTIC_RUN_ID"], safe="")
    return f"{name} {os.uname().nodename} {parent.name} {started} {folder}"


def rendezvous_of(launch_id: str) -> str:
    """torchrun's name of what all its agents run together, from one agent's launch; empty where nobody has named it.

    Without a name it is "none" for any number of jobs. Our own launcher's launch id is a path.
    """
    name = launch_id.partition(" ")[0]
    return "" if name == "none" or name.startswith("/") else name


def mesh_of(config: RunConfig) -> Mesh:
    """Before anybody knows which hosts the ranks are on."""
    return Mesh(config.replicas, config.stages, config.tensor_parallel_size)


def heeded_mark(store: str | Path) -> Path:
    """The file that is there once rank 0, started by our launcher, heeds signals."""
    return Path(f"{store}.heeded")


def begun_mark(store: str | Path) -> Path:
    """The file that is there once all ranks have been set up: from then on a replica may be lost."""
    return Path(f"{store}.begun")


def stopped_mark(store: str | Path) -> Path:
    """The file that is there once a signal has ended what our launcher started, and not a lost stage."""
    return Path(f"{store}.stopped")


def inherited(additions: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for one that it starts, with some variables added or replaced."""
    return {**os.environ, **additions}


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """In this process's environment while inside, for a library that looks there."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
