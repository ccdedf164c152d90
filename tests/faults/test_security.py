"""A run on one machine shows nothing to other users and leaves private files."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.commands.processes import ROOT, Files
from tests.faults.jobs import Started, started
from tests.machine import patient

pytestmark = pytest.mark.timeout(120)

PROMPTS = [tuple(range(3, 4 + row % 40)) for row in range(6000)]
OPTIONS = ("--max-new-tokens", "24", "--ignore-eos", "--max-num-seqs", "16")
LISTENING = "0A"
ADDER = ROOT / "examples" / "tiny-adder"


def listeners(run: Started) -> list[str]:
    """Return the addresses at which its processes listen, as the kernel writes them: in hexadecimal."""
    inodes = set()
    for process in run.family:
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                target = descriptor.readlink().name
            except OSError:
                continue  # closed meanwhile
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{run.process.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_nobody_outside_this_machine_can_connect(stages, model, tmp_path):
    files = Files(tmp_path)
    files.write_prompts(PROMPTS)
    with started(files, model, *OPTIONS, "--stages", stages, "--metrics-port", "0") as run:
        run.wait_for_lines(5)
        found = listeners(run)
        # The metrics, and the sockets to which ranks connect.
        assert len(found) >= int(stages)
        assert set(found) <= LOOPBACK, found


def test_a_listener_on_every_interface_would_be_seen(tmp_path):
    """The test above can fail."""

    program = "import socket, sys; s = socket.create_server(('0.0.0.0', 0)); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        (sys.executable, "-c", program), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert socket.inet_aton("0.0.0.0").hex() in listeners(Started(process, Files(tmp_path)))
        process.communicate("")


def test_what_is_left_is_private(model, tmp_path):
    files = Files(tmp_path)
    files.write_prompts(PROMPTS)
    with started(files, model, *OPTIONS, "--stages", "2") as run:
        run.wait_for_lines(5)
        stores = {process.environ().get("SARATHI_PP_STORE") for process in run.family} - {None}
        assert len(stores) == 1
        assert stat.S_IMODE(Path(stores.pop()).parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(files.output.stat().st_mode) == 0o600
        assert stat.S_IMODE(files.run.stat().st_mode) == 0o700


@pytest.mark.parametrize("killed", ["a stage", "the launcher"])
def test_nothing_is_left_outside_the_run_directory(killed, model, tmp_path):
    """No shared memory and no temporary directory remains, even if a stage or the launcher was killed."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    files = Files(tmp_path)
    files.write_prompts(PROMPTS)
    with started(files, model, *OPTIONS, "--stages", "2", TMPDIR=str(scratch)) as run:
        run.wait_for_lines(5)
        assert list(scratch.iterdir())
        family = run.family
        opened = {file.path for process in family for file in process.open_files()}
        assert not [path for path in opened if path.startswith("/dev/shm")]
        (run.stage(1) if killed == "a stage" else run.process).kill()
        run.end()
    assert not psutil.wait_procs(family, timeout=patient(5))[1]
    assert not list(scratch.iterdir())


def test_prompts_are_in_no_log(tmp_path):
    """Messages and traces hold no prompt or answer, as text or as ids; an error of a row holds none either."""
    files, model = Files(tmp_path), tmp_path / "model"
    shutil.copytree(ADDER, model)
    refused = "{% if 'bad' in messages[0].content %}{{ raise_exception('no ' + messages[0].content) }}{% endif %}"
    (model / "chat_template.jinja").write_text(refused + "{{ messages[0].content }}")
    ids, text = [13, 14, 13, 12, 11, 10], "271828+314159="
    rows: tuple[dict[str, object], ...] = (
        {"prompt_token_ids": ids},
        {"prompt_token_ids": [*ids, 99999999]},
        {"prompt_token_ids": [5], "suffix": f"{ids}"},
        {"prompt_token_ids": [5], f"{ids}": 1},
        {"prompt_token_ids": f"{ids}"},
        {"prompt": text},
        {"prompt": text, "stop": text},
        {"prompt": text, "stop": ["", text]},
        {"prompt": [text, text]},
        {"prompt": text * 1000},
        {"messages": [{"role": "user", "content": text}]},
        {"messages": [{"role": "user", "content": f"bad {text}"}]},
        {"messages": [{"role": "user", "content": [{"type": text}]}]},
    )
    files.input.write_text("\n".join(map(json.dumps, rows)))
    with started(files, model, *OPTIONS, "--stages", "2") as run:
        said = run.end()
        assert run.process.returncode == 3
    found = {row["id"]: row for row in map(json.loads, files.output.read_text().splitlines())}
    assert f"no bad {text}" in found["12"]["error"]["message"]
    assert {id for id, row in found.items() if "text" in row} == {"1", "4", "6", "7", "11"}
    answer = found["6"]["text"]
    assert len(answer) > 12  # too long to be a time
    secrets = ("13, 14, 13", "13,14,13", text.removesuffix("="), answer)
    texts = [said, *(path.read_text() for path in files.run.rglob("*") if path.is_file())]
    assert len(texts) > 4
    for one in texts:
        assert not [secret for secret in secrets if secret in one]
