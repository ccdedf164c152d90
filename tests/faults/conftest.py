from __future__ import annotations

from pathlib import Path

import pytest

from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.outputs.profile_file import write_profile
from tests.exact.references import References


@pytest.fixture(scope="session")
def model(reference: References) -> Path:
    """Return a small Llama that tests only read."""
    return reference("llama").directory


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a profile to use instead of a model, for tests of processes and not of their computations."""
    path = tmp_path_factory.mktemp("emulated") / "profile.json"
    stage = StageCost((0, 4), 0.01, 1e-5, 0.0, 0.0, 0.0)
    write_profile(
        path,
        Profile(
            model="synthetic",
            device="cpu",
            dtype="float32",
            hidden_size=64,
            num_layers=4,
            cost=CostModel(1, (stage,)),
            link_latency_s=0.0,
            link_bytes_per_s=1e10,
            jitter_cv=0.0,
            pages=4000,
            max_num_seqs=64,
        ),
    )
    return path
