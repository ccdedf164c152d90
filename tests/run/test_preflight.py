"""Options that are refused before a model is searched, and those that a resumed run must share with the first."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sarathi_pp.checkpoint.facts.layer_cache import StateCache
from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.cli.main import main
from sarathi_pp.config import ATTENTIONS, RunConfig
from sarathi_pp.core.cost.model import LayerCost
from sarathi_pp.errors import ConfigError
from sarathi_pp.model.attention import BACKENDS
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.run import preflight
from sarathi_pp.run.preflight import BatchOptions
from tests.core.cost.test_profile import PROFILE
from tests.model.families import write_checkpoint

ADDER = Path(__file__).parents[2] / "examples" / "tiny-adder"


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


REFUSED_EARLY = {
    "attention": (("--attention", "flashinfer"), 2, "'flashinfer' is not one of 'auto', 'numba'"),
    "device": (("--device", "cuda"), 2, "torch finds no CUDA device here"),
    "bytes without a unit": (("--kv-cache-memory", "4"), 2, "'4' is a number of bytes; give a unit, like 4GiB"),
    "page size": (("--page-size", "0"), 2, "--page-size"),
    "policy": (("--policy", "fastest"), 2, "fastest"),
    "profile": (("--profile", "absent.json"), 66, "absent.json"),
    "metrics port": (("--metrics-port", "70000"), 2, "70000"),
    "peer timeout": (("--peer-timeout", "0"), 2, "--peer-timeout is 0"),
    "temperature": (("--temperature", "-1"), 2, "-1"),
    "output": (("--output", "absent/out.jsonl"), 74, "absent"),
    "order of standard input": (("--order", "prefix", "--input", "-"), 2, "--input - is a stream"),
    "order of a device": (("--order", "prefix", "--input", "/dev/null"), 2, "--input /dev/null is a stream"),
    "order of arrivals": (("--order", "prefix", "--request-rate", "2"), 2, "with --request-rate 2 the lines arrive"),
    "window of no order": (("--order", "input", "--order-window", "5"), 2, "--order-window is 5; it must be left out"),
    "order window": (("--order-window", "0"), 2, "--order-window"),
    "input": (("--input", "absent.jsonl"), 66, "absent.jsonl"),
}


@pytest.mark.parametrize("stages", ["1", "2"])
@pytest.mark.parametrize("case", REFUSED_EARLY)
def test_options_are_checked_before_the_model_is_looked_for(case, stages, tmp_path, monkeypatch, capsys):
    """A wrong option then costs no download and no loading."""
    options, code, message = REFUSED_EARLY[case]

    def find_model(name):
        raise AssertionError(f"{name} is looked for")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "find_model", find_model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(preflight, "version", lambda package: "2.13.0+cpu")
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [3]}\n')
    files = ("--input", "in.jsonl", "--output", "out.jsonl")
    with pytest.raises(SystemExit) as left:
        main(["generate", "--model", "some/model", "--stages", stages, *files, *options])
    said = capsys.readouterr().err
    assert (left.value.code, message in said, "is looked for" in said) == (code, True, False), said


def test_attention_is_chosen_from_the_backends():
    assert ("auto", *BACKENDS) == ATTENTIONS
    with pytest.raises(ConfigError, match="attention is 'flashinfer'|attention='flashinfer'"):
        RunConfig(model="m", attention="flashinfer")


def test_another_input_format_is_another_question(output):
    rows = output.with_name("rows")
    rows.write_text('{"prompt": "1+1="}\n')
    asked = BatchOptions(RunConfig(model=str(ADDER)), str(rows), str(output), input_format="text")
    identity = preflight.identify(asked, preflight.preflight(asked)).identity
    with RunDirectory.claim(RunDirectory.default_path(str(output)), overwrite=False) as run_dir:
        run_dir.write_run({"identity": dict(identity)})
    output.write_text("line\n")
    again = replace(asked, start="resume")
    assert preflight.identify(again, preflight.preflight(again)).identity == identity
    other = replace(again, input_format="jsonl")
    with pytest.raises(ConfigError, match="input_format was text and is jsonl"):
        preflight.identify(other, preflight.preflight(other))


@pytest.mark.parametrize(("before", "now"), [("auto", "fp8"), ("fp8", "auto"), (None, "fp8")])
def test_an_output_is_not_resumed_with_another_type_of_keys_and_values(output, before, now):
    """An earlier version recorded no type. It had the computation's."""
    rows = output.with_name("rows")
    rows.write_text('{"prompt": "1+1="}\n')

    def asked(kind, start="new"):
        return BatchOptions(RunConfig(model=str(ADDER), kv_cache_dtype=kind), str(rows), str(output), start=start)

    first = asked(before or "auto")
    identity = dict(preflight.identify(first, preflight.preflight(first)).identity)
    if before is None:
        del identity["kv_cache_dtype"]
    with RunDirectory.claim(RunDirectory.default_path(str(output)), overwrite=False) as run_dir:
        run_dir.write_run({"identity": identity})
    output.write_text("line\n")
    again = asked(before or "auto", "resume")
    assert preflight.identify(again, preflight.preflight(again)).identity["kv_cache_dtype"] == (before or "auto")
    other, kind = asked(now, "resume"), before or "auto"
    said = f"kv_cache_dtype was {kind} and is {now}; give --kv-cache-dtype {kind}, name another --output"
    with pytest.raises(ConfigError, match=said):
        preflight.identify(other, preflight.preflight(other))


@pytest.mark.parametrize(
    ("kind", "device", "warned"), [("fp8", "cpu", True), ("auto", "cpu", False), ("fp8", "cuda", False)]
)
def test_float8_pages_are_said_to_be_slow_on_cpu(output, monkeypatch, kind, device, warned):
    rows = output.with_name("rows")
    rows.write_text('{"prompt": "1+1="}\n')
    monkeypatch.setattr(preflight, "check_machine", lambda config: None)
    config = RunConfig(model=str(ADDER), kv_cache_dtype=kind, device=device)
    warnings = preflight.preflight(BatchOptions(config, str(rows), str(output))).warnings
    assert any("fp8 saves memory on CPU, and costs time" in warning for warning in warnings) == warned


def test_facts_about_the_model_are_notes_and_no_warnings(tmp_path, output):
    write_checkpoint("llama", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    code = {"auto_map": {"AutoConfig": "their.Config"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | code))
    rows = output.with_name("rows")
    rows.write_text('{"prompt_token_ids": [3]}\n')
    config = RunConfig(model=str(tmp_path / "model"), policy="orca", chunk_size=8)
    checked = preflight.preflight(BatchOptions(config, str(rows), str(output)))
    (note,) = checked.notes
    assert "auto_map" in note and not any("auto_map" in warning for warning in checked.warnings)
    assert any("does not use --chunk-size" in warning for warning in checked.warnings)


def test_a_model_that_keeps_states_has_no_prefix_cache(output, monkeypatch):
    facts = replace(check_model(ADDER), own_caches=(StateCache((3, 8)),) * 5)
    monkeypatch.setattr(preflight, "check_model", lambda directory: facts)
    rows = output.with_name("rows")
    rows.write_text('{"prompt": "1+1="}\n')

    def notes(mode):
        config = RunConfig(model=str(ADDER), prefix_cache=mode)
        return preflight.preflight(BatchOptions(config, str(rows), str(output))).notes

    assert [len(notes(mode)) for mode in ("auto", "off")] == [1, 0]
    assert notes("auto")[0].startswith("the prefix cache is off: some layers keep one state per sequence")
    with pytest.raises(ConfigError, match=r"--prefix-cache is prompts; some layers keep one state .*Give .* off, or"):
        notes("prompts")
    monkeypatch.undo()
    assert notes("auto") == ()


def test_emulated_stages_of_a_hybrid_have_no_prefix_cache_either(output, tmp_path):
    rows = output.with_name("rows")
    rows.write_text('{"prompt_token_ids": [3]}\n')
    profile = tmp_path / "profile.json"

    def notes(kind, mode):
        layers = tuple(LayerCost(one, 1e-3, 1e-3, 0, 0, 0, page_bytes=0) for one in [kind] + ["attention"] * 7)
        cost = replace(PROFILE.cost, layer_costs=layers)
        profile.write_text(json.dumps(replace(PROFILE, cost=cost).to_json()))
        config = RunConfig(model="", emulate=profile, prefix_cache=mode, stages=2)
        return preflight.preflight(BatchOptions(config, str(rows), str(output))).notes

    assert notes("linear", "auto")[0].startswith("the prefix cache is off: some layers keep one state per sequence")
    assert notes("linear", "off") == notes("attention", "all") == ()
    with pytest.raises(ConfigError, match=r"--prefix-cache is all; some layers keep one state .*Give .* off, or"):
        notes("linear", "all")
