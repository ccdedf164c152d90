"""The position of every tensor in a checkpoint: file, place and shape, from safetensors headers. No torch.

    8 bytes      N bytes                       all other bytes of the file
    N (LE u64)   JSON: name -> dtype, shape,   tensors, each at its [begin, end), no gaps
                 data_offsets [begin, end)

The headers are enough to refuse a bad checkpoint, to size a stage and to fingerprint a model before any rank starts.
A path in a checkpoint is untrusted. It must stay inside the model's directory, or be the blob link of a Hugging Face
hub cache.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sarathi_pp.checkpoint.kind import INDEX_FILE, SINGLE_FILE, check_weights
from sarathi_pp.errors import InputError, MissingError, SarathiError, UnsafeError

# Other types are accepted as they are, since safetensors has more and gains some. Their size is taken from the header.
ITEM_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}

_MAX_HEADER_BYTES = 100_000_000
# The beginning of the file that a clone has instead of a large file that was not fetched.
_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The position of one stored tensor.

    Attributes:
        file: the file that holds it.
        dtype: safetensors' name of the type, such as BF16.
        begin: byte in the file at which its data starts.
        num_bytes: length of its data.
        turned: the weight has the last two dimensions the other way round.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a model.

    Attributes:
        tensors: the tensors by stored name. Those of a text part have the names of a text model (wrapper.py).
        headers: the headers of its files by file name, sorted.
        aliases: for each tensor of a text part, its names in the file and in transformers' multimodal model.
    """

    tensors: Mapping[str, TensorEntry]
    headers: Mapping[str, bytes]
    aliases: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Turn errors of the operating system while reading into an InputError that names the file.

    FileNotFoundError passes through.
    """
    try:
        yield
    except (SarathiError, FileNotFoundError):  # some SarathiErrors are OSErrors too
        raise
    except OSError as error:
        raise InputError(f"{error.filename or directory} cannot be read: {error.strerror}") from error


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of every safetensors file of the model.

    Raises:
        MissingError: a file or an indexed tensor does not exist.
        InputError: a file cannot be read, is not well-formed safetensors or is cut short.
        UnsafeError: weights are pickled, or a path leaves the model's directory.
    """
    with reading(directory):
        return _open_checkpoint(directory)


def _open_checkpoint(directory: Path) -> Checkpoint:
    placed = _weight_map(directory)
    names = sorted(set(placed.values())) if placed is not None else [SINGLE_FILE]
    headers: dict[str, bytes] = {}
    stored: dict[str, dict[str, TensorEntry]] = {}
    for name in names:
        file = safe_path(directory, name)
        if not file.is_file():
            raise MissingError(f"{directory}: weight file {name} is not there; download the model again")
        headers[name] = _read_header(file)
        stored[name] = _parse_header(file, headers[name])
    if placed is None:
        return Checkpoint(stored[SINGLE_FILE], headers)
    tensors = {}
    for key, name in placed.items():
        if key not in stored[name]:
            raise MissingError(f"{directory}: {name} lacks {key}, which {INDEX_FILE} lists; download it again")
        tensors[key] = stored[name][key]
    return Checkpoint(tensors, headers)


def safe_path(directory: Path, name: str) -> Path:
    """Return the file `name` of a model directory, with links followed.

    A hub cache keeps files as links `<repo>/snapshots/<revision>/<name> -> ../../blobs/<hash>`. Links into that `blobs`
    folder are the only allowed way out of the directory.

    Raises:
        UnsafeError: the file is outside the directory.
    """
    root = directory.resolve()
    if Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name or "\0" in name:
        raise UnsafeError(f"{directory}: refused file name {name!r}: it must be relative and inside the directory")
    path = (root / name).resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(path.is_relative_to(folder) for folder in allowed):
        raise UnsafeError(f"{directory}: refused {name}, a link to {path} outside; copy the file if you trust it")
    return path


def read_json(directory: Path, name: str) -> dict[str, object]:
    """Return one JSON object of the model directory.

    Raises:
        MissingError: the file does not exist.
        InputError: it cannot be read or is no JSON object.
        UnsafeError: it is outside the directory.
    """
    path = safe_path(directory, name)
    try:
        with reading(directory):
            content = path.read_bytes()
        _refuse_pointer(path, content)
        value = json.loads(content)
    except FileNotFoundError:
        raise MissingError(f"{directory}: {name} is not there; is this a model directory?") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds a JSON {type(value).__name__}; expected an object {{...}}")
    return value


def refuse_pointers(directory: Path) -> None:
    """Raise InputError if a small file of the model, such as its tokenizer, is a Git LFS pointer."""
    for path in sorted(directory.iterdir()):
        small = path.suffix in (".json", ".model", ".txt", ".jinja") and path.is_file()
        if small and path.stat().st_size <= _POINTER_BYTES:
            _refuse_pointer(path, path.read_bytes())


def _refuse_pointer(path: Path, content: bytes) -> None:
    if content.startswith(_POINTER):
        raise InputError(
            f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent}, or download the "
            f"model again"
        )


def indexed_files(directory: Path) -> list[str]:
    """Return the weight files that the index names, sorted.

    Raises:
        MissingError: there is no index.
        InputError: the index cannot be read.
    """
    return sorted(set(_read_index(directory).values()))


def stored_names(directory: Path) -> tuple[str, ...]:
    """Return the names of the stored tensors; none if the weights are missing or cannot be read."""
    try:
        if (directory / SINGLE_FILE).is_file():
            return tuple(json.loads(_read_header(safe_path(directory, SINGLE_FILE))))
        return tuple(_read_index(directory))
    except (OSError, ValueError, TypeError, SarathiError):  # open_checkpoint reports it
        return ()


def _weight_map(directory: Path) -> dict[str, str] | None:
    """Return the file name of each tensor by stored name, or None if the model is one file.

    If there are both a single file and an index, the file is used, as in transformers.
    """
    check_weights(str(directory), [path.name for path in directory.iterdir()])
    if (directory / SINGLE_FILE).exists() or (directory / SINGLE_FILE).is_symlink():
        return None
    return _read_index(directory)


def _read_index(directory: Path) -> dict[str, str]:
    placed = read_json(directory, INDEX_FILE).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(v, str) for v in placed.values()):
        raise InputError(f"{directory / INDEX_FILE}: weight_map must be an object with a file name for each tensor")
    return placed


def _read_header(file: Path) -> bytes:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if _POINTER.startswith(prefix) and prefix:
            _refuse_pointer(file, prefix + stream.read(_POINTER_BYTES))
        if len(prefix) < 8:
            raise InputError(f"{file}: {len(prefix)} bytes are too short for a safetensors file; download it again")
        (length,) = struct.unpack("<Q", prefix)
        if length > _MAX_HEADER_BYTES:
            raise InputError(
                f"{file} is not safetensors: it announces a header of {length} bytes, and the limit is "
                f"{_MAX_HEADER_BYTES}; download it again"
            )
        header = stream.read(length)
    if len(header) < length:
        raise InputError(f"{file}: cut short inside its header of {length} bytes; download it again")
    return header


def _parse_header(file: Path, header: bytes) -> dict[str, TensorEntry]:
    try:
        described = json.loads(header)
        described.pop("__metadata__", None)
        entries = {key: _entry(file, 8 + len(header), value) for key, value in described.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{file}: malformed safetensors header: {error}; download it again") from None
    end = 8 + len(header)
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if entry.begin != end:
            raise InputError(
                f"{file}: gap or overlap: tensor {key} begins at byte {entry.begin}, expected {end}; download it again"
            )
        end += entry.num_bytes
    size = file.stat().st_size
    if size != end:
        kind = "cut short" if size < end else "too long"
        raise InputError(f"{file}: {kind}: {size} bytes, its header describes {end}; download it again")
    return entries


def _entry(file: Path, data_start: int, described: Mapping[str, Any]) -> TensorEntry:
    dtype, shape = str(described["dtype"]), tuple(described["shape"])
    begin, end = described["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"shape {shape} and data_offsets must be whole numbers of at least 0")
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else end - begin
    if num_bytes < 0 or end - begin != num_bytes:
        raise ValueError(f"shape {shape} of {dtype} is {num_bytes} bytes, its data_offsets span {end - begin}")
    return TensorEntry(file, dtype, shape, data_start + begin, num_bytes)
