"""What must be the same on every rank of a run: software, wire, model and options."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

import torch

import sarathi_pp
from sarathi_pp.config import RunConfig
from sarathi_pp.errors import ConfigError
from sarathi_pp.model.checkpoint.support import ModelFacts
from sarathi_pp.wire import codec

Passport = dict[str, Any]


def passport(config: RunConfig, facts: ModelFacts) -> Passport:
    """Of this rank."""
    # Where the files lie may differ (what the profile decided may not); sampling is rank 0's own affair, and how long a
    # rank waits each rank's.
    options = replace(config, model="", run_dir=None, profile=None, sampling_overrides={}, join_timeout_s=1.0)
    return {
        **software(),
        "wire version": codec.VERSION,
        "model": facts.fingerprint,
        **{f"option {name}": repr(value) for name, value in asdict(options).items()},
    }


def software() -> dict[str, str]:
    """What computes, with versions."""
    return {
        "sarathi_pp": sarathi_pp.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def require_equal(passports: Sequence[Passport]) -> None:
    """Raises ConfigError with what differs first, and both values."""
    for rank, passport in enumerate(passports):
        for key, value in passport.items():
            if value != passports[0][key]:
                raise ConfigError(f"{key} differs: rank 0 has {passports[0][key]}, rank {rank} has {value}")
