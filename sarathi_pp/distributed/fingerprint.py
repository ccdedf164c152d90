"""The comparison of facts that must be equal on every rank of a run: software, wire, model and options."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

import torch

import sarathi_pp
from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.config import RunConfig
from sarathi_pp.core.policy import parse_policy
from sarathi_pp.errors import ConfigError
from sarathi_pp.model.dtypes import Dtypes
from sarathi_pp.wire import codec

Fingerprint = dict[str, Any]


def rank_fingerprint(config: RunConfig, facts: ModelFacts, dtypes: Dtypes) -> Fingerprint:
    """Return this rank's versions of software, its model and its options, which must be equal on every rank."""
    # Options that may differ are replaced by constants. They are paths and the join timeout. The values that a profile
    # has set are compared, and not its path. Only rank 0 uses the sampling options.
    options = replace(config, model="", run_dir=None, profile=None, sampling_overrides={}, join_timeout_s=1.0)
    return {
        **software(),
        "wire version": codec.VERSION,
        "model": facts.fingerprint,
        "policy": parse_policy(config.policy).source,
        "dtype": dtypes.compute,
        **{f"option {name}": repr(value) for name, value in asdict(options).items()},
    }


def software() -> dict[str, str]:
    """Return the versions of the software that computes: this package, torch, transformers and Python."""
    return {
        "sarathi_pp": sarathi_pp.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def require_equal(fingerprints: Sequence[Fingerprint]) -> None:
    """Check that all ranks have the same fingerprint as rank 0.

    Raises:
        ConfigError: a value differs. The message has its name and both values.
    """
    first = fingerprints[0]
    for rank, fingerprint in enumerate(fingerprints):
        for key, value in fingerprint.items():
            if value != first[key]:
                cause = "; their CPUs differ, so give --dtype on all ranks, such as float32" if key == "dtype" else ""
                raise ConfigError(f"{key} differs: rank 0 has {first[key]}, rank {rank} has {value}{cause}")
