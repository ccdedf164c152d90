"""Memory and cores that a host and its cgroups leave to a process, read from files of kernels and containers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from sarathi_pp.config import RunConfig
from sarathi_pp.distributed import environment, launcher
from sarathi_pp.distributed.devices import DeviceInfo
from sarathi_pp.distributed.environment import RankEnvironment
from sarathi_pp.distributed.launcher import Workers
from sarathi_pp.distributed.transport import choose_transport
from sarathi_pp.process.host import host_id, machine_id, memory_pools, usable_cpus
from sarathi_pp.stages import capacity
from sarathi_pp.stages.capacity import DeviceMemory, kv_budget_bytes, room_bytes
from sarathi_pp.wire.mesh import Mesh

GIB = 1 << 30
HOST_GIB, HOST_CPUS = 64, 48

V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MEMORY = "35 31 0:31 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V1_CPU = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
OTHER = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n99 1 8:1 / / rw - ext4 /dev/sda1 rw\n"

Files = Mapping[str, str]


def v2(path: str, files: Files, root: str = "/") -> dict[str, str]:
    groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": OTHER + V2.format(root=root), **groups}


def v1(path: str, files: Files, root: str = "/", cgroup: str = "") -> dict[str, str]:
    """Return the files of cgroup v1. files: names start with memory/ or cpu/. cgroup: further lines."""
    groups = {f"sys/fs/cgroup/{name.replace('cpu/', 'cpu,cpuacct/', 1)}": text for name, text in files.items()}
    mounts = OTHER + V1_MEMORY.format(root=root) + V1_CPU.format(root=root)
    own = f"7:pids:/\n4:memory:{path}\n3:cpu,cpuacct:{path}\n{cgroup}"
    return {"proc/self/cgroup": own, "proc/self/mountinfo": mounts, **groups}


def make(root: Path, files: Files, free_gib: int = HOST_GIB, boot: str = "b007") -> Path:
    meminfo = f"MemTotal: {2 * free_gib << 20} kB\nMemFree: 1 kB\nMemAvailable:   {free_gib << 20} kB\n"
    for name, text in {"proc/meminfo": meminfo, "proc/sys/kernel/random/boot_id": f"{boot}\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# For each kind of machine: its files, its free GiB, and its CPUs.
CASES: dict[str, tuple[dict[str, str], float, int]] = {
    "no cgroups": ({}, 64, 48),
    "v2 without limits": (v2("/a", {"a/memory.max": "max\n", "a/cpu.max": "max 100000\n"}), 64, 48),
    "v2 at its root, which has no such files": (v2("/", {"cpu.stat": "usage_usec 1\n"}), 64, 48),
    "v2 with limits": (
        v2("/a", {"a/memory.max": f"{8 * GIB}\n", "a/memory.current": f"{2 * GIB}\n", "a/cpu.max": "400000 100000\n"}),
        *(6, 4),
    ),
    "v2 with page cache that the kernel can drop": (
        v2(
            "/a",
            {
                "a/memory.max": f"{8 * GIB}\n",
                "a/memory.current": f"{8 * GIB}\n",
                "a/memory.stat": f"anon 7\nfile 9\ninactive_file {2 * GIB}\nactive_file {3 * GIB}\n",
            },
        ),
        *(5, 48),
    ),
    "v2 slowed down before its limit": (
        v2("/a", {"a/memory.max": f"{8 * GIB}\n", "a/memory.high": f"{4 * GIB}\n", "a/memory.current": f"{GIB}\n"}),
        *(3, 48),
    ),
    "v2 limited further out, as a step of a batch job": (
        v2(
            "/slurm/job_7/step_0",
            {
                "slurm/job_7/step_0/memory.max": "max\n",
                "slurm/job_7/step_0/cpu.max": "max 100000\n",
                "slurm/job_7/memory.max": f"{10 * GIB}\n",
                "slurm/job_7/memory.current": f"{9 * GIB}\n",
                "slurm/cpu.max": "250000 50000\n",
            },
        ),
        *(1, 5),
    ),
    "v2 in a container with a namespace of its own": (
        v2("/", {"memory.max": f"{4 * GIB}\n", "memory.current": "0\n", "cpu.max": "150000 100000\n"}),
        *(4, 2),
    ),
    "v2 seen through a mount of the container's own group": (
        v2("/docker/abc", {"memory.max": f"{4 * GIB}\n", "cpu.max": "30000 100000\n"}, root="/docker/abc"),
        *(4, 1),
    ),
    "v2 where the path is one of another namespace": (
        v2("/../../other", {"memory.max": f"{4 * GIB}\n", "cpu.max": "200000 100000\n"}),
        *(4, 2),
    ),
    "v2 where the group's folder is not visible": (v2("/gone/deep", {"memory.max": f"{4 * GIB}\n"}), 4, 48),
    "v2 over its limit": (v2("/a", {"a/memory.max": f"{GIB}\n", "a/memory.current": f"{2 * GIB}\n"}), 0, 48),
    "v2 limits beyond the host": (
        v2("/a", {"a/memory.max": f"{999 * GIB}\n", "a/cpu.max": "9900000 100000\n"}),
        *(64, 48),
    ),
    "v2 garbage": (
        v2("/a", {"a/memory.max": "many\n", "a/memory.high": "9" * 5000, "a/cpu.max": "x y\n", "a/memory.stat": "\0"}),
        *(64, 48),
    ),
    "v2 a period of nothing": (v2("/a", {"a/cpu.max": "100000 0\n"}), 64, 48),
    "v1 without limits": (
        v1("/", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n", "cpu/cpu.cfs_quota_us": "-1\n"}),
        *(64, 48),
    ),
    "v1 with limits": (
        v1(
            "/a",
            {
                "memory/a/memory.limit_in_bytes": f"{8 * GIB}\n",
                "memory/a/memory.usage_in_bytes": f"{5 * GIB}\n",
                "memory/a/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n",
                "cpu/a/cpu.cfs_quota_us": "350000\n",
                "cpu/a/cpu.cfs_period_us": "100000\n",
            },
        ),
        *(4, 4),
    ),
    "v1 limited further out": (
        v1(
            "/pod/box",
            {
                "memory/pod/box/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "memory/pod/memory.limit_in_bytes": f"{3 * GIB}\n",
                "cpu/pod/box/cpu.cfs_quota_us": "-1\n",
                "cpu/pod/cpu.cfs_quota_us": "300000\n",
                "cpu/pod/cpu.cfs_period_us": "100000\n",
            },
        ),
        *(3, 3),
    ),
    "v1 seen through a mount of the container's own group": (
        v1("/docker/abc", {"memory/memory.limit_in_bytes": f"{2 * GIB}\n"}, root="/docker/abc"),
        *(2, 48),
    ),
    "hybrid, whose version 2 has no controllers": (
        {
            **v1("/a", {"memory/a/memory.limit_in_bytes": f"{2 * GIB}\n"}, cgroup="0::/a\n"),
            "sys/fs/cgroup/unified/a/memory.max": f"{GIB}\n",
        },
        *(2, 48),
    ),
    "a controller that is mounted nowhere": (
        {"proc/self/cgroup": "4:memory:/a\n", "proc/self/mountinfo": OTHER},
        *(64, 48),
    ),
    "lines that are cut": (
        {
            "proc/self/cgroup": "0:\n\n4\n0::/\n4:memory:/\n",
            "proc/self/mountinfo": "30 23\n- - -\n1 2 3 / 5 6 - cgroup\n1 2 3 / 5 6 -\n",
        },
        *(64, 48),
    ),
}  # fmt: skip


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(HOST_CPUS)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("cpus")
def test_limits_of_the_container_decide_budgets_and_threads(name, tmp_path, monkeypatch):
    files, free_gib, cpus = CASES[name]
    root = make(tmp_path, files)
    pools = memory_pools(root)
    assert pools[0].free_bytes == HOST_GIB * GIB
    assert min(pool.free_bytes for pool in pools) == free_gib * GIB
    assert usable_cpus(root) == cpus

    # Commands that read them.
    monkeypatch.setattr(capacity, "memory_pools", lambda: memory_pools(root))
    for module in (environment, launcher):
        monkeypatch.setattr(module, "usable_cpus", lambda: usable_cpus(root))
    cpu, config = torch.device("cpu"), RunConfig(model="")
    assert room_bytes(cpu) == free_gib * GIB
    memory = DeviceMemory.of(cpu)
    assert kv_budget_bytes(config, memory, {}) == min(4 * GIB, int(0.4 * free_gib * GIB))
    both = {pool.id: 2 for pool in pools}
    assert kv_budget_bytes(config, memory, both) == min(4 * GIB, int(0.4 * free_gib * GIB) // 2)
    assert RankEnvironment(world_size=2, local_world_size=2).num_threads({}) == max(1, cpus // 2)
    workers = Workers(tmp_path / "store", Mesh(stages=3))
    assert workers._variables(0, {})["OMP_NUM_THREADS"] == str(max(1, cpus // 3))


def test_two_tasks_of_one_job_share_the_jobs_memory_and_not_their_own(tmp_path):
    """Each task has 4 GiB of its own; their job has 6 GiB for both."""
    files = {
        "slurm/memory.max": f"{6 * GIB}\n",
        "slurm/t0/memory.max": f"{4 * GIB}\n",
        "slurm/t1/memory.max": f"{4 * GIB}\n",
    }
    roots = [make(tmp_path / task, v2(f"/slurm/{task}", files)) for task in ("t0", "t1")]
    first, second = ({pool.id: pool for pool in memory_pools(root)} for root in roots)
    assert sorted(pool.free_bytes // GIB for pool in first.values()) == [4, 6, HOST_GIB]
    shared = first.keys() & second.keys()
    assert sorted(first[id].free_bytes // GIB for id in shared) == [6, HOST_GIB]


@pytest.mark.usefixtures("cpus")
def test_without_proc_there_are_free_pages_and_no_limits(tmp_path):
    (pool,) = memory_pools(tmp_path)
    assert 0 < pool.free_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert pool.id == machine_id(tmp_path) == os.uname().nodename
    assert usable_cpus(tmp_path) == HOST_CPUS


def test_hosts_of_one_name_are_told_apart(tmp_path):
    roots = [make(tmp_path / boot, {}, boot=boot) for boot in ("one", "two")]
    assert len({machine_id(root) for root in roots}) == 2
    assert len({memory_pools(root)[0].id for root in roots}) == 2
    assert host_id() == f"{os.uname().nodename} {machine_id()}"


def test_topology_and_devices_use_that_id():
    """Two ranks whose hosts are both called `localhost` are not neighbours and share no GPU."""
    ids = ["localhost one", "localhost two", "localhost one", "localhost two"]
    assert Mesh(replicas=2, stages=2).over(ids).ranks == (0, 2, 1, 3)
    gpus = [DeviceInfo(id, "GPU-0", True) for id in ids[:2]]
    assert choose_transport(gpus).name == "nccl"
