"""The choice of the float types of a run by the checkpoint and the processor."""

from __future__ import annotations

import pytest

from sarathi_pp.errors import ConfigError
from sarathi_pp.model import dtypes
from sarathi_pp.model.dtypes import Dtypes, can_stay_coded, choose_dtypes, stored_code_bits, why_slow


def on(monkeypatch: pytest.MonkeyPatch, *, bf16: bool, float32: bool) -> None:
    monkeypatch.setattr(dtypes, "has_bf16_products", lambda: bf16)
    monkeypatch.setattr(dtypes, "has_float_products", lambda: float32)
    monkeypatch.setattr(dtypes, "_cpu_flags", frozenset)
    monkeypatch.setattr(dtypes, "find_spec", lambda name: object() if float32 else None)


@pytest.mark.parametrize(
    ("stored", "bf16", "compute"),
    [
        ("float32", False, "float32"),
        ("bfloat16", False, "float32"),
        ("float16", False, "float32"),
        ("float32", True, "float32"),
        ("bfloat16", True, "bfloat16"),
        ("float16", True, "float32"),
    ],
)
def test_auto_never_takes_a_slow_type_on_a_cpu(
    stored: str, bf16: bool, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, bf16=bf16, float32=True)
    found = choose_dtypes("auto", stored, "cpu")
    assert found == Dtypes(compute, stored) and why_slow(found) is None
    assert choose_dtypes("auto", stored, "cuda") == Dtypes(stored, stored)


def test_a_wish_is_kept_and_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, bf16=False, float32=True)
    found = choose_dtypes("bfloat16", "float32", "cpu")
    assert found == Dtypes("bfloat16", "bfloat16")
    assert "no fast products in bfloat16" in str(why_slow(found)) and "--dtype float32" in str(why_slow(found))
    assert why_slow(Dtypes("float32", "float32")) is None
    on(monkeypatch, bf16=True, float32=True)
    assert why_slow(found) is None and why_slow(Dtypes("float16", "float16")) is not None


def test_without_numba_the_type_stays_and_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, bf16=False, float32=False)
    found = choose_dtypes("auto", "bfloat16", "cpu")
    assert found == Dtypes("bfloat16", "bfloat16") and "pip install 'sarathi-pp[cpu]'" in str(why_slow(found))


def test_without_numba_bfloat16_is_fast_on_a_processor_that_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN uses its instructions."""
    on(monkeypatch, bf16=False, float32=False)
    monkeypatch.setattr(dtypes, "_cpu_flags", lambda: frozenset({"avx2", "avx512_bf16"}))
    assert why_slow(choose_dtypes("auto", "bfloat16", "cpu")) is None
    assert why_slow(choose_dtypes("auto", "float16", "cpu")) is not None


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_a_wish_for_float32_keeps_weights_as_they_are_stored(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised weights are dequantised to float32 then, as the user wishes."""
    on(monkeypatch, bf16=True, float32=True)
    assert choose_dtypes("float32", stored, "cpu") == Dtypes("float32", stored)
    assert choose_dtypes("float32", stored, "cuda") == Dtypes("float32", "float32")
    assert choose_dtypes("float32", stored, "cpu", quantised=True) == Dtypes("float32", "float32")


def test_weights_stay_as_they_are_stored_only_where_they_can() -> None:
    assert stored_code_bits("stored", "FP8, blocks of 128 x 128", "cuda") == 8
    assert stored_code_bits("stored", "compressed-tensors, fp8", "auto") == 8
    assert stored_code_bits("stored", "MXFP4", "cuda") == 4
    assert stored_code_bits("dtype", "FP8", "cuda") is None
    assert [can_stay_coded(form) for form in ("FP8", "MXFP4", "AWQ, int4", None)] == [True, True, False, False]
    for quantised, device, says in (
        (None, "cuda", "the weights are not quantised"),
        ("GPTQ, int4", "cuda", "the weights are stored as GPTQ, int4"),
        ("FP8", "cpu", "a CPU cannot keep weights as they are stored"),
    ):
        with pytest.raises(ConfigError, match=rf"--weights stored: {says}.*leave out --weights"):
            stored_code_bits("stored", quantised, device)
    for wish, compute in (("auto", "bfloat16"), ("float32", "float32")):
        found = choose_dtypes(wish, "bfloat16", "cuda", quantised=True, code_bits=4)
        assert found == Dtypes(compute, compute, code_bits=4) and found.coded
