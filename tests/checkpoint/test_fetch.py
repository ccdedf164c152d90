"""Files are fetched from a Hub repository in order: config.json first, then only the files that a run reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sarathi_pp.checkpoint.fetch import find_model
from sarathi_pp.errors import InputError, MissingError, UnsupportedModelError
from tests.checkpoint.hub import COMMIT, NAME, serving
from tests.machine import patient

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "num_attention_heads": 1,
    "vocab_size": 4,
    "max_position_embeddings": 8,
}
SHARDS = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
SMALL = ["generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"]
# Other files of repositories. Other engines have fetched each of them.
BESIDE = [
    "consolidated.safetensors",
    "model-00001-of-00001.safetensors",
    "original/consolidated.00.pth",
    "original/params.json",
    "onnx/model.safetensors",
    "onnx/config.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "modeling_evil.py",
    "model.gguf",
    "README.md",
]


def repository(directory: Path, *names: str, config: dict[str, Any] | None = None) -> Path:
    for name in ("config.json", *names):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(CONFIG | (config or {})) if name == "config.json" else f'{{"of": "{name}"}}')
    return directory


def find(home: Path, endpoint: str, *, offline: str = "0", function: str = "find_model") -> tuple[int, str]:
    """Return the exit code of a process that looks for the model, and the directory it found or the error."""
    code = (
        "import sys\nfrom sarathi_pp.errors import SarathiError\n"
        f"from sarathi_pp.checkpoint.fetch import {function}\n"
        f"try:\n    print({function}(sys.argv[1]))\n"
        "except SarathiError as error:\n    print(type(error).__name__, error)\n    sys.exit(error.exit_code)\n"
    )
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": offline}
    command = [sys.executable, "-c", code, NAME]
    done = subprocess.run(command, env={**os.environ, **hub}, capture_output=True, text=True, timeout=patient(120))
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("sharded", [True, False])
def test_config_comes_first_and_one_format_of_the_weights_last(sharded: bool, tmp_path: Path) -> None:
    """All files are of one commit, although the branch moves after the first request. Later no hub is needed."""
    weights = SHARDS if sharded else ["model.safetensors"]
    index = ["model.safetensors.index.json"] if sharded else []
    directory = repository(tmp_path / "hub", *weights, *index, *SMALL, *BESIDE)
    if sharded:
        placed = {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}
        (directory / index[0]).write_text(json.dumps({"weight_map": placed}))
    served: list[str] = []
    with serving(directory=directory, served=served, gone="f" * 40) as endpoint:
        code, found = find(tmp_path / "home", endpoint)
        assert code == 0, found
        assert served[0] == "config.json"
        assert set(served[1 : 1 + len(SMALL + index)]) == {*SMALL, *index}
        assert sorted(served[1 + len(SMALL + index) :]) == weights
        snapshot = Path(found)
        assert snapshot.name == COMMIT
        assert {path.name for path in snapshot.rglob("*")} == set(served)
        served.clear()
        assert find(tmp_path / "home", endpoint) == (0, found)
        assert served == [], "it is fetched once"
    for offline in "01":
        assert find(tmp_path / "home", endpoint, offline=offline) == (0, found)


def test_for_a_plan_nothing_but_config_is_fetched(tmp_path: Path) -> None:
    directory = repository(tmp_path / "hub", "model.safetensors", *SMALL)
    served: list[str] = []
    with serving(directory=directory, served=served) as endpoint:
        code, found = find(tmp_path / "home", endpoint, function="find_config")
    assert (code, served, Path(found).name) == (0, ["config.json"], COMMIT)
    assert find(tmp_path / "home", endpoint, offline="1", function="find_config") == (0, found)


@pytest.mark.parametrize(
    ("config", "names", "code", "message"),
    [
        ({"architectures": ["FalconForCausalLM"], "model_type": "falcon"}, SHARDS[:1], 2, "not supported"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, SHARDS[:1], 2, "quantised weights (bitsandbytes)"),
        ({"hidden_size": "4"}, ["model.safetensors"], 65, "hidden_size is '4'"),
        ({}, ["pytorch_model.bin"], 77, "pickled"),
        ({}, ["model.gguf"], 2, "GGUF"),
        ({}, ["model.safetensors", "modules.json"], 2, "embedding model"),
    ],
)
def test_what_cannot_run_is_refused_with_nothing_but_its_config_fetched(
    config: dict[str, Any], names: list[str], code: int, message: str, tmp_path: Path
) -> None:
    served: list[str] = []
    directory = repository(tmp_path / "hub", *names, *SMALL, config=config)
    with serving(directory=directory, served=served) as endpoint:
        found, said = find(tmp_path / "home", endpoint)
    assert (found, message in said) == (code, True), said
    assert served == ["config.json"]


@pytest.mark.parametrize(
    ("names", "code", "message"),
    [
        (["model.Q4.gguf"], 2, "GGUF"),
        (["unet/config.json", "model_index.json"], 2, "diffusers"),
        (["a.txt"], 66, "config"),
    ],
)
def test_a_repository_without_config_is_named_by_its_files(
    names: list[str], code: int, message: str, tmp_path: Path
) -> None:
    served: list[str] = []
    directory = repository(tmp_path / "hub", *names)
    (directory / "config.json").unlink()
    with serving(directory=directory, served=served) as endpoint:
        found, said = find(tmp_path / "home", endpoint)
    assert (found, message in said, NAME in said) == (code, True, True), said
    assert served == []


def test_an_adapter_is_named_with_its_base(tmp_path: Path) -> None:
    directory = repository(tmp_path / "hub", "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with serving(directory=directory, served=(served := [])) as endpoint:
        code, said = find(tmp_path / "home", endpoint)
    assert code == 2 and "is an adapter (LoRA or alike) of some/base" in said, said
    assert served == ["config.json", "adapter_config.json"]


def test_paths_that_are_no_directory(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match="is GGUF"):
        find_model(str(tmp_path / "model.gguf"))
    with pytest.raises(InputError, match="is a file; give the directory"):
        find_model(str(tmp_path / "notes"))
    with pytest.raises(MissingError, match="no such directory"):
        find_model(str(tmp_path / "absent"))
