"""Two hosts with a switch between them, on one machine: network namespaces, each with an address of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.missing import missing

ADDRESSES = ("10.213.7.1", "10.213.7.2")
INTERFACES = ("wire0", "wire1")


@dataclass(frozen=True, slots=True)
class Hosts:
    """names: their namespaces; the switch's is the last."""

    names: tuple[str, str, str]

    def on(self, host: int) -> tuple[str, ...]:
        """What runs a command there."""
        return ("ip", "netns", "exec", self.names[host])

    def unplug(self, host: int) -> None:
        """The switch forwards nothing from or to it, and neither host is told."""
        _ip("-n", self.names[2], "link", "set", f"port{host}", "nomaster")

    def plug(self, host: int) -> None:
        _ip("-n", self.names[2], "link", "set", f"port{host}", "master", "switch")


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        missing("no `ip` here to make network namespaces with")
    names = tuple(f"sarathi-pp-{os.getpid()}-{name}" for name in ("0", "1", "switch"))
    made: list[str] = []
    try:
        for name in names:
            if subprocess.run(("ip", "netns", "add", name), capture_output=True, check=False).returncode:
                missing("no rights here to make network namespaces")
            made.append(name)
        switch = names[2]
        _ip("-n", switch, "link", "add", "name", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host, (address, wire) in enumerate(zip(ADDRESSES, INTERFACES, strict=True)):
            peer = ("peer", "name", f"port{host}", "netns", switch)
            _ip("link", "add", wire, "netns", names[host], "type", "veth", *peer)
            _ip("-n", switch, "link", "set", f"port{host}", "master", "switch", "up")
            _ip("-n", names[host], "addr", "add", f"{address}/24", "dev", wire)
            for link in ("lo", wire):
                _ip("-n", names[host], "link", "set", link, "up")
        yield Hosts((names[0], names[1], switch))
    finally:
        for name in made:
            _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
