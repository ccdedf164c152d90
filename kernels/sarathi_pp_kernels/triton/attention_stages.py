"""The number of stages of attention's loop over blocks of keys (Triton's num_stages).

With more stages, more blocks of keys and values are loaded ahead. A device's shared memory limits the number.
"""

from __future__ import annotations

from functools import cache

import torch

from sarathi_pp_kernels.triton.attention_work import Blocks, power_of_two

# The fewest channels over which tensor cores sum.
LEAST_DIM = 16
# Most stages. With only 2, the loads of a block start after the products of the block before and are awaited at once.
# So no computation hides their time.
NUM_STAGES = 3
# Fewest rows that Hopper's warps multiply together, and fewest rows of which each of eight warps has its own.
_LEAST_SHARED_ROWS, _LEAST_OWN_ROWS = 64, 128
# Bytes of shared memory for page ids and reductions.
_SHARED_MORE = 1024


def shared_bytes(blocks: Blocks, head_dim: int, itemsize: int, *, has_many: bool, stages: int, generation: int) -> int:
    """Return the most shared memory that a program (a unit of work of the attention kernel) takes, in bytes.

    Args:
        itemsize: bytes of a query, key or value.
        has_many: the microbatch has tiles of more than blocks.few_rows rows.
        stages: number of stages.
        generation: first number of the device's compute capability, such as 9 for Hopper.
    """
    dim = max(power_of_two(head_dim), LEAST_DIM)
    most = 0
    for rows in (blocks.few_rows, blocks.many_rows) if has_many else (blocks.few_rows,):
        # If products read shared memory directly, the block that is multiplied is stored there too.
        reads_shared = itemsize == 2 and rows >= _LEAST_SHARED_ROWS and generation in (9, 10)
        held = 2 * (stages if reads_shared else stages - 1) * blocks.keys * dim
        # If warps share rows, and in float32, weights pass through shared memory from one product to the next.
        weights = rows * blocks.keys if rows < _LEAST_OWN_ROWS or itemsize == 4 else 0
        # Keys are one block further ahead than values then.
        further = blocks.keys * dim if blocks.ahead and rows > blocks.few_rows else 0
        most = max(most, (held + further + rows * dim + weights) * itemsize)
    return most + _SHARED_MORE


@cache
def num_stages(blocks: Blocks, head_dim: int, itemsize: int, has_many: bool, device: torch.device) -> int:
    """Return the number of stages: 3 if the device has enough shared memory, otherwise 2.

    Args:
        itemsize: bytes of a query, key or value.
        has_many: the microbatch has tiles of more than blocks.few_rows rows.
    """
    if device.type != "cuda":
        return NUM_STAGES
    room, generation = _shared_memory(device)
    needed = shared_bytes(blocks, head_dim, itemsize, has_many=has_many, stages=NUM_STAGES, generation=generation)
    return NUM_STAGES if needed <= room else NUM_STAGES - 1


def _shared_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes of shared memory that a program may have, and the first number of the compute capability."""
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin, properties.major  # type: ignore[attr-defined]
