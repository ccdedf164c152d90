"""What ranks compare before a run: each of it, where it differs, is named with both values."""

from __future__ import annotations

import pytest

from sarathi_pp.config import RunConfig
from sarathi_pp.distributed.fingerprint import passport as passport_of
from sarathi_pp.distributed.fingerprint import require_equal
from sarathi_pp.errors import ConfigError
from sarathi_pp.model.checkpoint.support import check_model
from tests.model.families import write_checkpoint


@pytest.fixture(scope="module")
def passport(tmp_path_factory):
    model = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", model)
    return passport_of(RunConfig(model=str(model)), check_model(model))


def test_software_model_and_options_are_in_it(passport):
    assert {"sarathi_pp", "torch", "transformers", "python", "wire version", "model"} <= passport.keys()
    assert {f"option {name}" for name in ("chunk_size", "policy", "dtype", "seed", "layer_split")} <= passport.keys()


def test_whatever_differs_is_named_with_both_values(passport):
    require_equal([passport, dict(passport), dict(passport)])
    for key, value in passport.items():
        with pytest.raises(ConfigError) as refused:
            require_equal([passport, dict(passport), {**passport, key: "something else"}])
        assert str(refused.value) == f"{key} differs: rank 0 has {value}, rank 2 has something else"
