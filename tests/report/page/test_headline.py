from __future__ import annotations

from typing import Any

import pytest

from sarathi_pp.report.page.headline import advice_list, changed_command, headline, provenance

REPORT: dict[str, Any] = {
    "policy": "orca",
    "stages": 4,
    "wall_s": 8.26,
    "bubble_ratio": 0.48,
    "causes": {"ramp_s": 1.0, "prefill_decode_s": 3.0, "host_s": 1.5, "unexplained_s": -0.5},
    "advice": [{"text": "Use it.", "option": "--policy balanced", "gain_s": 2.6432}],
    "per_stage": [{"host": "a"}],
    "device": "cpu",
}
COMMAND = ["sarathi-pp", "generate", "-i", "p.jsonl", "-o", "out/a.jsonl", "--policy=orca", "--chunk-size", "64"]


def test_the_headline_is_made_of_the_figures() -> None:
    assert headline(REPORT) == (
        "orca kept 4 stages busy 52% of 8.26 s. 60% of the idle time is prefill decode: microbatches with and without "
        "prompt chunks follow each other. <strong><code>--policy balanced</code> would save 32%.</strong>"
    )
    assert headline(REPORT | {"stages": 1, "causes": None, "advice": []}) == "orca kept 1 stage busy 52% of 8.26 s."
    assert headline(REPORT | {"bubble_ratio": None}) == "No microbatch has come back in this run."
    more = [{"text": "", "option": "--input", "gain_s": 0.826}]
    assert "Twice the requests in one run would save 10%." in headline(REPORT | {"advice": more})


def test_a_cause_from_rough_costs_is_said_to_be_rough() -> None:
    assert "s. 60% of the idle time" in headline(REPORT | {"cost_error": 0.2})
    assert "s. Roughly 60% of the idle time" in headline(REPORT | {"cost_error": 0.21})


def test_advice_that_saves_no_time_is_no_headline() -> None:
    room = [{"text": "Use smaller pages.", "option": "--page-size 8", "gain_s": None}]
    assert "save" not in headline(REPORT | {"advice": room})
    assert "<code>--page-size 8</code>" in advice_list(REPORT | {"advice": room})


@pytest.mark.parametrize(
    ("words", "option", "changed"),
    [
        ([], "--policy balanced", "sarathi-pp generate -i p.jsonl --output out/a-changed.jsonl --policy balanced"),
        (
            ["--resume", "--run-dir", "d", "--overwrite"],
            "--inflight 5",
            "sarathi-pp generate -i p.jsonl --policy=orca --chunk-size 64 --output out/a-changed.jsonl --inflight 5",
        ),
    ],
)
def test_the_command_with_the_change_writes_an_output_of_its_own(words: list[str], option: str, changed: str) -> None:
    assert changed_command(REPORT | {"command": [*COMMAND, *words]}, option) == changed


def test_a_command_that_is_not_known_is_not_guessed() -> None:
    assert changed_command(REPORT, "--inflight 5") is None
    over_hosts = {"command": COMMAND, "per_stage": [{"host": "a"}, {"host": "b"}]}
    assert changed_command(REPORT | over_hosts, "--inflight 5") is None
    assert changed_command(REPORT | {"command": ["sarathi-pp", "bench"]}, "--inflight 5") is None


def test_provenance_names_model_host_date_versions_and_command() -> None:
    known = {"model": "m", "dtype": "float32", "started_unix_s": 86400.0, "sarathi_pp": "0.1.0", "command": COMMAND[:2]}
    found = provenance(REPORT | known)
    for fact in (
        "model m, float32 on cpu",
        "host a",
        "1970-01-02 00:00 UTC",
        "sarathi-pp 0.1.0",
        "sarathi-pp generate",
    ):
        assert fact in found
    assert "1970" not in provenance(REPORT | {"started_unix_s": 0.0})
