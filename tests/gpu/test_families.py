"""Tiny models of the families that need different code: logits on a GPU against transformers on the CPU, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sarathi_pp.checkpoint.facts.layer_cache import StateCache
from sarathi_pp.checkpoint.facts.support import check_model
from sarathi_pp.model.attention import Needs, choose_backend
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage
from tests.gpu.comparison import DEVICE, F32, Pairs, compare, sized
from tests.model.families import VOCAB_SIZE, is_too_old, with_layers, write_checkpoint

LAYERS, NUM_PAGES = 2, 12
LIMIT = 1e-4
# Plain, norms of heads, soft caps and windows, sinks, experts, latents, and layers with a state.
FAMILIES = sized(
    ["llama", "qwen3", "gemma2", "gpt_oss", "mixtral", "deepseek_v3", "qwen3_next", "granitemoehybrid", "lfm2"],
    tiny=["qwen3_next"],
)
# Tokens of two sequences in each microbatch: chunks, a chunk with a decode, decodes.
SCHEDULE = sized([[(21, 0), (9, 7), (1, 6), (1, 1)]], tiny=[[(5, 0), (1, 3)]])[0]
TABLES = ((3, 7, 10), (0, 11))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str, tmp_path: Path) -> None:
    if is_too_old(family):
        pytest.skip("the installed transformers is too old for it")
    reference = write_checkpoint(family, tmp_path, config=with_layers(family, LAYERS))
    facts = check_model(tmp_path)
    needs = Needs(F32, facts.head_dim, facts.softcap, facts.sinks, facts.latent)
    backend = choose_backend("auto", DEVICE, None, needs)
    stage = load_stage(tmp_path, (0, LAYERS), LAYERS, F32, DEVICE, backend)
    page_size = backend.default_page_size

    def logits() -> Pairs:
        kv = KVShard((0, LAYERS), NUM_PAGES, page_size, facts.caches, F32, DEVICE, num_slots=3)
        for layer, cache in enumerate(facts.caches):
            pools = (kv.conv_state(layer),) if isinstance(cache, StateCache) else (kv.keys(layer), kv.values(layer))
            for pool in pools:
                pool.fill_(float("nan"))  # a sequence's first row does not read its slot
        ids = [torch.randint(3, VOCAB_SIZE, (sum(counts),)) for counts in zip(*SCHEDULE, strict=True)]
        expected = [reference(row[None], use_cache=False).logits[0] for row in ids]
        done, pairs = [0, 0], {}
        for number, counts in enumerate(SCHEDULE):
            parts = [(row, done[row], count) for row, count in enumerate(counts) if count]
            spans = [Span(start, count, TABLES[row], slot=2 - row) for row, start, count in parts]
            tokens = torch.cat([ids[row][start : start + count] for row, start, count in parts])
            wanted = torch.cat([expected[row][start : start + count] for row, start, count in parts])
            inputs = build_inputs(spans, range(len(tokens)), page_size, DEVICE)
            found = stage.forward(tokens.to(DEVICE), inputs, kv)
            pairs[f"microbatch {number}"] = found, wanted.to(DEVICE)
            for row, start, count in parts:
                done[row] = start + count
        return pairs

    compare(logits, LIMIT, repeatable=False)
