from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.families import write_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama that tests only read."""
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", directory)
    return directory
