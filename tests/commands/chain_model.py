"""A tiny model with a fixed next token after each token, so that a test decides what it says."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|im_end|>"
_HIDDEN = 128


def write_chain_model(folder: Path, phrases: list[list[str]], **files: Any) -> Path:
    """Write a checkpoint that says each list of phrases: after one phrase comes the next, and then END.

    Args:
        phrases: each phrase is one token, and has one successor. The first of a list is the end of a prompt.
        files: `chat_template` and `response_template` of the tokenizer.
    """
    backend = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(sorted(_ALPHABET))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, **files)
    tokenizer.add_tokens([phrase for chain in phrases for phrase in chain if phrase not in (END, "\n")])
    tokenizer.save_pretrained(folder)
    size = len(tokenizer)
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=_HIDDEN,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(size, _HIDDEN, generator=generator))
    with torch.no_grad():
        for layer in model.model.layers:  # the layers add nothing
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(directions)
        model.lm_head.weight.zero_()
        for chain in phrases:
            for before, after in pairwise([*map(tokenizer.convert_tokens_to_ids, map(_written, chain)), size]):
                token = tokenizer.eos_token_id if after == size else after
                model.lm_head.weight[token] += directions[before]
    model.save_pretrained(folder)
    return folder


_ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def _written(phrase: str) -> str:
    """Return a phrase as it is written in the vocabulary."""
    return "\u010a" if phrase == "\n" else phrase
