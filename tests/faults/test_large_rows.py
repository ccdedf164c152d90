"""Rows that ask for more than the machine has: of memory by their length, of anything by their chat template."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.commands.processes import COMMAND, Files, environment
from tests.faults.jobs import started
from tests.machine import patient

ADDER = Path(__file__).parents[2] / "examples" / "tiny-adder"
MEASURE = (
    "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024); sys.exit(code)"
)

pytestmark = pytest.mark.timeout(200)


def peak_bytes(files: Files, model: Path) -> int:
    """Return the peak bytes of the largest process of a run in which some rows fail."""
    command = (sys.executable, "-c", MEASURE, *COMMAND, *files.options(model, "--quiet", "--overwrite"))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=patient(150))
    assert done.returncode == 3, done.stderr
    return int(done.stdout)


def with_template(folder: Path, template: str) -> Path:
    model = folder / "model"
    shutil.copytree(ADDER, model)
    (model / "chat_template.jinja").write_text(template)
    return model


def test_a_long_prompt_takes_no_more_than_its_line(tmp_path):
    """Encoded it would take 370 bytes per character. Only its line is in memory: as bytes, as text and as a value.

    The messages are also sent to the rendering process and back. With that, up to 11 bytes per character were seen.
    """
    files = Files(tmp_path)
    model = with_template(tmp_path, "{{ messages[0].content }}")
    sizes = (2_000, 20_000_000)
    peaks = []
    for size in sizes:
        rows = [{"id": "long", "prompt": "1+" * (size // 2)}, {"id": "fine", "prompt": "12+30=", "max_tokens": 2}]
        rows.append({"id": "said", "messages": [{"role": "user", "content": "1+" * (size // 2)}]})
        files.input.write_text("".join(json.dumps(row) + "\n" for row in rows))
        peaks.append(peak_bytes(files, model))
        found = {row["id"]: row for row in map(json.loads, files.output.read_text().splitlines())}
        assert found["long"]["error"]["code"] == "context_length_exceeded"
        assert found["said"]["error"]["code"] in ("context_length_exceeded", "chat_template_error")
        assert found["fine"]["token_ids"]
    assert max(peaks) - peaks[0] < 20 * sizes[-1], peaks


RENDERS = """
import os, threading, time
from sarathi_pp.text.chat_template import Renderer

renderer = Renderer()
render = lambda template: renderer.render(template, [{"role": "user", "content": "x"}], {})
render("x")
print(renderer.pid, flush=True)
threading.Thread(target=render, args=("{{ 7 ** 500000000 }}",), daemon=True).start()
time.sleep(1)
os._exit(75)
"""


def test_a_template_that_computes_ends_with_the_process_that_asked():
    """Its process may end in any way. The rendering process cannot be notified, because it checks nothing meanwhile."""
    command = (sys.executable, "-c", RENDERS)
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, timeout=patient(60))
    assert done.returncode == 75
    deadline_s = time.monotonic() + patient(3 * 1.0)
    while psutil.pid_exists(renders := int(done.stdout)) and psutil.Process(renders).status() != "zombie":
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize(
    "expression",
    [pytest.param("(messages|length + 6) ** 500000000", marks=pytest.mark.full), "'x' * 10 ** 11"],
    ids=["time", "memory"],
)
def test_a_template_that_takes_all_there_is_costs_its_row_alone(expression, tmp_path):
    """The template uses more than constants, because constants are computed when the template is read."""
    files = Files(tmp_path)
    model = with_template(
        tmp_path, "{% if messages[0].role == 'bad' %}{{ " + expression + " }}{% endif %}{{ messages[0].content }}"
    )
    rows = [{"id": role, "messages": [{"role": role, "content": "12+30="}]} for role in ("good", "bad", "user")]
    files.input.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with started(files, model, "--max-new-tokens", "2") as run:
        said = run.end()
        assert run.process.returncode == 3, said
    found = {row["id"]: row for row in map(json.loads, files.output.read_text().splitlines())}
    assert found["bad"]["error"]["code"] == "chat_template_error" and "it " in found["bad"]["error"]["message"]
    assert all(found[name]["token_ids"] for name in ("good", "user"))


def test_a_signal_is_heeded_while_a_template_computes(tmp_path):
    """The rendering process ends too."""
    files = Files(tmp_path)
    model = with_template(tmp_path, "{{ 7 ** 500000000 }}")
    rows = [{"prompt": "12+30=", "max_tokens": 2}] + [{"messages": [{"role": "user", "content": "1"}]}] * 20
    files.input.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with started(files, model) as run:
        run.wait_for_lines(1)
        time.sleep(1)
        family, began_s = run.family, time.monotonic()
        run.process.terminate()
        said = run.end()
        assert time.monotonic() - began_s < patient(3 * 3.0)
        assert run.process.returncode == 75 and "stopped by SIGTERM" in said, said
        assert not psutil.wait_procs(family, timeout=patient(1))[1]
