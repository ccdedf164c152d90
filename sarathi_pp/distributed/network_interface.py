"""The one network interface on which this rank talks to the other ranks: the one on which it reaches rank 0.

Without this choice, gloo would listen at the address of the host's own name. On Debian this is 127.0.1.1, which no
other host can reach.
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

# Observed with torch 2.13, even if --rdzv-endpoint or --master-addr is an address on loopback.
_RENDEZVOUS = (
    "torchrun's rendezvous listens on every interface of its host and unpickles all data that it receives: block its "
    "port for untrusted hosts, or use --stages on one host"
)
_LOOPBACK, _LOOPBACK_ADDRESS = "lo", "127.0.0.1"
# An address family, such as socket.AF_INET, and an address of that family with a port.
Target = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of this host.

    Attributes:
        name: the kernel's name of the interface.
        address: this host's address on it. If the user did not name the interface, rank 0 is reached from there.
    """

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def choose_interface(env: RankEnvironment) -> Interface:
    """Return the interface on which this rank talks.

    Ranks of our own launcher use loopback. Otherwise GLOO_SOCKET_IFNAME decides. Without it, ranks on one host use
    loopback, and ranks on several hosts use the interface with the route to rank 0.

    Raises:
        ConfigError: the interface does not exist, or there is no route to rank 0.
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
        raise ConfigError(f"MASTER_ADDR={host}: rank {env.rank} has no route to it ({error.strerror})") from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(_plain(one.address) == own for one in addresses):
            return Interface(name, own)
    if ipaddress.ip_address(own).is_loopback:  # another address of loopback than the one that the kernel lists
        return Interface(_LOOPBACK, own)
    raise ConfigError(
        f"no interface has the address {own}, from which {host} is reached; name an interface in {INTERFACE_VARIABLE}"
    )


def require_loopback() -> None:
    """Raise ConfigError if this host cannot reach itself at 127.0.0.1, as in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_LOOPBACK_ADDRESS, 9))  # sends nothing, only finds the route
        except OSError as error:
            raise ConfigError(
                f"the loopback interface is down ({error.strerror}: {_LOOPBACK_ADDRESS}), and the ranks of one host "
                f"talk over it\n  try  `ip link set {_LOOPBACK} up` first, or a single rank"
            ) from None


def addresses_of(host: str, port: int) -> list[Target]:
    """Return the addresses of a host, IPv4 first, because gloo prefers IPv4 on an interface that has both.

    Raises:
        OSError: the host has no address.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted(((one[0], one[4]) for one in found), key=lambda one: one[0] != socket.AF_INET)


def first_that_works(targets: list[Target], attempt: Callable[[int, Any], T]) -> T:
    """Try the addresses of a name in order, and return the result for the first one that works.

    Args:
        targets: the addresses.
        attempt: called with the family and the address. It raises OSError if the address does not work.

    Raises:
        OSError: no address works. It is the error of the last attempt.
    """
    *others, last = targets
    for target in others:
        with suppress(OSError):
            return attempt(*target)
    return attempt(*last)


def _own_address(family: int, target: Any) -> str:
    """Return the address of this host from which a target is reached. Nothing is sent, only the route is looked up."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return _plain(probe.getsockname()[0])


def exposure(env: RankEnvironment) -> str | None:
    """Return a warning if other hosts can connect to the ranks of a run or to torchrun; None if they cannot."""
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
    """Return an address of this host on an interface, given by the interface's name.

    Raises:
        ConfigError: the interface does not exist or has no address.
    """
    found = psutil.net_if_addrs()
    for one in found.get(name, ()):
        if one.family in (socket.AF_INET, socket.AF_INET6):
            return _plain(one.address)
    raise ConfigError(f"{INTERFACE_VARIABLE}={name}: no such interface with an address; name one of {', '.join(found)}")


def _plain(address: str) -> str:
    """Return an address without the interface name that follows a link-local address."""
    return address.partition("%")[0]
