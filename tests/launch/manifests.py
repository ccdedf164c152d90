"""Kubernetes manifests, checked against typed models and against rules of the API server that types cannot express."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kubeflow_trainer_api import models
from pydantic import ValidationError

from tests.launch.leader_worker_set import LeaderWorkerSet

Document = dict[str, Any]

_MODELS = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}


def problems(document: Document) -> list[str]:
    """Return the problems that an API server would report, as far as types and the rules below show."""
    kind = document.get("kind")
    try:
        if kind == "LeaderWorkerSet":
            LeaderWorkerSet.model_validate(document)
            templates = document["spec"]["leaderWorkerTemplate"]
            for name in ("leaderTemplate", "workerTemplate"):
                if found := unknown(models.IoK8sApiCoreV1PodTemplateSpec, templates[name]):
                    return [f"{name}: {found}"]
        elif kind in _MODELS:
            if document["apiVersion"] != "trainer.kubeflow.org/v1alpha1":
                return [f"apiVersion {document['apiVersion']}"]
            if found := unknown(_MODELS[kind], document):
                return [found]
        else:
            return [f"kind {kind}"]
    except (ValidationError, ValueError, TypeError, KeyError) as error:
        return [str(error)]
    return [said for pod, job in pods(document) for said in (*pod_problems(pod), *job_problems(job, pod))]


def unknown(model: Any, document: Document) -> str | None:
    """Return the unknown fields. The models drop them and add defaults, so all input fields must come back."""
    lost = _lost(document, model.from_dict(document).to_dict())
    return None if lost is None else f"{model.__name__} knows no {lost}"


def _lost(given: Any, back: Any, at: str = "") -> str | None:
    """Return the paths at which something of `given` is missing in `back`."""
    if isinstance(given, dict) and isinstance(back, dict):
        parts = [(given[key], back.get(key), f"{at}.{key}") for key in given]
    elif isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        parts = [(one, other, f"{at}[{index}]") for index, (one, other) in enumerate(zip(given, back, strict=True))]
    else:
        return None if given == back else at
    return next((found for part in parts if (found := _lost(*part)) is not None), None)


def pods(document: Document) -> Iterator[tuple[Document, Document | None]]:
    """Return the pods that a document describes, each with its job if it has one."""
    if document["kind"] == "LeaderWorkerSet":
        templates = document["spec"]["leaderWorkerTemplate"]
        yield from ((templates[name]["spec"], None) for name in ("leaderTemplate", "workerTemplate"))
    if document["kind"] == "TrainingRuntime":
        for replicated in document["spec"]["template"]["spec"]["replicatedJobs"]:
            job = replicated["template"]["spec"]
            yield job["template"]["spec"], job


def pod_problems(pod: Document) -> Iterator[str]:
    volumes = [volume["name"] for volume in pod.get("volumes", [])]
    mounted = [mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", [])]
    if lost := {*mounted} - {*volumes}:
        yield f"mounts of no volume: {lost}"
    if idle := {*volumes} - {*mounted}:
        yield f"volumes that nothing mounts: {idle}"
    if len({*volumes}) < len(volumes):
        yield "two volumes of one name"


def job_problems(job: Document | None, pod: Document) -> Iterator[str]:
    """Check batch/v1: https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy"""
    rules = (job or {}).get("podFailurePolicy", {}).get("rules", [])
    if rules and pod.get("restartPolicy") != "Never":
        yield "a podFailurePolicy needs restartPolicy: Never"
    names = {container["name"] for container in pod["containers"]}
    for rule in rules:
        codes = rule.get("onExitCodes")
        if (codes is None) == ("onPodConditions" not in rule):
            yield "a rule has exit codes or conditions, and not both"
        if codes is None:
            continue
        if codes.get("containerName", next(iter(names))) not in names:
            yield f"no container {codes['containerName']}"
        values = codes["values"]
        if values != sorted({*values}) or (codes["operator"] == "In" and 0 in values):
            yield f"exit codes {values} must ascend, and 0 is no failure"


def action_on(job: Document, code: int, conditions: Mapping[str, str]) -> str:
    """Return the action of a Job for a failed pod: the first rule that fits."""
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes is not None and (code in codes["values"]) == (codes["operator"] == "In"):
            return str(rule["action"])
        if any(conditions.get(one["type"]) == one["status"] for one in rule.get("onPodConditions", [])):
            return str(rule["action"])
    return "Count"
