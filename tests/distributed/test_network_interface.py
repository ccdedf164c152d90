"""Interfaces that a rank uses: one that the others reach, and none outside the host if all are on it."""

from __future__ import annotations

import os
import socket
from collections import namedtuple

import pytest

from sarathi_pp.distributed import network_interface as interface_file
from sarathi_pp.distributed.environment import RankEnvironment, find_environment, variable
from sarathi_pp.distributed.network_interface import Interface, choose_interface, exposure
from sarathi_pp.errors import ConfigError

Address = namedtuple("Address", "family address")
LOOPBACK = Interface("lo", "127.0.0.1")
RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a host with two networks."""
    found = {
        "lo": [Address(socket.AF_INET, "127.0.0.1")],
        "eth0": [Address(socket.AF_PACKET, "aa:bb"), Address(socket.AF_INET, "10.0.0.2")],
        "eth1": [Address(socket.AF_INET6, "fe80::1%eth1")],
        "down0": [Address(socket.AF_PACKET, "aa:cc")],
    }
    monkeypatch.setattr(interface_file.psutil, "net_if_addrs", lambda: found)


def test_our_own_launchers_ranks_stay_inside_whatever_the_environment_says():
    own = {**RANKS, "SARATHI_PP_STORE": "/tmp/x/store", "GLOO_SOCKET_IFNAME": "eth0"}
    assert choose_interface(find_environment(own)) == LOOPBACK
    assert exposure(find_environment(own)) is None


@pytest.mark.parametrize(("name", "address"), [("eth0", "10.0.0.2"), ("eth1", "fe80::1")])
def test_the_users_word_counts(name, address):
    env = find_environment({**RANKS, "GLOO_SOCKET_IFNAME": name})
    assert choose_interface(env) == Interface(name, address)
    assert f"stages talk over {name} ({address}), neither encrypted nor authenticated" in exposure(env)


@pytest.mark.parametrize("name", ["eth7", "down0", "eth0,eth1"])
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(name):
    with pytest.raises(ConfigError, match=f"{name}: no such interface with an address; name one of lo, eth0"):
        choose_interface(find_environment({**RANKS, "GLOO_SOCKET_IFNAME": name}))


def test_ranks_of_one_host_stay_inside():
    assert choose_interface(find_environment({**RANKS, "LOCAL_WORLD_SIZE": "2"})) == LOOPBACK


@pytest.mark.parametrize("more", [{"LOCAL_WORLD_SIZE": "2"}, {"GLOO_SOCKET_IFNAME": "eth0"}], ids=["one host", "two"])
def test_torchruns_own_rendezvous_is_told_of_too(more):
    """Ranks of one host stay inside the host, but torchrun's rendezvous does not."""
    agent = {**RANKS, **more, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert "rendezvous listens on every interface" in exposure(find_environment(agent))
    assert "rendezvous" not in (exposure(find_environment({**RANKS, **more})) or "")


@pytest.mark.parametrize("master", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_who_is_met_on_loopback_is_talked_to_there(master):
    found = choose_interface(find_environment({**RANKS, "MASTER_ADDR": master}))
    assert (found.name, found.is_loopback) == ("lo", True)


def test_started_by_hand_a_rank_is_alone_on_its_host():
    env = find_environment(RANKS)
    assert (env.local_rank, env.local_world_size, env.master, env.launch_id) == (0, 1, ("10.0.0.1", 29500), "")


@pytest.mark.parametrize("port", ["0", "65536", "70000", "-1", "x"])
def test_ports_that_are_none(port):
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        find_environment({**RANKS, "MASTER_PORT": port})


def test_no_run_of_one_rank_asks_for_a_way():
    assert exposure(RankEnvironment()) is None


def test_a_variable_is_put_back(monkeypatch):
    monkeypatch.delenv("SARATHI_PP_TEST", raising=False)
    with variable("SARATHI_PP_TEST", "outer"):
        with variable("SARATHI_PP_TEST", "inner"):
            assert os.environ["SARATHI_PP_TEST"] == "inner"
        assert os.environ["SARATHI_PP_TEST"] == "outer"
    assert "SARATHI_PP_TEST" not in os.environ
