"""Environments that are unusual but legal, like those of pods and sandboxes: a run works, or prints one remedy."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands.processes import COMMAND, ROOT, Files
from tests.faults.jobs import started
from tests.missing import missing

pytestmark = pytest.mark.timeout(200)

ADDER = ROOT / "examples" / "tiny-adder"
CHAT = {"messages": [{"role": "user", "content": "1+1="}]}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path)
    files.input.write_text("".join(json.dumps(row) + "\n" for row in ({"prompt": "1+1="}, CHAT)))
    return files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the adder with a chat template."""
    model = tmp_path / "model"
    shutil.copytree(ADDER, model)
    (model / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    return model


def unshare(*command: str) -> tuple[str, ...]:
    """Return the command in its own namespaces, if this machine can make them."""
    done = subprocess.run(("unshare", command[0], "true"), capture_output=True, text=True)
    if done.returncode:
        missing(f"namespaces cannot be made here: {done.stderr}")
    return ("unshare", *command)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "pod-0", "MASTER_PORT": "29500"},
        pytest.param({"RANK": "", "WORLD_SIZE": ""}, marks=pytest.mark.full),
        {
            "RANK": "",
            "WORLD_SIZE": "",
            "LOCAL_RANK": "",
            "MASTER_ADDR": "",
            "MASTER_PORT": "",
            "GLOO_SOCKET_IFNAME": "",
        },
    ],
    ids=["a pod of its own", "with an address", "empty", "all empty"],
)
def test_variables_that_name_no_other_rank_leave_stages_its_meaning(variables, files, model):
    with started(files, model, "--stages", "2", **variables) as run:
        assert run.end() == "" and run.process.returncode == 0
    assert [row["text"] for row in files.rows()] == ["2", "2"]


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("1", "1")])
def test_a_rank_that_cannot_be_is_refused(rank, size, files, model):
    with started(files, model, RANK=rank, WORLD_SIZE=size) as run:
        said = run.end()
        assert run.process.returncode == 2, said
    assert said == f"ConfigError: RANK is {rank} and WORLD_SIZE is {size}; ranks are numbers from 0 to WORLD_SIZE - 1\n"


def test_a_loopback_that_is_down_is_named_once_before_anything_starts(files, model):
    with started(files, model, "--stages", "2", front=unshare("-n", *COMMAND)) as run:
        said = run.end()
        assert run.process.returncode == 2, said
    assert said.startswith("ConfigError: the loopback interface is down") and "`ip link set lo up`" in said
    assert said.count("Error") == 1 and "Traceback" not in said
    assert not files.output.exists()


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.full), "2"])
def test_without_proc_a_run_works(stages, files, model):
    """Messages of torch's own libraries about /proc/cpuinfo are not ours."""
    hidden = unshare("-m", "sh", "-c", 'mount -t tmpfs tmpfs /proc && exec "$0" "$@"', *COMMAND)
    with started(files, model, "--stages", stages, front=hidden) as run:
        said = run.end()
        assert run.process.returncode == 0 and "Traceback" not in said, said
    assert [row["text"] for row in files.rows()] == ["2", "2"]
