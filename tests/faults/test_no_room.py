"""Missing memory at the start: the message names the rank, the needed and the free bytes, and a size that would fit."""

from __future__ import annotations

import socket

import pytest
import torch
from transformers import core_model_loading

from sarathi_pp.checkpoint.stored_tensor import StoredTensor
from sarathi_pp.errors import CapacityError
from sarathi_pp.model import loader
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.weights import HeldTypes
from tests.commands.processes import Files
from tests.faults.jobs import fault, started
from tests.model.families import NUM_LAYERS, write_checkpoint

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_kv_pages_that_do_not_fit_are_refused_with_what_would(stages, model, tmp_path):
    files = Files(tmp_path)
    files.write_prompts([(5, 6)])
    room = ("--kv-cache-memory", "100TiB", "--max-num-seqs", "2000000")
    with started(files, model, *room, "--stages", stages) as run:
        said = run.end()
        assert run.process.returncode == 2, said
    assert "need" in said and "KV pages of 16 tokens" in said and "are available" in said
    assert "try  --kv-cache-memory " in said and "Traceback" not in said
    assert not files.output.exists()


@pytest.mark.parametrize("what", ["weights", "KV pages of 16 tokens"])
def test_ranks_of_a_host_that_fit_one_by_one_and_not_together_are_refused(what, model, tmp_path):
    """The check comes before loading; the figures of needed and available memory are those of the host."""
    files = Files(tmp_path)
    files.write_prompts([(5, 6)])
    needed = sum(
        loader.stage_bytes(model, layers, HeldTypes.on("cpu", torch.float32)) for layers in ((0, 3), (3, NUM_LAYERS))
    )
    free = needed - 1 if what == "weights" else needed + 1
    with started(files, model, "--stages", "2", "--dtype", "float32", **fault(1, "full", free)) as run:
        said = run.end()
        assert run.process.returncode == 2, said
    assert f"host {socket.gethostname()}: ranks 0, 1 need " in said and f"GiB for {what}, and " in said, said
    assert "are available in the host's memory\n  try  " in said
    assert said.count("CapacityError") == 1 and "Traceback" not in said
    assert not files.output.exists()


def load(model, room_bytes: int | None) -> None:
    backend = choose_backend("sdpa", CPU, 16)
    loader.load_stage(model, (0, NUM_LAYERS), NUM_LAYERS, torch.float32, CPU, backend, room_bytes)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(model, monkeypatch):
    load(model, 1 << 30)
    monkeypatch.setattr(StoredTensor, "__getitem__", lambda self, everything: pytest.fail("it is read"))
    with pytest.raises(
        CapacityError, match=r"layers \[0, 5\) have .* GiB of weights: .* GiB are available\n  try  more"
    ):
        load(model, 1000)


@pytest.mark.parametrize(
    "error", [RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory"), MemoryError()]
)
def test_no_memory_in_the_middle_of_loading_is_not_taken_for_a_bad_checkpoint(error, model, monkeypatch):
    def refuse(self, everything):
        raise error

    monkeypatch.setattr(StoredTensor, "__getitem__", refuse)
    with pytest.raises(CapacityError, match=r"layers \[0, 5\) have .* of weights"):
        load(model, None)


def test_experts_that_cannot_be_put_together_for_want_of_memory_are_no_bad_checkpoint(tmp_path, monkeypatch):
    """transformers catches errors of its conversions and raises another one that does not mention memory."""

    def refuse(*given: object, **more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    write_checkpoint("mixtral", tmp_path)
    monkeypatch.setattr(core_model_loading.MergeModulelist, "convert", refuse)
    with pytest.raises(CapacityError, match=r"of weights: .*CUDA out of memory. Tried to allocate 3.00 GiB"):
        load(tmp_path, None)
