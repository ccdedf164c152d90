"""The vocabulary for grammars is read before the run if a request names one, or if other ranks cannot wait later."""

from __future__ import annotations

from pathlib import Path

import pytest

from sarathi_pp.config import RunConfig
from sarathi_pp.inputs.generation_config import GenerationDefaults
from sarathi_pp.outputs.run_directory import RunDirectory
from sarathi_pp.run.preflight import Preflight
from sarathi_pp.stages.emulated_stage import emulated_facts
from tests.core.cost.test_profile import PROFILE


@pytest.mark.parametrize(
    ("named", "stages", "short", "expected"),
    [
        (True, 1, False, True),
        (False, 2, True, False),
        (None, 2, True, True),
        (None, 2, False, False),
        (None, 1, True, False),
    ],
    ids=["named", "not named", "short timeout", "long timeout", "no other rank"],
)
def test_the_vocabulary_is_read_first(named, stages, short, expected):
    facts = emulated_facts(PROFILE, 16)
    bound_s = facts.vocab_size * 1e-4
    config = RunConfig(model="", stages=stages, peer_timeout_s=bound_s * (0.99 if short else 1.01))
    run_dir = RunDirectory(Path("never-made"))
    checked = Preflight(config, None, PROFILE, facts, GenerationDefaults(), run_dir, names_grammars=named)
    assert checked.prepares_grammars is expected
