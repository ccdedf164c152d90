"""The program that runs transformers: what it asks of transformers' continuous batching, on both kinds of devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig

from sarathi_pp.bench.peers import transformers_program

REQUESTS = [{"prompt_token_ids": [5] * 300, "output_tokens": 30}, {"prompt_token_ids": [5], "output_tokens": 1}]


@pytest.mark.oldest
@pytest.mark.parametrize(("device", "blocks", "batch"), [("cpu", 3, None), ("cuda", None, 2048)])
def test_masks_fit_a_gpu(device: str, blocks: int | None, batch: int | None) -> None:
    """On a GPU transformers chooses the size of its cache, so the size of its batches is given."""
    given: list[ContinuousBatchingConfig] = []

    @contextmanager
    def manager(*, continuous_batching_config: ContinuousBatchingConfig, **settings: Any) -> Iterator[None]:
        given.append(continuous_batching_config)
        yield

    model = SimpleNamespace(device=torch.device(device), continuous_batching_context_manager=manager)
    with transformers_program._continuous(model, REQUESTS):
        pass
    (config,) = given
    assert (config.num_blocks, config.max_batch_tokens) == (blocks, batch)
