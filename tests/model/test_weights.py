"""Valid layouts of a checkpoint's files. Reading them gives the same tensors as safetensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sarathi_pp.checkpoint import stored_tensor
from sarathi_pp.checkpoint.facts.families import FAMILIES
from sarathi_pp.checkpoint.files import INDEX_FILE, SINGLE_FILE, open_checkpoint, safe_path
from sarathi_pp.checkpoint.stored_tensor import StoredTensor
from sarathi_pp.checkpoint.tensor_file import ReadCount
from sarathi_pp.errors import InputError, MissingError, SarathiError, UnsafeError
from sarathi_pp.model.weights import HeldTypes, stage_tensors

HELD = HeldTypes.on("cuda", torch.float32)
LLAMA = FAMILIES["LlamaForCausalLM"]


def write_shards(directory: Path, shards: dict[str, dict[str, torch.Tensor]]) -> None:
    placed = {}
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
        placed |= dict.fromkeys(tensors, name)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def two_shards(directory: Path) -> None:
    write_shards(
        directory,
        {
            "model-00001-of-00002.safetensors": {"model.layers.0.a": torch.ones(2, 3)},
            "model-00002-of-00002.safetensors": {"model.layers.1.a": torch.ones(3)},
        },
    )


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    ],
)
def test_reading_equals_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{number}": (4 * torch.randn(shape, generator=generator)).to(dtype)
        for number, shape in enumerate([(3, 5), (1,), (), (0, 4), (2, 3, 7)])
    }
    save_file(tensors, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    expected = load_file(tmp_path / SINGLE_FILE)
    count = ReadCount()
    entries = open_checkpoint(tmp_path).tensors
    assert entries.keys() == expected.keys()
    for key, entry in entries.items():
        tensor = StoredTensor(entry, count, dtype)[...]
        assert tensor.dtype == dtype and tensor.shape == expected[key].shape
        assert torch.equal(tensor, expected[key])
    assert count.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int32])
def test_large_tensors_are_converted_while_they_are_read(
    stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensor, "BLOCK_BYTES", 64)
    generator = torch.Generator().manual_seed(0)
    tensors = {str(n): (9 * torch.randn(n, 3, generator=generator)).to(stored) for n in (0, 1, 5, 6, 10, 16, 33)}
    save_file(tensors, tmp_path / SINGLE_FILE)
    count = ReadCount()
    for key, entry in open_checkpoint(tmp_path).tensors.items():
        tensor = StoredTensor(entry, count, torch.float16)[...]
        converted = stored.is_floating_point and entry.num_bytes > 64
        assert tensor.dtype == (torch.float16 if converted else stored)
        assert torch.equal(tensor, tensors[key].to(tensor.dtype))
    assert count.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / SINGLE_FILE)
    entry = open_checkpoint(tmp_path).tensors["a"]
    content = (tmp_path / SINGLE_FILE).read_bytes()
    (tmp_path / SINGLE_FILE).write_bytes(content[:-4])
    with pytest.raises(InputError, match="inside a tensor"):
        StoredTensor(entry, ReadCount(), torch.float32)[...]


def names(layers: tuple[int, int], *, tied: bool, keys: list[str], tmp_path: Path) -> set[str]:
    save_file({key: torch.ones(1) for key in keys}, tmp_path / SINGLE_FILE)
    return set(stage_tensors(open_checkpoint(tmp_path).tensors, LLAMA, layers, 12, tied, HELD, ReadCount()))


KEYS = [
    "model.embed_tokens.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.10.mlp.up_proj.weight",
    "model.layers.12.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize(
    "layers, tied, expected",
    [
        ((0, 2), False, {0, 1}),
        ((2, 10), True, set()),
        ((10, 11), False, {2}),
        ((10, 12), False, {2, 3, 4, 5}),  # 12 is past the end: the loader must raise
        ((10, 12), True, {0, 2, 3, 4, 5}),
        ((0, 12), True, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_a_stage_takes_its_own_tensors(layers: tuple[int, int], tied: bool, expected: set[int], tmp_path: Path) -> None:
    assert names(layers, tied=tied, keys=KEYS, tmp_path=tmp_path) == {KEYS[i] for i in expected}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MissingError, match="model-00002-of-00002.safetensors"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(MissingError, match="model.layers.1.a"):
        open_checkpoint(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="model.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_with_a_way_out(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(UnsafeError, match="save_pretrained"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/hostname", "a/../../evil.safetensors", "a\0b"])
def test_an_index_cannot_point_out_of_the_model(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "evil.safetensors")
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UnsafeError, match="refused"):
        open_checkpoint(model)


def test_a_link_out_of_the_model_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "elsewhere.safetensors")
    (model / SINGLE_FILE).symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(UnsafeError, match="elsewhere"):
        open_checkpoint(model)
    (model / SINGLE_FILE).unlink()
    (model / "folder").symlink_to(tmp_path)
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "folder/elsewhere.safetensors"}}))
    with pytest.raises(UnsafeError, match="elsewhere"):
        open_checkpoint(model)


def test_links_inside_the_model_and_into_a_hub_cache_are_followed(tmp_path: Path) -> None:
    repo = tmp_path / "models--some--model"
    snapshot, blobs = repo / "snapshots" / "0123abcd", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": torch.ones(1)}, blobs / "5e5e")
    (snapshot / SINGLE_FILE).symlink_to("../../blobs/5e5e")
    assert list(open_checkpoint(snapshot).tensors) == ["a"]
    (tmp_path / "link").symlink_to(snapshot)
    assert list(open_checkpoint(tmp_path / "link").tensors) == ["a"]
    save_file({"a": torch.ones(1)}, repo / "beside")
    (snapshot / SINGLE_FILE).unlink()
    (snapshot / SINGLE_FILE).symlink_to("../../beside")
    with pytest.raises(UnsafeError):
        open_checkpoint(snapshot)
    with pytest.raises(UnsafeError):
        safe_path(snapshot, "../../blobs/5e5e")


@pytest.mark.parametrize(
    "index", ["{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[", "[]"]
)
def test_a_broken_index_is_named(index: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(InputError, match=INDEX_FILE):
        open_checkpoint(tmp_path)


def header(described: object) -> bytes:
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text


def one(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "too short"),
        (b"1234567", "too short"),
        (struct.pack("<Q", 2**60), "not safetensors"),
        (struct.pack("<Q", 1000) + b"{}", "cut short"),
        (header(b"{"), "malformed"),
        (header(b"[]"), "malformed"),
        (header(b"\xff\xfe"), "malformed"),
        (header({"a": 3}), "malformed"),
        (header({"a": {"dtype": "F32"}}), "malformed"),
        (header({"a": one(dtype="F8_E4M3", offsets=(2, 0))}), "whole|span"),
        (header({"a": one(dtype="F8_E4M3", offsets=(0, 2))}), "cut short"),
        (header({"a": one(shape=(3,))}) + bytes(8), "12 bytes"),
        (header({"a": one(shape=(-2,))}) + bytes(8), "whole numbers"),
        (header({"a": one(shape=(2.0,))}) + bytes(8), "whole numbers"),
        (header({"a": one(offsets=(8, 0))}) + bytes(8), "span"),
        (header({"a": one()}) + bytes(7), "cut short"),
        (header({"a": one()}) + bytes(9), "too long"),
        (header({"a": one(), "b": one()}) + bytes(8), "gap or overlap"),
        (header({"a": one(offsets=(8, 16))}) + bytes(16), "gap or overlap"),
        (header({"a": one(), "b": one(offsets=(4, 12))}) + bytes(12), "gap or overlap"),
    ],
)
def test_a_corrupt_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert SINGLE_FILE in str(caught.value)


@given(cut=st.integers(0, 200), flip=st.none() | st.tuples(st.integers(0, 199), st.integers(1, 255)))
def test_no_damage_to_a_header_gets_through(
    cut: int, flip: tuple[int, int] | None, damaged: Callable[[bytes], Path]
) -> None:
    """The file is cut anywhere, or one byte is changed. The result is our error, or tensors inside the file."""
    content = bytearray(GOOD)
    if flip is not None:
        content[flip[0] % len(content)] ^= flip[1]
    directory = damaged(bytes(content[: cut if flip is None else None]))
    try:
        entries = open_checkpoint(directory).tensors.values()
    except SarathiError:
        return
    size = (directory / SINGLE_FILE).stat().st_size
    assert all(0 <= entry.begin <= entry.begin + entry.num_bytes <= size for entry in entries)
    assert flip is not None or cut >= len(GOOD)


GOOD = header({"a": one(), "b": one(dtype="BF16", shape=(2, 2), offsets=(8, 16))}) + bytes(16)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Path]:
    directory = tmp_path_factory.mktemp("damaged")

    def write(content: bytes) -> Path:
        (directory / SINGLE_FILE).write_bytes(content)
        return directory

    return write
