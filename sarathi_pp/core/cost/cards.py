"""Known GPUs, for `plan --card`: memory and speed from the data sheets of their makers.

Peak rates are those of dense bfloat16 products with float32 accumulation. A stage is assumed to reach the same share of
them as on an A100 (estimate.py). So a plan shows which option is faster, but its times may be wrong by a factor. A GB
of memory in a data sheet is taken as a GiB.

Sources, all from nvidia.com:
    A100 Tensor Core GPU data sheet (2022); H100 data sheet (2023); H200 data sheet (2024); DGX B200 data sheet (2025)
    L4 and L40S data sheets (2023); A10 data sheet (2021); RTX A6000 (2021) and RTX 6000 Ada (2023) data sheets
    Ampere GA102, Ada AD102 and Blackwell RTX GPU architecture white papers (RTX 3090, 4090, 5090)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from sarathi_pp.core.cost.estimate import DEVICE_SPEEDS, DeviceSpeed, SumSpeed

_GIB = 1 << 30
# Error correction takes a sixteenth of GDDR6. It is assumed to be on for cards of servers and workstations.
_WITH_ECC = 15 / 16
_NVLINK_3, _NVLINK_4, _NVLINK_5 = 300e9, 450e9, 900e9  # bytes per second, one way, all links of a GPU
_PCIE_4, _PCIE_5 = 32e9, 64e9  # 16 lanes


@dataclass(frozen=True, slots=True)
class Card:
    """One type of GPU."""

    title: str
    memory_bytes: int
    flops: float  # operations per second, in bfloat16
    flops_float32: float  # operations per second, in float32 without tensor cores
    bytes_per_s: float  # read from its memory
    link_bytes_per_s: float  # sent to another card of the same host, one way

    @property
    def speed(self) -> DeviceSpeed:
        """The assumed speed of a stage on this card: that on an A100, scaled by the peak rates of the two cards."""
        known, peak = DEVICE_SPEEDS["cuda"], CARDS["a100-80g"]
        assert known.sums is not None
        sums = SumSpeed(
            known.sums.base_s,
            known.sums.hop_s,
            known.sums.bytes_per_s / peak.link_bytes_per_s * self.link_bytes_per_s,
        )
        return replace(
            known,
            flops={
                2: known.flops[2] / peak.flops * self.flops,
                4: known.flops[4] / peak.flops_float32 * self.flops_float32,
            },
            bytes_per_s=known.bytes_per_s / peak.bytes_per_s * self.bytes_per_s,
            sums=sums,
        )


CARDS: Mapping[str, Card] = MappingProxyType(
    {
        "a10": Card("A10", int(24 * _GIB * _WITH_ECC), 125e12, 31.2e12, 600e9, _PCIE_4),
        "a100-40g": Card("A100 40 GB", 40 * _GIB, 312e12, 19.5e12, 1.555e12, _NVLINK_3),
        "a100-80g": Card("A100 80 GB", 80 * _GIB, 312e12, 19.5e12, 2.039e12, _NVLINK_3),
        "a6000": Card("RTX A6000", int(48 * _GIB * _WITH_ECC), 154.8e12, 38.7e12, 768e9, _PCIE_4),
        "b200": Card("B200", 180 * _GIB, 2.25e15, 75e12, 8e12, _NVLINK_5),
        "h100-80g": Card("H100 80 GB", 80 * _GIB, 989e12, 67e12, 3.35e12, _NVLINK_4),
        "h200": Card("H200", 141 * _GIB, 989e12, 67e12, 4.8e12, _NVLINK_4),
        "l4": Card("L4", int(24 * _GIB * _WITH_ECC), 121e12, 30.3e12, 300e9, _PCIE_4),
        "l40s": Card("L40S", int(48 * _GIB * _WITH_ECC), 362e12, 91.6e12, 864e9, _PCIE_4),
        "rtx-3090": Card("RTX 3090", 24 * _GIB, 71e12, 35.6e12, 936e9, _PCIE_4),
        "rtx-4090": Card("RTX 4090", 24 * _GIB, 165.2e12, 82.6e12, 1.008e12, _PCIE_4),
        "rtx-5090": Card("RTX 5090", 32 * _GIB, 209.5e12, 104.8e12, 1.792e12, _PCIE_5),
        "rtx-6000-ada": Card("RTX 6000 Ada", int(48 * _GIB * _WITH_ECC), 364.2e12, 91.1e12, 960e9, _PCIE_4),
    }
)
"""Cards by their names for --card."""
