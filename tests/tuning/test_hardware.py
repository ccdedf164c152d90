"""Devices on other machines, as the user describes them."""

from __future__ import annotations

from typing import Any

import pytest

from sarathi_pp.core.cost.cards import CARDS
from sarathi_pp.errors import ConfigError
from sarathi_pp.tuning.hardware import CONTEXT_BYTES, Hardware, choose_stages

GIB = 1 << 30


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"memory": (24,), "devices": 2, "hosts": 2}, [24] * 4),
        ({"memory": (80, 24, 24)}, [80, 24, 24]),
        ({"memory": (80, 24), "hosts": 2, "devices": 2}, [80, 24, 80, 24]),
        ({"memory": (80, 24, 48), "hosts": 3}, [80, 24, 48]),
        ({"memory": (24,)}, [24] * 6),  # one for each rank
    ],
)
def test_a_size_stands_for_one_device_for_a_host_or_for_all(given: dict[str, Any], sizes: list[int]) -> None:
    given["memory"] = tuple(size * GIB for size in given["memory"])
    assert [device.memory_bytes // GIB for device in Hardware(**given).list_devices(6)] == sizes


def test_cards_bring_memory_and_speed_and_a_size_wins() -> None:
    first, second = Hardware(cards=("h100-80g", "l4"), memory=(70 * GIB, 20 * GIB)).list_devices(None)
    assert (first.memory_bytes, second.memory_bytes) == (70 * GIB, 20 * GIB)
    assert first.speed == CARDS["h100-80g"].speed and second.title == "L4"
    (alone,) = Hardware(cards=("l4",)).list_devices(None)
    assert alone.memory_bytes == CARDS["l4"].memory_bytes


def test_each_device_is_a_pool_of_its_own_without_what_cuda_takes() -> None:
    memories = [device.memory(index) for index, device in enumerate(Hardware(memory=(GIB,)).list_devices(2))]
    assert len({memory.pools[0].id for memory in memories}) == 2
    assert memories[0].pools[0].free_bytes == GIB - CONTEXT_BYTES and memories[0].total_bytes == GIB


def test_stages_use_all_devices_and_no_more_than_there_are_layers() -> None:
    devices = Hardware(memory=(GIB,), devices=8).list_devices(None)
    assert [choose_stages(devices, shards, 5) for shards in (1, 2, 4)] == [5, 4, 2]
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 does not divide 8 devices"):
        choose_stages(devices, 3, 5)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device-memory lists 3 devices, and there are 16"):
        Hardware(memory=(1, 2, 3), devices=8, hosts=2).list_devices(None)
    for given in ({"devices": 8}, {"hosts": 2}):
        with pytest.raises(ConfigError, match="needs --card or --device-memory"):
            Hardware(**given).require_complete()
