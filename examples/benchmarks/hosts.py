"""Hosts with a switch between them, on one machine: network namespaces, each with an address and a name of its own.

    host 0  wire0 --- port0 \\
    host 1  wire1 --- port1 -- switch
    host 2  wire2 --- port2 /

Each wire can be given a rate, by a token bucket on what the host sends, or where the kernel can, a delay. It needs the
right to make namespaces, and Debian's iproute2. All hosts see the same files.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

# Of payload, in frames of 1,514 bytes with 66 of headers: what TCP has of a wire's rate.
PAYLOAD = 1448 / 1514
# What an idle wire lets through at once; the kernel cuts up larger pieces.
_BURST = "32kb"
# Of queue, so that nothing is ever dropped.
_LIMIT = "16mb"
# Each host has all ports to itself.
_PORT = 29500


class NoHostsError(Exception):
    """Why this machine makes no hosts."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """names: of their namespaces. switch: that of the switch. table: what /etc/hosts is on all of them."""

    names: tuple[str, ...]
    switch: str
    table: Path

    def on(self, host: int) -> tuple[str, ...]:
        """What runs a command there, under a host name of its own that leads to its address."""
        # `ip netns exec` gives the command mounts of its own.
        begin = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        named = ("unshare", "--uts", "sh", "-c", begin, f"host{host}", str(self.table))
        return ("ip", "netns", "exec", self.names[host], *named)

    def address(self, host: int) -> str:
        return f"10.213.7.{host + 1}"

    def interface(self, host: int) -> str:
        return f"wire{host}"

    def torchrun(self, host: int, processes: int, *, elastic: bool = False) -> tuple[str, ...]:
        """torchrun's part of the command line there; rank 0 is on host 0. elastic: they find each other by c10d."""
        endpoint = f"{self.address(0)}:{_PORT}"
        place: tuple[str, ...]
        if elastic:
            place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "hosts")
            place += ("--local-addr", self.address(host))
        else:
            place = ("--node-rank", str(host), "--master-addr", self.address(0), "--master-port", str(_PORT))
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        return (*self.on(host), torchrun, "--nnodes", str(len(self.names)), "--nproc-per-node", str(processes), *place)

    def unplug(self, host: int) -> None:
        """The switch forwards nothing from or to it, and no host is told."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "nomaster")

    def plug(self, host: int) -> None:
        _ip("-n", self.switch, "link", "set", f"port{host}", "master", "switch")

    def shape(self, *, bits_per_s: float | None = None, delay_s: float = 0.0) -> None:
        """All wires, both ways, from here on; as they were made without either. Raises NoHostsError.

        Not both at once, which is a ValueError: no kernel here has netem, so nobody has seen what they do together.
        """
        if bits_per_s is not None and delay_s:
            raise ValueError(f"a wire has a rate or a delay; asked for {bits_per_s:g} bits/s and {delay_s:g} s")
        for host, name in enumerate(self.names):
            wire = ("dev", self.interface(host), "root")
            _tc("-n", name, "qdisc", "del", *wire, check=False)
            if bits_per_s is not None:
                bucket = ("tbf", "rate", f"{bits_per_s:.0f}bit", "burst", _BURST, "limit", _LIMIT)
                _tc("-n", name, "qdisc", "add", *wire, *bucket)
            elif delay_s:
                _tc("-n", name, "qdisc", "add", *wire, "netem", "limit", "100000", "delay", f"{1e6 * delay_s:.0f}us")

    def can_delay(self) -> bool:
        """Whether the kernel has netem."""
        try:
            self.shape(delay_s=1e-3)
        except NoHostsError:
            return False
        finally:
            self.shape()
        return True


@contextmanager
def make_hosts(count: int) -> Iterator[Hosts]:
    """For as long as it is entered. Raises NoHostsError where this machine has not what it takes."""
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            raise NoHostsError(f"no `{tool}` here to make hosts with")
    folder = Path(mkdtemp(prefix="sarathi-pp-"))
    *names, switch = (f"{folder.name}-{name}" for name in (*map(str, range(count)), "switch"))
    hosts = Hosts(tuple(names), switch, folder / "hosts")
    lines = ["127.0.0.1 localhost", *(f"{hosts.address(host)} host{host}" for host in range(count))]
    hosts.table.write_text("\n".join(lines) + "\n")
    made: list[str] = []
    try:
        for name in (*names, switch):
            if subprocess.run(("ip", "netns", "add", name), capture_output=True, check=False).returncode:
                raise NoHostsError("no rights here to make network namespaces")
            made.append(name)
        _ip("-n", switch, "link", "add", "name", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host, name in enumerate(names):
            wire = hosts.interface(host)
            _ip("link", "add", wire, "netns", name, "type", "veth", "peer", "name", f"port{host}", "netns", switch)
            _ip("-n", switch, "link", "set", f"port{host}", "master", "switch", "up")
            _ip("-n", name, "addr", "add", f"{hosts.address(host)}/24", "dev", wire)
            for link in ("lo", wire):
                _ip("-n", name, "link", "set", link, "up")
        yield hosts
    finally:
        for name in made:
            _ip("netns", "del", name)
        shutil.rmtree(folder)


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)


def _tc(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(("tc", *arguments), capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise NoHostsError(f"tc {' '.join(arguments)}: {done.stderr.strip()}")
