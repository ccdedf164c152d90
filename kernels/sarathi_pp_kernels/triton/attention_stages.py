"""The number of blocks that attention loads ahead, which a device's shared memory limits."""

from __future__ import annotations

from functools import cache

import torch

from sarathi_pp_kernels.triton.attention_work import Blocks, power_of_two

# The fewest channels that tensor cores sum over.
LEAST_DIM = 16
# One block of keys and of values is multiplied while the next ones are loaded. With 2 stages, loads start after the
# products of the block before and are awaited at once, so nothing hides them.
NUM_STAGES = 3
# Fewest rows that Hopper's warps multiply together, and fewest rows of which each of eight warps has its own. Bytes for
# page ids and reductions.
_LEAST_SHARED_ROWS, _LEAST_OWN_ROWS = 64, 128
_SHARED_MORE = 1024


def shared_bytes(blocks: Blocks, head_dim: int, itemsize: int, *, has_many: bool, stages: int, generation: int) -> int:
    """Return the most shared memory that a program takes, in bytes.

    Args:
        generation: first number of the device's compute capability.
    """
    dim = max(power_of_two(head_dim), LEAST_DIM)
    most = 0
    for rows in (blocks.few_rows, blocks.many_rows) if has_many else (blocks.few_rows,):
        # If products read shared memory directly, the block that is multiplied is stored there too.
        reads_shared = itemsize == 2 and rows >= _LEAST_SHARED_ROWS and generation in (9, 10)
        held = 2 * (stages if reads_shared else stages - 1) * blocks.keys * dim
        # If warps share rows, and in float32, weights pass through shared memory from one product to the next.
        weights = rows * blocks.keys if rows < _LEAST_OWN_ROWS or itemsize == 4 else 0
        most = max(most, (held + rows * dim + weights) * itemsize)
    return most + _SHARED_MORE


@cache
def num_stages(blocks: Blocks, head_dim: int, itemsize: int, has_many: bool, device: torch.device) -> int:
    """Return the blocks that attention loads ahead (Triton's num_stages): the most that the device allows."""
    if device.type != "cuda":
        return NUM_STAGES
    room, generation = _shared_memory(device)
    needed = shared_bytes(blocks, head_dim, itemsize, has_many=has_many, stages=NUM_STAGES, generation=generation)
    return NUM_STAGES if needed <= room else NUM_STAGES - 1


def _shared_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes that a program may have, and the generation of the device."""
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin, properties.major  # type: ignore[attr-defined]
