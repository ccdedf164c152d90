"""LeaderWorkerSet v1 as types, because no package has them.

Written after kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go at commit 024af0845195: the fields of
the set and their legal values. Templates of pods are the `PodTemplateSpec` of kubeflow-trainer-api.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SubGroupPolicy(_Strict):
    subGroupPolicyType: Literal["LeaderWorker", "LeaderExcluded"] | None = None
    subGroupSize: Annotated[int, Field(ge=1)] | None = None


class LeaderWorkerTemplate(_Strict):
    workerTemplate: dict[str, Any]
    leaderTemplate: dict[str, Any] | None = None
    size: Annotated[int, Field(ge=1)] = 1
    restartPolicy: Literal["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"] = (
        "RecreateGroupOnPodRestart"
    )
    subGroupPolicy: SubGroupPolicy | None = None


class NetworkConfig(_Strict):
    subdomainPolicy: Literal["Shared", "UniquePerReplica"]


class Spec(_Strict):
    leaderWorkerTemplate: LeaderWorkerTemplate
    replicas: Annotated[int, Field(ge=0)] = 1
    startupPolicy: Literal["LeaderCreated", "LeaderReady"] = "LeaderCreated"
    networkConfig: NetworkConfig | None = None


class LeaderWorkerSet(_Strict):
    apiVersion: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: dict[str, Any]
    spec: Spec
