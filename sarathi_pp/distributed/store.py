"""The store in which ranks find each other: our launcher's file, torchrun's store, or a store of rank 0."""

from __future__ import annotations

import errno
import ipaddress
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from sarathi_pp.distributed.environment import INTERFACE_VARIABLE, RankEnvironment
from sarathi_pp.distributed.network_interface import Target, addresses_of, choose_interface, first_that_works
from sarathi_pp.errors import ConfigError


def open_store(env: RankEnvironment, timeout: timedelta) -> Store:
    """Open the key-value store in which the ranks of this run find each other.

    Raises:
        ConfigError: the store cannot be opened within `timeout`, or the environment has no address of rank 0.
    """
    if env.store is not None:
        return FileStore(env.store, env.world_size)
    if env.master is None:
        raise ConfigError(
            f"RANK={env.rank} and WORLD_SIZE={env.world_size} are set, MASTER_ADDR and MASTER_PORT are not; set them "
            f"to rank 0's host and port"
        )
    host, port = env.master
    address, listener = host, None
    if env.rank == 0 and not env.agent_store:
        address, listener = _listen(env, host, port)
    try:
        # rendezvous() waits for the ranks, because it can name those that are missing. Rank 0 connects too.
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
            f"rank {env.rank} of {env.world_size} could not reach MASTER_ADDR={host} MASTER_PORT={port} within "
            f"--join-timeout {timeout.total_seconds():g} s; check that rank 0 runs there, and that this host reaches it"
        ) from error


def _listen(env: RankEnvironment, host: str, port: int) -> tuple[str, int]:
    """On rank 0, listen at the one address at which the other ranks reach it.

    TCPStore's own socket would listen at all addresses of the host.

    Returns:
        The address, and the file descriptor of the socket.
    """
    named = f"MASTER_ADDR={host} MASTER_PORT={port}"
    try:
        found = addresses_of(host, port)
        if env.local_world_size < env.world_size and _leads_astray(host, found[0]):
            if env.interface is None:
                raise ConfigError(
                    f"{named}: on rank 0's own host that name is {found[0][1][0]}, which no other host reaches; give "
                    f"an address, or rank 0's interface in {INTERFACE_VARIABLE}, or LOCAL_WORLD_SIZE if all ranks "
                    f"are on this host"
                )
            found = addresses_of(choose_interface(env).address, port)
        listener = first_that_works(found, lambda family, target: _listener(named, family, target))
        return listener.getsockname()[0], listener.detach()
    except OSError as error:
        astray = error.errno == errno.EADDRNOTAVAIL
        remedy = "that is not an address of rank 0's host; give one that all ranks reach" if astray else error.strerror
        raise ConfigError(f"{named}: {remedy}") from error


def _listener(named: str, family: int, target: Any) -> socket.socket:
    """Return a socket that listens at an address and port.

    Args:
        named: the variables with which the user named the address, for the message of an error.

    Raises:
        ConfigError: another process listens there.
        OSError: the address cannot be used.
    """
    try:
        return socket.create_server(target, family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # Do not try another address of the same name: the other ranks might connect to this one.
        raise ConfigError(f"{named}: another process listens there; give another MASTER_PORT") from error


def _leads_astray(host: str, found: Target) -> bool:
    """Return whether a host's name leads to loopback, which no other host reaches. On Debian a host's own name does.

    Args:
        host: the name, or an address. An address, and "localhost", do not lead astray, because the user chose them.
        found: the first address of the name.
    """
    address = found[1][0]
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback and host not in (address, "localhost")
