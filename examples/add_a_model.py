"""Add an architecture: the entry for Granite SWA, and the proof that its slices are exact.

    python examples/add_a_model.py

sarathi_pp has no model files of its own. A stage is transformers' own class without the layers of other stages. So an
architecture is an entry in sarathi_pp/checkpoint/facts/families.py: names of modules, and details of its cache. A model
without an entry is refused, because no test has proven it. To add one:

1. Write the entry. This script keeps it here and patches it into the package.
2. Check that chained slices over the paged KV cache give the logits of the unmodified model. This script does that.
3. Put the entry into families.py. Put a tiny configuration into tests/model/families.py, with all special features of
   the family switched on. The tests then run it on one, two and four stages, with every attention backend.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import transformers

from sarathi_pp.checkpoint.facts import support
from sarathi_pp.checkpoint.facts.families import FAMILIES, Family
from sarathi_pp.errors import UnsupportedModelError
from sarathi_pp.model.attention import choose_backend
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.loader import load_stage

# Granite SWA names its parts as Llama does: `model.embed_tokens`, `model.layers`, `model.norm`, `lm_head`. These are
# the defaults. Layers of the type sliding_attention in `layer_types` see a window. The model multiplies its input by
# a factor, and its attention has sinks. If config.json does not say it, there are 4 KV heads, and the LM head is the
# embedding. `widths` is left out, because no test has proven the family with tensor parallelism.
GRANITE_SWA = Family(
    architecture="GraniteSWAForCausalLM",
    model_type="granite_swa",
    windows="by_type",
    once=("embedding_multiplier",),
    sinks=True,
    kv_heads=4,
    tied=True,
)

# A small model with random weights and all special features switched on, so that a mistake changes the logits.
CONFIG = transformers.GraniteSWAConfig(
    vocab_size=128,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_bias=True,
    embedding_multiplier=3.0,
    residual_multiplier=0.7,
    attention_multiplier=0.2,
    logits_scaling=2.5,
    tie_word_embeddings=False,
    initializer_range=0.15,
    sliding_window=12,
    layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    layer_rope_theta=[10000.0, 100.0, 0, 100.0, 100.0],
    bos_token_id=1,
    eos_token_id=2,
)
STAGES = ((0, 2), (2, 5))
CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES = 4, 16


def main() -> None:
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    reference = transformers.GraniteSWAForCausalLM(CONFIG).eval()
    prompt = torch.randint(3, CONFIG.vocab_size, (45,))
    with torch.inference_mode():
        expected = reference(prompt[None], use_cache=False).logits[0]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        reference.save_pretrained(directory)
        try:
            support.check_model(directory)
        except UnsupportedModelError as error:
            print("without an entry:", str(error).removeprefix(f"{directory}: ").splitlines()[0][:60])
        for family in (replace(GRANITE_SWA, windows="none"), GRANITE_SWA):
            with mock.patch.object(support, "FAMILIES", {**FAMILIES, family.architecture: family}):
                found = run_slices(directory, prompt)
            off = ((found - expected).abs().max() / expected.abs().max()).item()
            same = int((found.argmax(-1) == expected.argmax(-1)).sum())
            print(f"windows {family.windows}: relative error {off:.0e}, {same} of {len(found)} greedy tokens the same")
    # The proof must be able to fail. It does for the first entry, which lacks the windows.
    assert off < 1e-5 and same == len(found), "not exact: the entry lacks a detail of the family"


def run_slices(directory: Path, prompt: torch.Tensor) -> torch.Tensor:
    """Return the logits of every position, computed as a run does: in chunks, over pages, from stage to stage."""
    facts = support.check_model(directory)
    backend = choose_backend("auto", CPU, PAGE_SIZE)
    stages = [load_stage(directory, part, facts.num_layers, torch.float32, CPU, backend) for part in STAGES]
    shape = (facts.caches, torch.float32, CPU)
    caches = [KVShard(part, NUM_PAGES, PAGE_SIZE, *shape) for part in STAGES]
    logits = []
    first = 0
    # Two chunks that end inside a page, two decodes, and a chunk after them.
    for num_tokens in (7, 13, 1, 1, 23):
        span = Span(first, num_tokens, tuple(range(NUM_PAGES)))
        inputs = build_inputs([span], range(num_tokens), PAGE_SIZE, CPU)
        x = prompt[first : first + num_tokens]
        for stage, cache in zip(stages, caches, strict=True):
            x = stage.forward(x, inputs, cache)
        logits.append(x)
        first += num_tokens
    return torch.cat(logits)


if __name__ == "__main__":
    main()
