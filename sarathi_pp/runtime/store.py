"""The store in which ranks find each other: our launcher's file, torchrun's, or rank 0's own."""

from __future__ import annotations

import errno
import ipaddress
import socket
from datetime import timedelta

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from sarathi_pp.errors import ConfigError
from sarathi_pp.runtime.interface import choose_interface
from sarathi_pp.runtime.place import Place


def open_store(place: Place, timeout: timedelta) -> Store:
    """Raises ConfigError where it is not to be had within that time."""
    if place.store is not None:
        return FileStore(place.store, place.world_size)
    if place.master is None:
        raise ConfigError(
            f"RANK={place.rank} and WORLD_SIZE={place.world_size} are set, MASTER_ADDR and MASTER_PORT are not: where "
            f"is rank 0 met?"
        )
    host, port = place.master
    listener = None
    if place.rank == 0 and not place.agent_store:
        listener = _listen(place, host, port).detach()
    try:
        # Who has come is counted afterwards, by meet, which can say who has not.
        return TCPStore(
            host,
            port,
            is_master=listener is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"rank {place.rank} of {place.world_size} could not reach MASTER_ADDR={host} MASTER_PORT={port} within "
            f"--join-timeout {timeout.total_seconds():g} s: was rank 0 started there, and can this host reach it?"
        ) from error


def _listen(place: Place, host: str, port: int) -> socket.socket:
    """At one address. By itself TCPStore listens at every one of the host."""
    named = f"MASTER_ADDR={host} MASTER_PORT={port}"
    try:
        where = choose_interface(place).address if place.interface is not None else host
        found = socket.getaddrinfo(where, port, type=socket.SOCK_STREAM)
        family, *_, target = min(found, key=lambda one: one[0] != socket.AF_INET)
        if place.local_world_size < place.world_size and _leads_astray(where, str(target[0])):
            raise ConfigError(
                f"{named}: on rank 0's own host that name is {target[0]}, which no other host reaches; give an address "
                f"there, or rank 0's interface in GLOO_SOCKET_IFNAME"
            )
        return socket.create_server(target, family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        remedy = {
            errno.EADDRINUSE: "another process listens there; give another MASTER_PORT",
            errno.EADDRNOTAVAIL: "that is no address of rank 0's host; give one that all ranks reach",
        }.get(error.errno or 0, error.strerror)
        raise ConfigError(f"{named}: {remedy}") from error


def _leads_astray(host: str, address: str) -> bool:
    """Whether the host's own name was meant, which Debian writes down as 127.0.1.1."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback and host not in (address, "localhost")
