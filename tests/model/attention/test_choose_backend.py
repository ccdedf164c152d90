"""The attention backend of a run, and the error if the requested one is not available."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from sarathi_pp.errors import ConfigError
from sarathi_pp.model import attention, triton_available
from sarathi_pp.model.attention import BACKENDS, Needs, choose_backend, sdpa
from tests.model.microbatches import CPU

CUDA = torch.device("cuda")
LLAMA = Needs(torch.bfloat16, 128, softcap=False, sinks=False)


class Made:
    """A backend that was chosen."""

    default_page_size = 256

    def __init__(self, name: str, page_multiple: int) -> None:
        self.name = name
        self.page_multiple = page_multiple


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Simulate a GPU machine on which every backend runs. The dictionary maps a name to the reason that it does not."""
    broken: dict[str, str | None] = {}
    for name, multiple in (("triton", 16), ("flash", 256), ("varlen", 256)):
        known = dataclasses.replace(
            BACKENDS[name],
            make=lambda name=name, multiple=multiple: Made(name, multiple),
            works=lambda device, name=name: broken.get(name),
            package=None,
        )
        monkeypatch.setitem(BACKENDS, name, known)
    return broken


def without(name: str) -> mock._patch_dict:
    return mock.patch.dict(BACKENDS, {name: dataclasses.replace(BACKENDS[name], package="no_such_package")})


@pytest.mark.parametrize(("name", "chosen"), [("auto", "numba"), ("numba", "numba"), ("sdpa", "sdpa")])
@pytest.mark.parametrize("page_size", [None, 1, 24])
def test_cpu_backends_take_every_page_size(name, chosen, page_size):
    backend = choose_backend(name, CPU, page_size)
    assert (backend.name, backend.default_page_size) == (chosen, 16)


def test_without_numba_auto_falls_back_and_asking_for_it_names_the_remedy():
    with without("numba"):
        assert choose_backend("auto", CPU, 16).name == "sdpa"
        with pytest.raises(
            ConfigError, match=r"numba needs the package no_such_package \(pip install 'sarathi-pp\[cpu\]'"
        ):
            choose_backend("numba", CPU, 16)


def test_on_cpu_nothing_of_cuda_is_imported_or_asked_about(monkeypatch):
    def never(*arguments: object) -> None:
        raise AssertionError("asked on CPU")

    for name in ("triton", "flash", "varlen"):
        known = dataclasses.replace(BACKENDS[name], make=never, works=never, takes=never)
        monkeypatch.setitem(BACKENDS, name, known)
    with without("numba"):
        assert choose_backend("auto", CPU, None, LLAMA).name == "sdpa"


def test_on_cuda_auto_takes_the_first_that_runs_and_says_why_not_the_others(gpu, caplog):
    caplog.set_level("INFO", attention.__name__)
    assert choose_backend("auto", CUDA, None, LLAMA).name == "triton"
    gpu["triton"] = "cannot compile kernels here: no C compiler"
    assert choose_backend("auto", CUDA, None, LLAMA).name == "flash"
    gpu["flash"] = "needs compute capability 8.0 or more"
    assert choose_backend("auto", CUDA, None, LLAMA).name == "varlen"
    gpu["varlen"] = "reads pages since torch 2.12; this is 2.11.0"
    assert choose_backend("auto", CUDA, None, LLAMA).name == "sdpa"
    assert [record.message for record in caplog.records][:2] == [
        "attention triton for auto on cuda (numba runs on cpu, not on cuda)",
        "attention flash for auto on cuda (numba runs on cpu, not on cuda; "
        "triton cannot compile kernels here: no C compiler)",
    ]


@pytest.mark.parametrize(
    ("needs", "flash", "varlen"),
    [
        (LLAMA, None, None),
        (dataclasses.replace(LLAMA, dtype=torch.float32), "not float32", "not float32"),
        (dataclasses.replace(LLAMA, head_dim=512), "not of 512", "not of 512"),
        (dataclasses.replace(LLAMA, softcap=True), None, "no soft cap of scores"),
        (dataclasses.replace(LLAMA, sinks=True), None, "no attention sinks"),
    ],
    ids=["llama", "float32", "wide heads", "gemma2", "gpt_oss"],
)
def test_libraries_are_passed_over_for_models_that_they_do_not_serve(needs, flash, varlen, gpu):
    for name, reason in (("flash", flash), ("varlen", varlen)):
        if reason is None:
            assert choose_backend(name, CUDA, None, needs).name == name
        else:
            with pytest.raises(ConfigError, match=f"--attention {name} .*{reason}.*; try another of auto"):
                choose_backend(name, CUDA, None, needs)
    gpu["triton"] = "is broken"
    expected = "sdpa" if flash is not None else "flash"
    assert choose_backend("auto", CUDA, None, needs).name == expected


def test_keys_and_values_in_float8_are_read_by_our_own_backends_alone(gpu):
    needs = dataclasses.replace(LLAMA, float8_pages=True)
    for name in ("flash", "varlen"):
        with pytest.raises(ConfigError, match=f"--attention {name} reads no keys and values in FP8 .*; try another of"):
            choose_backend(name, CUDA, None, needs)
    for name in ("triton", "sdpa"):
        assert choose_backend(name, CUDA, None, needs).name == name
    gpu["triton"] = "is broken"
    assert choose_backend("auto", CUDA, None, needs).name == "sdpa"
    for name in ("numba", "sdpa"):
        assert choose_backend(name, CPU, None, needs).name == name


def test_a_backend_of_another_device_is_refused():
    with pytest.raises(ConfigError, match="--attention triton runs on cuda, not on cpu; try another of auto"):
        choose_backend("triton", CPU, None)


def test_an_unknown_backend_is_refused_with_the_choices():
    with pytest.raises(
        ConfigError, match=r"--attention is 'flesh'; it must be one of auto, numba, triton, flash, varlen, sdpa"
    ):
        choose_backend("flesh", CPU, 16)


def test_a_device_nobody_runs_on_is_refused():
    with pytest.raises(ConfigError, match="sdpa runs on cpu or cuda, not on mps; try --device cpu"):
        choose_backend("auto", torch.device("mps"), 16)


def test_a_page_size_the_backend_cannot_take_is_refused(gpu):
    with pytest.raises(ConfigError, match=r"--page-size is 16; --attention flash needs a multiple of 256 \(auto: 256"):
        choose_backend("flash", CUDA, 16)
    with (
        mock.patch.object(sdpa.SdpaAttention, "page_multiple", 256),
        pytest.raises(ConfigError, match=r"--page-size is 24; --attention sdpa needs a multiple of 256"),
    ):
        choose_backend("sdpa", CPU, 24)


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    capability = [(9, 0)]
    monkeypatch.setattr(triton_available.torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(triton_available, "find_spec", lambda name: object())
    monkeypatch.setattr(triton_available, "_try_one", lambda device: None)
    return capability


def test_kernels_run_on_devices_that_know_bfloat16(old_gpu):
    assert triton_available.why_no_kernels.__wrapped__(CUDA) is None
    old_gpu[0] = (7, 5)
    assert "this device has 7.5" in str(triton_available.why_no_kernels.__wrapped__(CUDA))
    assert triton_available.why_no_kernels.__wrapped__(CPU) == "runs on cuda"


def test_a_machine_that_cannot_compile_is_told_of_once_and_served_all_the_same(old_gpu, monkeypatch, caplog):
    def fail(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler.\nSet CC to one")

    monkeypatch.setattr(triton_available, "_try_one", fail)
    assert (
        triton_available.why_no_kernels.__wrapped__(CUDA) == "cannot compile kernels here: Failed to find C compiler."
    )
    assert "Failed to find C compiler" in caplog.text and "Set CC" not in caplog.text
