"""Groups of ranks that communicate by gloo or NCCL, without torch's default process group.

torch keeps one default process group per process and refuses a second one. But a program may have two pipelines at
once, or a pipeline next to a process group of its own. So a group is made directly from a gloo or NCCL backend of
torch. Only the ranks of the group take part in making it, and torch does not register it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import Store  # type: ignore[attr-defined]

_FOR_EVER = timedelta(days=365)
# Backends that were not closed. They stay referenced, because freeing one waits for its operations. This would be
# forever if the other rank is stopped.
_open: set[Any] = set()


class Transfer(Protocol):
    """A send or receive under way."""

    def wait(self) -> object:
        """Wait until the transfer is done. Raises RuntimeError if the other rank is gone or silent."""
        ...


class Gathering:
    """An all-gather under way: every rank gets the tensors of all ranks."""

    def __init__(self, work: Any, parts: list[torch.Tensor]) -> None:
        self._work = work
        self._parts = parts

    def is_complete(self) -> bool:
        return bool(self._work.is_completed())

    def result(self) -> list[torch.Tensor]:
        """Wait for every rank's tensor and return them in the order of ranks."""
        self._work.wait()
        return self._parts


class Group:
    """This process's end of a group of ranks. Ranks are numbered from 0 inside the group.

    Args:
        store: key-value store of torch.distributed, or a part of one, that no other group uses.
        rank: rank of this process in the group.
        size: number of ranks.
        timeout_s: most seconds that an operation, or making the group, may wait for another rank.
        backend: "gloo" or "nccl".

    Raises:
        RuntimeError: another rank does not come in time.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, backend: str = "gloo") -> None:
        timeout = timedelta(seconds=timeout_s)
        self._backend: Any  # torch's own annotations lack its operations
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._backend = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.size = size
        _open.add(self._backend)

    def send(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Start to send a tensor to a rank. The tensor must not change until the transfer is done."""
        transfer: Transfer = self._backend.send([tensor], rank, 0)
        return transfer

    def receive(self, tensor: torch.Tensor, rank: int) -> Transfer:
        """Start to receive from a rank into the tensor."""
        transfer: Transfer = self._backend.recv([tensor], rank, 0)
        return transfer

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by the sum of the tensors of all ranks. On a GPU, this runs on the caller's stream."""
        options = dist.AllreduceOptions()
        options.asyncOp = False
        work = self._backend.allreduce([tensor], options)
        if work is not None:
            work.wait()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in the order of ranks. All must have one shape."""
        return self._start_gathering(tensor, AllgatherOptions()).result()

    @contextmanager
    def gathering(self, tensor: torch.Tensor) -> Iterator[Gathering]:
        """Start an all-gather without a timeout, for a `with` block.

        The block must wait until it is complete, or raise. An exception abandons the all-gather.
        """
        options = AllgatherOptions()
        options.timeout = _FOR_EVER
        gathering = self._start_gathering(tensor, options)
        try:
            yield gathering
        except BaseException:
            # Never free the backend, not even when the interpreter ends: freeing it would wait for this operation.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))
            raise

    def _start_gathering(self, tensor: torch.Tensor, options: AllgatherOptions) -> Gathering:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        return Gathering(self._backend.allgather([parts], [tensor], options), parts)

    def close(self) -> None:
        """Close the group. NCCL's connections end now, those of gloo when this object is freed."""
        self._backend.shutdown()
        _open.discard(self._backend)
