"""Make a model of about 200M parameters with random weights and other layers than Llama's.

    python examples/benchmarks/make_layer_kinds.py latent /tmp/latent

latent  DeepSeek-V3's layers: latent attention (MLA), a dense first layer, then 8 experts of which 2 are chosen
hybrid  Qwen3-Next's layers: three with gated delta-net for each one with attention, and 8 experts
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

_SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "max_position_embeddings": 65536,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
}


def config_of(kind: str) -> Any:
    from transformers import DeepseekV3Config, Qwen3NextConfig

    if kind == "latent":
        return DeepseekV3Config(
            **_SIZES,
            intermediate_size=2048,
            num_key_value_heads=16,
            q_lora_rank=384,
            kv_lora_rank=256,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
            n_routed_experts=8,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
        )
    return Qwen3NextConfig(
        **_SIZES,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        shared_expert_intermediate_size=512,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )


@click.command()
@click.argument("kind", type=click.Choice(["latent", "hybrid"]))
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
def main(kind: str, directory: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=getattr(torch, dtype))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters", file=sys.stderr)
    model.save_pretrained(directory)


if __name__ == "__main__":
    main()
