"""launch/kubernetes: validated against types, its failure policy by exit code, and its commands run as two nodes."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.reference_pages import EXIT_CODES
from tests.commands.processes import ROOT, free_port
from tests.launch.manifests import Document, action_on, pods, problems
from tests.launch.nodes import ADDER, EMULATED, PROMPTS, SMALL, started, write_token_ids

pytestmark = pytest.mark.timeout(280)

FILES = sorted((ROOT / "launch" / "kubernetes").glob("*.yaml"))


def documents() -> dict[str, Document]:
    found = [one for file in FILES for one in yaml.safe_load_all(file.read_text())]
    return {one["kind"]: one for one in found}


def test_every_manifest_is_legal() -> None:
    found = documents()
    assert {*found} == {"TrainingRuntime", "TrainJob", "LeaderWorkerSet"}
    assert not {kind: said for kind, one in found.items() if (said := problems(one))}


JOB = ("TrainingRuntime", "spec", "template", "spec", "replicatedJobs", 0, "template", "spec")
GROUP = ("LeaderWorkerSet", "spec", "leaderWorkerTemplate")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("TrainJob", "apiVersion"), "trainer.kubeflow.org/v1"),
        (("TrainJob", "kind"), "PyTorchJob"),
        (("TrainJob", "spec", "runtimeRef"), {"kind": "TrainingRuntime"}),
        (("TrainJob", "spec", "trainer", "numNodes"), "2"),
        (("TrainJob", "spec", "trainer", "nodes"), 2),
        (("TrainJob", "spec", "trainer", "args"), "--model /data/model"),
        (("TrainJob", "spec", "trainer", "env", 0, "value"), 1),
        (("TrainingRuntime", "spec", "mlPolicy", "torch"), {"numProcPerNode": "auto"}),
        ((*JOB, "backofLimit"), 3),
        ((*JOB, "podFailurePolicy", "rules", 1, "action"), "Retry"),
        ((*JOB, "podFailurePolicy", "rules", 1, "onExitCodes", "operator"), "Is"),
        ((*JOB, "podFailurePolicy", "rules", 1, "onExitCodes", "values"), [75, 3]),
        ((*JOB, "podFailurePolicy", "rules", 1, "onExitCodes", "values"), [0, 75]),
        ((*JOB, "podFailurePolicy", "rules", 1, "onExitCodes", "containerName"), "trainer"),
        ((*JOB, "template", "spec", "restartPolicy"), "OnFailure"),
        ((*JOB, "template", "spec", "containers", 0, "volumeMounts", 1, "name"), "memory"),
        ((*JOB, "template", "spec", "volumes", 1, "emptydir"), {}),
        (("LeaderWorkerSet", "apiVersion"), "leaderworkerset.x-k8s.io/v1alpha1"),
        (("LeaderWorkerSet", "spec", "replica"), 1),
        ((*GROUP, "size"), "2"),
        ((*GROUP, "restartPolicy"), "Always"),
        ((*GROUP, "workerTemplate", "spec", "containers", 0, "comand"), ["bash"]),
        ((*GROUP, "leaderTemplate", "spec", "containers", 0, "ports", 0, "containerPort"), "29500"),
        ((*GROUP, "leaderTemplate", "spec", "volumes"), []),
    ],
    ids=lambda part: ".".join(map(str, part)) if isinstance(part, tuple) else None,
)
def test_what_is_not_legal_is_found(path: tuple[str | int, ...], value: Any) -> None:
    document = copy.deepcopy(documents()[str(path[0])])
    place: Any = document
    for part in path[1:-1]:
        place = place[part]
    assert place.get(path[-1]) != value if isinstance(place, dict) else True
    place[path[-1]] = value
    assert problems(document)


def test_a_lost_stage_is_tried_again_and_nothing_else_is() -> None:
    ((_, job),) = pods(documents()["TrainingRuntime"])
    assert job is not None and job["backoffLimit"] > 0
    codes = EXIT_CODES.keys() - {0}
    assert {code: action_on(job, code, {}) for code in codes} == {
        code: "Count" if code == 75 else "FailJob" for code in codes
    }
    assert action_on(job, 137, {"DisruptionTarget": "True"}) == "Ignore"


def test_pods_that_wait_for_their_place_fail_no_job() -> None:
    """Nodes may be assigned at different times. Agents that do not find each other end with 2, without a retry."""
    given = {one["name"]: one["value"] for one in documents()["TrainJob"]["spec"]["trainer"]["env"]}
    name, _, seconds = given["PET_RDZV_CONF"].partition("=")
    assert name == "timeout" and int(seconds) >= 3600


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_every_variable_is_explained_in_the_line_before_it(file: Path) -> None:
    lines = [line.strip() for line in file.read_text().splitlines()]
    variables = [at for at, line in enumerate(lines) if re.fullmatch(r"- name: [A-Z0-9_]+", line)]
    assert variables and not [lines[at] for at in variables if not lines[at - 1].startswith("# ")]


def local(words: list[str], work: Path) -> list[str]:
    """Replace paths of the image and volumes in a container's words with local ones, and costly options."""
    paths = {"/app/": f"{ROOT}/", "/data/model": str(ADDER), "/data/": f"{work}/", "/spool/": f"{work}/spool/"}
    for there, here in paths.items():
        words = [word.replace(there, here) for word in words]
    return words


def test_the_train_job_runs_as_two_pods(tmp_path: Path) -> None:
    """With the variables that Trainer sets: see EnforceMLPolicy in its pkg/runtime/framework/plugins/torch."""
    trainer = documents()["TrainJob"]["spec"]["trainer"]
    (tmp_path / "prompts.jsonl").write_text(PROMPTS.read_text())
    command = [*local([*trainer["command"], *trainer["args"]], tmp_path), *SMALL]
    given = {one["name"]: one["value"] for one in trainer["env"]}
    given |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    given |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    with (
        started(command, tmp_path, PET_NODE_RANK="1", **given) as second,
        started(command, tmp_path, PET_NODE_RANK="0", **given) as first,
    ):
        assert [node.end()[0] for node in (first, second)] == [0, 0]
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 24


def test_pods_of_a_job_that_was_told_to_stop_are_made_again(tmp_path: Path) -> None:
    """All pods restart: a Job's index that has ended with 0 has succeeded, and the new pod 0 would wait for it."""
    trainer = documents()["TrainJob"]["spec"]["trainer"]
    write_token_ids(tmp_path / "prompts.jsonl", 600)
    answers = tmp_path / "answers.jsonl"
    command = local([*trainer["command"], *trainer["args"]], tmp_path)
    model = command.index("--model")
    command[model : model + 2] = EMULATED
    given = {one["name"]: one["value"] for one in trainer["env"]}
    given |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    for told in (True, False):
        given["PET_MASTER_PORT"] = str(free_port())
        with (
            started(command, tmp_path, PET_NODE_RANK="1", **given) as second,
            started(command, tmp_path, PET_NODE_RANK="0", **given) as first,
        ):
            if told:
                wait_for(lambda: answers.exists() and answers.read_bytes().count(b"\n") > 20)
                first.process.send_signal(signal.SIGTERM)
            ended = [node.end() for node in (first, second)]
            assert [code for code, _ in ended] == ([75, 75] if told else [0, 0]), ended
        assert (answers.read_bytes().count(b"\n") < 600) == told
    assert sorted(int(json.loads(line)["id"]) for line in answers.read_text().splitlines()) == [*range(600)]


def test_the_group_answers_what_is_written_into_its_pipe_until_it_is_told_to_stop(tmp_path: Path) -> None:
    """LeaderWorkerSet sets its variables before those of the manifest, so the manifest may refer to them."""
    template = documents()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    (tmp_path / "spool").mkdir()
    port = str(free_port())

    def pod(name: str, index: int) -> tuple[list[str], dict[str, str]]:
        container = template[name]["spec"]["containers"][0]
        lws = {"LWS_GROUP_SIZE": str(template["size"]), "LWS_WORKER_INDEX": str(index)}
        lws["LWS_LEADER_ADDRESS"] = "127.0.0.1"
        given = {one["name"]: re.sub(r"\$\((\w+)\)", lambda m: lws[m[1]], one["value"]) for one in container["env"]}
        command = local([*container["command"], *container["args"]], tmp_path)
        last = command[-1]
        command[-1] = last.rstrip("\n") + " " + " ".join(SMALL) + "\n" if "\n" in last else last
        return [*command, *(() if "\n" in last else SMALL)], {**given, "MASTER_PORT": port}

    leader, leaders = pod("leaderTemplate", 0)
    worker, workers = pod("workerTemplate", 1)
    rows = PROMPTS.read_text().splitlines(keepends=True)
    with started(worker, tmp_path, **workers) as second, started(leader, tmp_path, **leaders) as first:
        wait_for(lambda: (tmp_path / "spool" / "requests").exists())
        for sent in (rows[:2], rows[2:5]):
            (tmp_path / "spool" / "requests").write_text("".join(sent))
            wait_for(lambda: num_answers(tmp_path) == rows.index(sent[-1]) + 1)  # noqa: B023
        first.process.send_signal(signal.SIGTERM)
        assert first.end()[0] == 75
        second.end()  # it shares no directory with the leader; all pods of a group restart in any case
    (answers,) = tmp_path.glob("answers-*.jsonl")
    assert [json.loads(line)["id"] for line in rows[:5]] == sorted(
        (json.loads(line)["id"] for line in answers.read_text().splitlines()),
        key=[json.loads(line)["id"] for line in rows].index,
    )


def num_answers(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("answers-*.jsonl"))


def wait_for(there: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_image_is_the_dockerfiles() -> None:
    """The image's name, its version, and the folder of the commands are those of the Dockerfile."""
    import sarathi_pp

    text = "".join(file.read_text() for file in FILES)
    dockerfile = (ROOT / "launch" / "Dockerfile").read_text()
    (name,) = set(re.findall(r"image: (\S+)", text))
    assert name == f"sarathi-pp:{sarathi_pp.__version__}" and f"docker build -t {name} " in dockerfile
    assert "\nWORKDIR /app\n" in dockerfile and os.path.exists(ROOT / "launch" / "multinode.sh")
