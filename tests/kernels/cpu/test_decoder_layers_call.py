"""The object that runs decoder layers: it refuses tensors that do not fit, and keeps its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from sarathi_pp_kernels.cpu import decoder_layers_call
from sarathi_pp_kernels.cpu.decoder_layers import LAYER, Work
from sarathi_pp_kernels.cpu.decoder_layers_call import DecoderLayer, DecoderLayersCall, WorkingMemory
from sarathi_pp_kernels.cpu.gemm import packed_shape

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 64, 96, 4, 2, 32, 16


def packed(outputs: int, inputs: int) -> torch.Tensor:
    return torch.zeros(packed_shape(outputs, inputs), dtype=torch.int32)


def layer(**changed: Any) -> DecoderLayer:
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    tensors: dict[str, Any] = {
        "input_norm": torch.ones(HIDDEN).bfloat16(),
        "qkv": packed(qkv, HIDDEN),
        "qkv_bias": torch.zeros(qkv),
        "query_norm": None,
        "key_norm": None,
        "keys": torch.zeros(3, KV_HEADS, PAGE_SIZE, HEAD_DIM).bfloat16(),
        "values": torch.zeros(3, KV_HEADS, PAGE_SIZE, HEAD_DIM).bfloat16(),
        "window": 0,
        "output": packed(HIDDEN, HEADS * HEAD_DIM),
        "output_bias": torch.zeros(HIDDEN),
        "norm": torch.ones(HIDDEN).bfloat16(),
        "gate_up": packed(2 * INNER, HIDDEN),
        "gate_up_bias": torch.zeros(2 * INNER),
        "down": packed(HIDDEN, INNER),
        "down_bias": torch.zeros(HIDDEN),
    }
    return DecoderLayer(**tensors | changed)


def make(*layers: DecoderLayer) -> DecoderLayersCall:
    return DecoderLayersCall(layers, torch.bfloat16, epsilon=1e-5, head_epsilon=0.0, scaling=HEAD_DIM**-0.5)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_layers_call, "code_for", lambda *shape: None)


def test_a_layers_tensors_are_in_the_order_in_which_the_kernel_reads_them() -> None:
    assert DecoderLayer._fields == LAYER.names


def test_layers_that_fit_are_taken() -> None:
    norms = {"query_norm": torch.ones(HEAD_DIM).bfloat16(), "key_norm": torch.ones(HEAD_DIM).bfloat16()}
    make(layer(), layer(window=7))
    make(layer(**norms), layer(**norms))


@pytest.mark.parametrize(
    "changed",
    [
        {"input_norm": torch.ones(HIDDEN)},
        {"norm": torch.ones(HIDDEN // 2).bfloat16()},
        {"query_norm": torch.ones(HEAD_DIM).bfloat16()},
        {"query_norm": torch.ones(HEAD_DIM).bfloat16(), "key_norm": torch.ones(HEAD_DIM // 2).bfloat16()},
        {"qkv": packed(HEADS * HEAD_DIM, HIDDEN)},
        {"qkv_bias": torch.zeros(HEADS * HEAD_DIM)},
        {"output_bias": torch.zeros(HIDDEN).bfloat16()},
        {"gate_up": packed(INNER, HIDDEN)},
        {"gate_up": packed(2 * INNER, HIDDEN).float()},
        {"down": packed(HIDDEN, INNER // 2)},
        {"keys": torch.zeros(3, KV_HEADS, PAGE_SIZE // 2, HEAD_DIM).bfloat16()},
        {"values": torch.zeros(3, KV_HEADS, PAGE_SIZE, HEAD_DIM)},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_a_layer_that_would_be_read_beyond_its_end_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        make(layer(), layer(**changed))


def test_weights_of_another_type_than_the_layers_are_refused() -> None:
    with pytest.raises(KeyError):
        DecoderLayersCall([layer()], torch.float32, epsilon=1e-5, head_epsilon=0.0, scaling=1.0)


def work(num_bytes: int) -> Work:
    return Work(*[num_bytes] * len(Work._fields))


def test_memory_is_kept_while_it_is_large_enough() -> None:
    memory = WorkingMemory()
    first = memory.addresses(work(3 << 20))
    assert memory.addresses(work(1 << 20)) == memory.addresses(work(3 << 20)) == first
    assert len(set(first)) == len(first)


def test_after_an_allocation_failed_all_addresses_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was freed before the failure is not used."""
    memory, made, empty = WorkingMemory(), [], torch.empty
    memory.addresses(work(64))

    def failing(*size: Any, **kind: Any) -> torch.Tensor:
        if len(made) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        made.append(empty(*size, **kind))
        return made[-1]

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", failing)
        with pytest.raises(RuntimeError, match="allocate"):
            memory.addresses(work(64 << 20))
    held = memory.addresses(work(64))
    assert held._asdict() == {name: tensor.data_ptr() for name, tensor in memory._memory.items()}
