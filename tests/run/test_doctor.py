"""`sarathi-pp doctor` reports the choices of a run; its exit code is that with which a run would be refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sarathi_pp.checkpoint.facts.families import FAMILIES
from sarathi_pp.checkpoint.facts.layer_cache import StateCache
from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.cli.main import main
from sarathi_pp.model.attention import BACKENDS, choose_backend
from sarathi_pp.run import doctor
from tests.checkpoint.quantised import write_published
from tests.commands.processes import ROOT
from tests.model.families import write_checkpoint

ADDER = ROOT / "examples" / "tiny-adder"
CPU = torch.device("cpu")

Ask = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return the exit code, the document, and the text for people."""
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)

    def answer(*options: object) -> tuple[int, dict[str, Any], str]:
        with pytest.raises(SystemExit) as left:
            main(["doctor", "--json", *map(str, options)])
        said = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, json.loads(said.out.splitlines()[-1]), said.err

    return answer


def finding(document: dict[str, Any], topic: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in document["findings"] if (one["topic"], one["name"]) == (topic, name))
    return dict(found)


def test_it_names_what_a_run_uses_and_why_not_the_rest(ask: Ask) -> None:
    code, document, said = ask("--model", ADDER)
    assert code == document["exit_code"] == 0
    used = [one["name"] for one in document["findings"] if one["topic"] == "attention" and one["state"] == "used"]
    assert used == [choose_backend("auto", CPU, None).name]
    attention = [one for one in document["findings"] if one["topic"] == "attention"]
    assert [one["name"] for one in attention] == [*BACKENDS] and all(one["detail"] for one in attention)
    assert "not on cpu" in finding(document, "attention", "triton")["detail"]
    assert finding(document, "transport", "gloo")["state"] == "used"
    assert finding(document, "host", "interface")["detail"] == "lo (127.0.0.1)"
    assert "LlamaForCausalLM, 5 layers" in finding(document, "model", "architecture")["detail"]
    assert torch.__version__ in said and "LlamaForCausalLM" in said
    # On a busy machine the status line comes first.
    assert "\nsoftware " in f"\n{said}" and said.splitlines()[-1] == "OK: a run can start"


def test_a_package_that_is_not_there_is_named_with_its_remedy(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> object:
        return None if name in ("numba", "flash_attn", "triton") else object()

    monkeypatch.setattr("sarathi_pp.model.attention.find_spec", find)
    monkeypatch.setattr(doctor, "find_spec", find)
    code, document, _ = ask()
    assert code == 0
    assert finding(document, "attention", "sdpa")["state"] == "used"
    assert "pip install 'sarathi-pp[cpu]'" in finding(document, "attention", "numba")["detail"]
    assert finding(document, "packages", "numba")["state"] == "unused"


def unsupported(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))


def cut_short(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])


def pickled(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def broken_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")


def test_a_model_says_which_pages_its_requests_share(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = finding(ask("--model", ADDER)[1], "model", "prefix cache")
    assert shared["state"] == "used" and shared["detail"].startswith("all: ")
    monkeypatch.setattr(doctor, "product_name", lambda dtype, device: "torch")
    assert finding(ask("--model", ADDER)[1], "model", "prefix cache")["detail"].startswith("prompts: ")


@pytest.mark.parametrize(
    ("spoil", "name", "code"),
    [
        (shutil.rmtree, "files", 66),
        (unsupported, "architecture", 2),
        (cut_short, "architecture", 65),
        (pickled, "architecture", 77),
        (broken_tokenizer, "tokenizer", 65),
    ],
)
def test_a_model_that_a_run_would_refuse(
    spoil: Callable[[Path], None], name: str, code: int, ask: Ask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(ADDER, model)
    spoil(model)
    found, document, said = ask("--model", model)
    assert found == document["exit_code"] == code
    assert finding(document, "model", name)["state"] == "refused" and f"refused ({code})" in said
    assert said.splitlines()[-1].startswith("refused: ") and f"model {name}" in said.splitlines()[-1]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+2="}\n')
    with pytest.raises(SystemExit) as left:
        main(["generate", "--model", str(model), "-i", str(prompts), "-o", str(tmp_path / "out"), "--device", "cpu"])
    assert left.value.code == code
    capsys.readouterr()


def test_sums_are_compared_where_that_is_asked_for(ask: Ask, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(ADDER, model)
    assert ask("--model", model, "--verify", "sha256")[0] == 66
    (model / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    code, document, _ = ask("--model", model, "--verify", "sha256")
    assert code == 65 and "damaged" in finding(document, "model", "sha256")["detail"]


def test_the_interface_that_was_named_is_looked_for(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wire9")
    code, document, _ = ask()
    assert code == 2 and "wire9" in finding(document, "host", "interface")["detail"]


def test_a_version_outside_of_the_window_is_doubtful(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=9", "transformers>=5", "numba; extra == 'cpu'"])
    code, document, _ = ask()
    assert code == 0
    assert finding(document, "software", "torch")["state"] == "doubtful"
    assert finding(document, "software", "transformers")["state"] == "used"


def test_without_gloo_no_run_starts(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_gloo", lambda: False)
    code, document, _ = ask()
    assert code == 70 and finding(document, "transport", "gloo")["state"] == "refused"


def test_supported_models_are_listed(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    code, document, _ = ask("--models")
    assert code == 0
    assert [one["architecture"] for one in document["models"]] == list(FAMILIES)
    with pytest.raises(SystemExit):
        main(["doctor", "--models"])
    said = capsys.readouterr().out
    assert all(family.model_type in said and family.architecture in said for family in FAMILIES.values())


def test_the_memory_of_a_token_is_named(ask: Ask, tmp_path: Path) -> None:
    assert finding(ask("--model", ADDER)[1], "model", "KV pages")["detail"].startswith("a token takes ")
    write_checkpoint("deepseek_v3", tmp_path)
    found = finding(ask("--model", tmp_path)[1], "model", "KV pages")["detail"]
    assert found == (
        "a token takes 240 values, 48 in each of 5 layers: 0.9375 KiB, or 0.2344 KiB with --kv-cache-dtype fp8, which "
        "changes answers"
    )


def test_a_model_without_tokenizer_files_uses_no_tokenizer(ask: Ask, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    code, document, _ = ask("--model", tmp_path)
    found = finding(document, "model", "tokenizer")
    assert (code, found["state"]) == (0, "unused")
    assert found["detail"] == "no files, so prompts must be token ids, and outputs have no text"
    (tmp_path / "generation_config.json").write_text("[]")
    code, document, _ = ask("--model", tmp_path)
    assert (code, finding(document, "model", "tokenizer")["state"]) == (65, "refused")


def test_a_model_that_keeps_states_says_that_it_has_no_prefix_cache(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = (StateCache((4, 1 << 20), (1 << 20, 2)),) * 5
    monkeypatch.setattr(doctor, "check_model", lambda directory: replace(check_model(directory), own_caches=caches))
    monkeypatch.setattr(doctor, "kv_budget_bytes", lambda *_: 3 << 30)
    code, document, _ = ask("--model", ADDER)
    shared, states = (finding(document, "model", name) for name in ("prefix cache", "states"))
    assert code == 0 and shared["state"] == "unused" and shared["detail"].startswith("off: some layers keep one state")
    assert states["detail"] == (
        "120 MiB per sequence. With one stage, 17 sequences (--max-num-seqs) take 1.99 GiB of 3 GiB for states and KV "
        "pages"
    )
    backend = finding(document, "model", "state backend")
    assert (backend["state"], backend["detail"]) == (
        "used",
        "torch, because numba's kernels are not used: 2 channels are no multiple of 16",
    )
    monkeypatch.setattr(doctor, "kv_budget_bytes", lambda *_: 1 << 30)
    code, document, said = ask("--model", ADDER)
    refused = finding(document, "model", "states")
    assert (code, refused["state"]) == (2, "refused") and "try  --max-num-seqs 8 or less" in refused["detail"]
    assert said.splitlines()[-1] == "refused: model states (exit code 2)"
    monkeypatch.undo()
    assert "states" not in [one["name"] for one in ask("--model", ADDER)[1]["findings"]]


def test_a_model_in_fp8_says_how_much_memory_it_takes_as_it_is_stored(ask: Ask, tmp_path: Path) -> None:
    sizes = {}
    for family, form in (("llama", "fp8 blocks"), ("llama", "gptq int4"), ("gpt_oss", "mxfp4")):
        model = write_published(family, form, tmp_path / form).quantised
        sizes[form] = finding(ask("--model", model)[1], "model", "weights")["detail"]
    for form in ("fp8 blocks", "mxfp4"):
        said = sizes[form]
        found = re.search(r"([\d.e-]+) GiB in float32.*; ([\d.e-]+) GiB with --weights stored on a GPU, plus", said)
        assert found is not None and 0.1 < float(found[2]) / float(found[1]) < 0.7, said
    assert "--weights stored" not in sizes["gptq int4"]
