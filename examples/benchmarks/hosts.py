"""Simulated hosts on one machine, joined by a switch: network namespaces with an address and a name each.

    host 0  wire0 --- port0 \\
    host 1  wire1 --- port1 -- switch
    host 2  wire2 --- port2 /

A wire can have a rate (a token bucket on the sending host), or a delay if the kernel supports it. This module needs the
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

# Share of a wire's rate that is payload of TCP: frames have 1,514 bytes, 66 of them headers.
PAYLOAD = 1448 / 1514
# Burst of the token bucket: bytes that an idle wire sends at once. The kernel splits larger pieces.
_BURST = "32kb"
# Queue of the token bucket, large enough that no frame is dropped.
_LIMIT = "16mb"
# The port may be fixed, because each host has its own ports.
_PORT = 29500


class NoHostsError(Exception):
    """This machine cannot make simulated hosts, or shape their wires. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Simulated hosts and their switch.

    Attributes:
        names: namespaces of the hosts.
        switch: namespace of the switch.
        table: file that is /etc/hosts on all hosts.
    """

    names: tuple[str, ...]
    switch: str
    table: Path

    def on(self, host: int) -> tuple[str, ...]:
        """Return the words that, before a command, run it on a host. The host's name leads to its address."""
        # `ip netns exec` gives the command mounts of its own.
        begin = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        named = ("unshare", "--uts", "sh", "-c", begin, f"host{host}", str(self.table))
        return ("ip", "netns", "exec", self.names[host], *named)

    def address(self, host: int) -> str:
        return f"10.213.7.{host + 1}"

    def interface(self, host: int) -> str:
        return f"wire{host}"

    def torchrun(self, host: int, processes: int, *, elastic: bool = False) -> tuple[str, ...]:
        """Return torchrun's part of the command line on a host. Rank 0 is on host 0.

        Args:
            processes: ranks on the host.
            elastic: use a c10d rendezvous instead of a static one.
        """
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
        """Cut a host off: the switch forwards nothing from or to it, and no host gets a message about it."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "nomaster")

    def plug(self, host: int) -> None:
        _ip("-n", self.switch, "link", "set", f"port{host}", "master", "switch")

    def shape(self, *, bits_per_s: float | None = None, delay_s: float = 0.0) -> None:
        """Give all wires a rate or a delay, in both directions. Without either, wires are as fast as when made.

        Raises:
            NoHostsError: the kernel refuses.
            ValueError: rate and delay are both given. Their combination is untested, since our kernels lack netem.
        """
        if bits_per_s is not None and delay_s:
            raise ValueError(f"a wire has a rate or a delay; given {bits_per_s:g} bits/s and {delay_s:g} s")
        for host, name in enumerate(self.names):
            wire = ("dev", self.interface(host), "root")
            _tc("-n", name, "qdisc", "del", *wire, check=False)
            if bits_per_s is not None:
                bucket = ("tbf", "rate", f"{bits_per_s:.0f}bit", "burst", _BURST, "limit", _LIMIT)
                _tc("-n", name, "qdisc", "add", *wire, *bucket)
            elif delay_s:
                _tc("-n", name, "qdisc", "add", *wire, "netem", "limit", "100000", "delay", f"{1e6 * delay_s:.0f}us")

    def can_delay(self) -> bool:
        """Return True if the kernel has netem."""
        try:
            self.shape(delay_s=1e-3)
        except NoHostsError:
            return False
        finally:
            self.shape()
        return True


@contextmanager
def make_hosts(count: int) -> Iterator[Hosts]:
    """Make hosts that exist inside the block.

    Raises:
        NoHostsError: a tool or the right to make namespaces is missing.
    """
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            raise NoHostsError(f"cannot make hosts: `{tool}` is missing")
    folder = Path(mkdtemp(prefix="sarathi-pp-"))
    *names, switch = (f"{folder.name}-{name}" for name in (*map(str, range(count)), "switch"))
    hosts = Hosts(tuple(names), switch, folder / "hosts")
    lines = ["127.0.0.1 localhost", *(f"{hosts.address(host)} host{host}" for host in range(count))]
    hosts.table.write_text("\n".join(lines) + "\n")
    made: list[str] = []
    try:
        for name in (*names, switch):
            if subprocess.run(("ip", "netns", "add", name), capture_output=True, check=False).returncode:
                raise NoHostsError("cannot make hosts: this process may not make network namespaces")
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
