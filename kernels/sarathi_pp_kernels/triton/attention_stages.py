"""How many blocks ahead attention loads, which is as many as a device's shared memory holds."""

from __future__ import annotations

from functools import cache

import torch

from sarathi_pp_kernels.triton.attention_work import Blocks, power_of_two

# The least that tensor cores sum over.
LEAST_DIM = 16
# One block of keys and of values is multiplied while the next ones are loaded. With 2 stages loads are begun behind the
# products of the block before and waited for at once: nothing hides them.
NUM_STAGES = 3
# Rows from which Hopper's warps multiply together, and those of which each of eight warps has some to itself. Bytes for
# page ids and reductions.
_LEAST_SHARED_ROWS, _LEAST_OWN_ROWS = 64, 128
_SHARED_MORE = 1024


def shared_bytes(blocks: Blocks, head_dim: int, itemsize: int, *, has_many: bool, stages: int, generation: int) -> int:
    """What a program takes of shared memory, at most. generation: first number of the device's compute capability."""
    dim = max(power_of_two(head_dim), LEAST_DIM)
    most = 0
    for rows in (blocks.few_rows, blocks.many_rows) if has_many else (blocks.few_rows,):
        # Where products read shared memory themselves the block that is multiplied lies there too.
        reads_shared = itemsize == 2 and rows >= _LEAST_SHARED_ROWS and generation in (9, 10)
        held = 2 * (stages if reads_shared else stages - 1) * blocks.keys * dim
        # Where warps share rows, and in float32, weights go through it from one product to the next.
        weights = rows * blocks.keys if rows < _LEAST_OWN_ROWS or itemsize == 4 else 0
        most = max(most, (held + rows * dim + weights) * itemsize)
    return most + _SHARED_MORE


@cache
def num_stages(blocks: Blocks, head_dim: int, itemsize: int, has_many: bool, device: torch.device) -> int:
    """As many as fit the device."""
    if device.type != "cuda":
        return NUM_STAGES
    room, generation = _shared_memory(device)
    needed = shared_bytes(blocks, head_dim, itemsize, has_many=has_many, stages=NUM_STAGES, generation=generation)
    return NUM_STAGES if needed <= room else NUM_STAGES - 1


def _shared_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that a program may have, and the generation of the device."""
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin, properties.major  # type: ignore[attr-defined]
