"""The store in which ranks find each other: our launcher's file, torchrun's, or rank 0's own."""

from __future__ import annotations

import errno
import ipaddress
import socket
from datetime import timedelta

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from sarathi_pp.errors import ConfigError
from sarathi_pp.runtime.interface import Target, addresses_of, choose_interface
from sarathi_pp.runtime.place import INTERFACE_VARIABLE, Place


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
    address, listener = host, None
    if place.rank == 0 and not place.agent_store:
        address, listener = _listen(place, host, port)
    try:
        # Who has come is counted afterwards, by meet, which can say who has not. Rank 0 connects too.
        return TCPStore(
            address,
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


def _listen(place: Place, host: str, port: int) -> tuple[str, int]:
    """The one address at which rank 0 is met, and the socket there. By itself TCPStore listens at all of the host's."""
    named = f"MASTER_ADDR={host} MASTER_PORT={port}"
    try:
        found = addresses_of(host, port)
        if place.local_world_size < place.world_size and _leads_astray(host, found[0]):
            if place.interface is None:
                raise ConfigError(
                    f"{named}: on rank 0's own host that name is {found[0][1][0]}, which no other host reaches; give "
                    f"an address, or rank 0's interface in {INTERFACE_VARIABLE}, or LOCAL_WORLD_SIZE where all ranks "
                    f"are on this one"
                )
            found = addresses_of(choose_interface(place).address, port)
        for number, (family, target) in enumerate(found, 1):
            try:
                listener = socket.create_server(target, family=family, backlog=socket.SOMAXCONN)
            except OSError as error:
                if number == len(found) or error.errno == errno.EADDRINUSE:
                    raise
                continue
            return target[0], listener.detach()
        raise AssertionError("a name without an address is an error of its own")
    except OSError as error:
        remedy = {
            errno.EADDRINUSE: "another process listens there; give another MASTER_PORT",
            errno.EADDRNOTAVAIL: "that is no address of rank 0's host; give one that all ranks reach",
        }.get(error.errno or 0, error.strerror)
        raise ConfigError(f"{named}: {remedy}") from error


def _leads_astray(host: str, found: Target) -> bool:
    """Whether the host's own name was meant, which Debian writes down as 127.0.1.1."""
    address = found[1][0]
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback and host not in (address, "localhost")
