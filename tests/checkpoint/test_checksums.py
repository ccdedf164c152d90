import hashlib

import pytest

from sarathi_pp.checkpoint.checksums import SUMS_FILE, verify_checksums
from sarathi_pp.errors import InputError, MissingError
from tests.model.families import write_checkpoint


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    write_checkpoint("llama", directory, shards=2)
    return directory


def weight_files(directory):
    return sorted(directory.glob("*.safetensors"))


def sum_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_sums(directory):
    lines = [f"{sum_of(path)}  {path.name}\n" for path in weight_files(directory)]
    (directory / SUMS_FILE).write_text("".join(lines))


def write_notes(directory):
    folder = directory / ".cache/huggingface/download"
    folder.mkdir(parents=True)
    for path in weight_files(directory):
        (folder / f"{path.name}.metadata").write_text(f"{'0' * 40}\n{sum_of(path)}\n1700000000.0\n")


def make_hub_cache(directory):
    """Turn the directory into a snapshot whose weight files are links to blobs named by their sums."""
    blobs = directory.parent / "blobs"
    blobs.mkdir()
    snapshot = directory.parent / "snapshots" / "main"
    snapshot.parent.mkdir()
    directory.rename(snapshot)
    for path in weight_files(snapshot):
        blob = blobs / sum_of(path)
        path.rename(blob)
        path.symlink_to(blob)
    return snapshot


@pytest.mark.parametrize("known_by", [write_sums, write_notes, make_hub_cache])
@pytest.mark.parametrize("shard", [0, 1])
def test_a_flipped_bit_is_found(known_by, shard, model):
    directory = known_by(model) or model
    verify_checksums(directory)
    path = weight_files(directory)[shard].resolve()
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="is damaged: SHA-256 .* download it again"):
        verify_checksums(directory)


def test_a_file_of_which_nothing_is_known_is_said(model):
    with pytest.raises(MissingError, match="no SHA-256 of model-00001.* is known"):
        verify_checksums(model)
    write_sums(model)
    lines = (model / SUMS_FILE).read_text().splitlines()
    (model / SUMS_FILE).write_text(lines[0] + "\nnonsense\n")
    with pytest.raises(MissingError, match="no SHA-256 of model-00002.* is known"):
        verify_checksums(model)
