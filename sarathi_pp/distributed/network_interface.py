"""The one network interface on which this rank talks to the others: the one on which it reaches rank 0.

gloo by itself listens wherever the host's own name leads: on Debian to 127.0.1.1, where no other host gets through.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from sarathi_pp.distributed.environment import INTERFACE_VARIABLE, RankEnvironment
from sarathi_pp.errors import ConfigError

T = TypeVar("T")

# Measured with torch 2.13, also for --rdzv-endpoint and --master-addr on loopback.
_RENDEZVOUS = (
    "torchrun's rendezvous listens on every interface of its host and unpickles what it finds: close its port to "
    "strangers, or use --stages on one host"
)
_LOOPBACK, _LOOPBACK_ADDRESS = "lo", "127.0.0.1"
# A family of addresses, and one of them with its port.
Target = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class Interface:
    """name: as the kernel calls it. address: this host's on it, from which rank 0 is reached where nobody named it."""

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def choose_interface(env: RankEnvironment) -> Interface:
    """Loopback among our own launcher's ranks, the user's where GLOO_SOCKET_IFNAME names one, loopback on one host.

    Raises ConfigError where there is no such interface, or no way to rank 0.
    """
    if env.store is not None:
        return Interface(_LOOPBACK, _LOOPBACK_ADDRESS)
    if env.interface is not None:
        return Interface(env.interface, _address_of(env.interface))
    if env.master is None or env.local_world_size == env.world_size:
        return Interface(_LOOPBACK, _LOOPBACK_ADDRESS)
    host, port = env.master
    try:
        own = first_that_works(addresses_of(host, port), _own_address)
    except OSError as error:
        raise ConfigError(f"MASTER_ADDR={host}: rank {env.rank} finds no way to it ({error.strerror})") from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(_plain(one.address) == own for one in addresses):
            return Interface(name, own)
    if ipaddress.ip_address(own).is_loopback:  # of 127.0.0.0/8 the kernel lists one
        return Interface(_LOOPBACK, own)
    raise ConfigError(f"{own}, from which {host} is reached, is on no interface; name one in {INTERFACE_VARIABLE}")


def require_loopback() -> None:
    """Raise ConfigError if nothing on this host can be reached at 127.0.0.1, as in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_LOOPBACK_ADDRESS, 9))  # sends nothing: asks for the way
        except OSError as error:
            raise ConfigError(
                f"the loopback interface is down ({error.strerror}: {_LOOPBACK_ADDRESS}), and the ranks of one host "
                f"talk over it\n  try  `ip link set {_LOOPBACK} up` first, or a single rank"
            ) from None


def addresses_of(host: str, port: int) -> list[Target]:
    """IPv4 first, which is what gloo takes of an interface that has both. Raises OSError where there is none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted(((one[0], one[4]) for one in found), key=lambda one: one[0] != socket.AF_INET)


def first_that_works(targets: list[Target], attempt: Callable[[int, Any], T]) -> T:
    """Of a name with several addresses some may lead nowhere. Raises the OSError of the last one where all do."""
    *others, last = targets
    for target in others:
        with suppress(OSError):
            return attempt(*target)
    return attempt(*last)


def _own_address(family: int, target: Any) -> str:
    """This host's, from which that one is reached. Sends nothing: asks for the way."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return _plain(probe.getsockname()[0])


def exposure(env: RankEnvironment) -> str | None:
    """What a user should know of a run whose ranks, or whose launcher, can be reached; None where nothing can be."""
    if env.world_size == 1:
        return None
    interface = choose_interface(env)
    if interface.is_loopback:
        return _RENDEZVOUS if env.agent_store else None
    also = f". {_RENDEZVOUS[0].upper()}{_RENDEZVOUS[1:]}" if env.agent_store else ""
    return (
        f"stages talk over {interface.name} ({interface.address}), neither encrypted nor authenticated: keep others "
        f"off that network{also}"
    )


def _address_of(name: str) -> str:
    found = psutil.net_if_addrs()
    for one in found.get(name, ()):
        if one.family in (socket.AF_INET, socket.AF_INET6):
            return _plain(one.address)
    raise ConfigError(f"{INTERFACE_VARIABLE}={name}: no such interface with an address; name one of {', '.join(found)}")


def _plain(address: str) -> str:
    """Without the interface that an address of one link only is written with."""
    return address.partition("%")[0]
