"""The host of this process, and the memory and CPUs that its control groups (cgroups) leave it there.

Containers and batch systems limit processes by cgroups. /proc/meminfo and the affinity mask do not show these limits.
The limit of a group holds for all groups inside it, so every ancestor that is visible counts:

    /proc/self/cgroup      0::/slurm/job_7/step_0                 this process's group, per hierarchy
    /proc/self/mountinfo   ... / /sys/fs/cgroup ... - cgroup2 ...  where that hierarchy is mounted
        -> /sys/fs/cgroup/slurm/job_7/step_0, .../slurm/job_7, .../slurm, /sys/fs/cgroup

A controller ("memory" or "cpu") is in the hierarchy of version 1 that is mounted for it, otherwise in that of version
2. Files that are missing or cannot be parsed limit nothing. See Documentation/admin-guide/cgroup-v2.rst and
cgroup-v1/memory.rst in Linux. This module does not import torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

# Version 1 writes "no limit" as the largest multiple of a page below 2**63.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """Memory that several processes may share.

    Attributes:
        id: equal for two processes exactly if they share the pool.
        title: name of the pool for messages.
        free_bytes: bytes that are free now, including the page cache, which the kernel can drop.
    """

    id: str
    title: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class _Group:
    """One cgroup.

    Attributes:
        version: version of its hierarchy, 1 or 2.
        path: the kernel's name of the cgroup, such as /slurm/job_7.
        folder: folder with the files of the cgroup.
    """

    version: int
    path: str
    folder: Path


def machine_id(root: Path = ROOT) -> str:
    """Return an id of the kernel that runs this process: its boot id, or the host's name if that cannot be read.

    It is equal for two processes exactly if the same kernel runs them.
    """
    return _text(root / "proc/sys/kernel/random/boot_id") or os.uname().nodename


def host_id() -> str:
    """Return a text that identifies the host of this process: its name, and the id of the kernel that runs it.

    The kernel's id differs between two hosts of equal name. The name differs between containers of one host, unless
    they were given the same name.
    """
    return f"{os.uname().nodename} {machine_id()}"


def memory_pools(root: Path = ROOT) -> tuple[MemoryPool, ...]:
    """Return the pools that limit this process's memory: its host's first, then one per cgroup with a limit."""
    machine, namespace = machine_id(root), _link(root / "proc/self/ns/cgroup")
    pools = [MemoryPool(machine, "the host's memory", _host_free_bytes(root))]
    for group in _groups(root, "memory"):
        free_bytes = _free_bytes(group)
        if free_bytes is not None:
            name = f"{machine} {namespace} {group.version} {group.path}"
            pools.append(MemoryPool(name, f"the memory of cgroup {group.path}", free_bytes))
    return tuple(pools)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the number of CPUs that cgroups allow this process, such as 1.5; None without a limit."""
    quotas = (_quota(group) for group in _groups(root, "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def usable_cpus(root: Path = ROOT) -> int:
    """Return the number of CPUs for this process: those of its affinity mask, or its quota if that is less.

    The quota is rounded to the nearest whole number, at least 1. With one thread more than the quota, the kernel stops
    all threads for a part of each scheduling period. With one thread less, a part of the quota is never used.
    """
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
    return allowed if quota is None else max(1, min(allowed, math.floor(quota + 0.5)))


def _host_free_bytes(root: Path) -> int:
    """Return the free memory of the host: MemAvailable of /proc/meminfo, or all free pages if /proc does not exist."""
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        number = value.strip().removesuffix(" kB")
        if name == "MemAvailable" and number.isdigit():
            return int(number) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_bytes(group: _Group) -> int | None:
    """Return the bytes that a memory cgroup has left below its limit; None without a limit."""
    if group.version == 1:
        names, usage_name, prefix = ["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_"
    else:
        # Above memory.high the kernel slows the group's processes down until they have given memory back.
        names, usage_name, prefix = ["memory.max", "memory.high"], "memory.current", ""
    limits = [limit for name in names if (limit := _number(_text(group.folder / name))) is not None]
    limit = min(limits, default=_NO_LIMIT_BYTES)
    if limit >= _NO_LIMIT_BYTES:
        return None
    usage = _number(_text(group.folder / usage_name)) or 0
    stat = (line.split() for line in _text(group.folder / "memory.stat").splitlines())
    # The kernel drops both parts of the page cache before it refuses memory. Files that were read twice, such as
    # weights, are in active_file.
    dropped = (f"{prefix}inactive_file", f"{prefix}active_file")
    cache = sum(_number(line[1]) or 0 for line in stat if len(line) == 2 and line[0] in dropped)
    return max(0, limit - max(0, usage - cache))


def _quota(group: _Group) -> float | None:
    """Return the number of CPUs that a cgroup allows, which may be a fraction; None without a limit."""
    if group.version == 1:
        fields = [_text(group.folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    else:
        fields = _text(group.folder / "cpu.max").split()
    numbers = [_number(field) for field in fields]
    match numbers:
        case [int(quota), int(period)] if period > 0:
            return quota / period
        case _:
            return None


def _groups(root: Path, controller: str) -> Iterator[_Group]:
    """Yield this process's cgroup of a controller, and then the visible cgroups that contain it, inner ones first."""
    found = _own_group(root, controller)
    if found is None:
        return
    version, path, mount_root, mount_point = found
    folder, inner = root / mount_point.lstrip("/"), _below(path, mount_root)
    if inner is None or not (folder / inner).is_dir():
        # The path belongs to another namespace, so only the mounted group is visible.
        yield _Group(version, path, folder)
        return
    parts = Path(inner).parts
    for count in range(len(parts), -1, -1):
        below = "/".join(parts[:count])
        yield _Group(version, f"{mount_root.rstrip('/')}/{below}".rstrip("/") or "/", folder / below)


def _own_group(root: Path, controller: str) -> tuple[int, str, str, str] | None:
    """Return the hierarchy of a controller, and this process's cgroup in it; None if no hierarchy is mounted.

    Returns:
        The hierarchy's version (1 or 2), the path of this process's cgroup, and the root and point of the mount.
    """
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    paths = {name: line[2] for line in lines if len(line) == 3 for name in line[1].split(",")}
    mounts = [mount.split() for mount in _text(root / "proc/self/mountinfo").splitlines()]
    for version, name in ((1, controller), (2, "")):
        if name not in paths:
            continue
        seen = [mount for mount in mounts if _is_of(mount, version, controller)]
        # A hierarchy may be mounted several times. Prefer a mount that shows this process's own group.
        seen.sort(key=lambda mount: _below(paths[name], mount[3]) is None)
        if seen:
            return version, paths[name], seen[0][3], seen[0][4]
    return None


def _is_of(mount: list[str], version: int, controller: str) -> bool:
    """Return whether a line of mountinfo mounts the hierarchy of this version that has the controller.

    The fields of a line are: `id parent device root place options [tags] - type source options`.
    """
    if "-" not in mount[6:]:
        return False
    rest = mount[mount.index("-", 6) + 1 :]
    if version == 2:
        return rest[:1] == ["cgroup2"]
    return rest[:1] == ["cgroup"] and controller in rest[-1].split(",")


def _below(path: str, mount_root: str) -> str | None:
    """Return a group's path relative to the root of a mount; None if it is not below that root."""
    parts, above = Path(path).parts, Path(mount_root).parts
    if ".." in parts or parts[: len(above)] != above:
        return None
    return "/".join(parts[len(above) :])


def _number(text: str) -> int | None:
    """Return the number that a cgroup file contains; None for `max`, -1 and any other text that is no number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def _text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _link(path: Path) -> str:
    """Return the target of a symbolic link; empty if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
