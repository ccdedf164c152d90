"""Values that ranks compare before a run: each difference is named with both values."""

from __future__ import annotations

import pytest

from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.config import RunConfig
from sarathi_pp.distributed.fingerprint import rank_fingerprint, require_equal
from sarathi_pp.errors import ConfigError
from sarathi_pp.model.dtypes import Dtypes
from tests.model.families import write_checkpoint


@pytest.fixture(scope="module")
def fingerprint(tmp_path_factory):
    model = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", model)
    return rank_fingerprint(RunConfig(model=str(model)), check_model(model), Dtypes("float32", "float32"))


def test_software_model_and_options_are_in_it(fingerprint):
    assert {"sarathi_pp", "torch", "transformers", "python", "wire version", "model"} <= fingerprint.keys()
    assert {f"option {name}" for name in ("chunk_size", "policy", "dtype", "seed", "layer_split")} <= fingerprint.keys()


def test_whatever_differs_is_named_with_both_values(fingerprint):
    require_equal([fingerprint, dict(fingerprint), dict(fingerprint)])
    for key, value in fingerprint.items():
        with pytest.raises(ConfigError) as refused:
            require_equal([fingerprint, dict(fingerprint), {**fingerprint, key: "something else"}])
        assert str(refused.value).startswith(f"{key} differs: rank 0 has {value}, rank 2 has something else")
        assert ("give --dtype" in str(refused.value)) == (key == "dtype")
