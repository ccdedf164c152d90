"""Pipelines whose cost is derived from published figures, for `simulate --preset NAME`."""

from __future__ import annotations

from sarathi_pp.core.cost.model import CostModel, StageCost
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.errors import ConfigError
from sarathi_pp.sim.h100_hosts import h100_hosts
from sarathi_pp.sim.published_models import deepseek_v3, qwen3_5_397b


def gpt3_a100_tp8pp8() -> Profile:
    """Return GPT-3 175B on 64 A100-80GB: 8 stages of 12 layers, tensor parallel 8 each (SARATHI, section 5.3).

    Derived, not tuned: A100 SXM has 312 TFLOP/s (bf16) and 2.04 TB/s; h = 12288, 96 layers, fp16.

    Linear layers: 24 h^2 FLOP per token and layer, so 12 * 24 * 12288^2 / 8 = 5.44 GFLOP per token on each GPU of a
        stage. The paper's LLaMA-13B prefill (Table 2: 1024 tokens, 224.8 ms of linear layers on an A6000 of 155
        TFLOP/s) runs at 76 % of peak. At 76 % of 312 that is 22.9 us per token. Two all-reduces per layer, of 24.6 kB
        per token over NVLink (300 GB/s each way, ring: 2 * 7/8), add 3.4 us. Together 26.3 us per token; tile 128
        (Fig. 5).
    Weights: 350 GB / 64 = 5.5 GB per GPU take 3.4 ms at 80 % of 2.04 TB/s, which the first tile's 3.4 ms covers.
    Fixed: 24 all-reduces of about 15 us latency and 12 layers of about 20 us of launches: 0.6 ms.
    Chunk attention: 4 h FLOP per pair and layer, 73.7 kFLOP on each GPU. Table 2's 10 ms for 1024 tokens are 28 % of
        the A6000's peak. At 28 % of 312 a pair takes 0.84 ns.
    Decode attention: 2 * 12288 / 8 * 2 B * 12 layers = 73.7 kB per token of context, 45 ns at 80 % of 2.04 TB/s.
    LM head: 50257 * 12288 * 2 B / 8 = 154 MB take 95 us. Over the 27 rows of a microbatch that is 3.5 us each.
    Links: each of the 8 GPUs sends an eighth of the activations over its own 200 Gbit/s InfiniBand port: 200 GB/s
        together, 10 us latency.
    KV: 216 sequences of 4096 tokens (27 per microbatch, 8 in flight): 55296 pages of 16.
    """
    stages = tuple(
        StageCost(
            (12 * stage, 12 * stage + 12),
            a0=0.6e-3,
            a1=128 * 26.3e-6,
            a2=0.84e-9,
            a3=45e-9,
            a4=0.0,
            head_s=3.5e-6 if stage == 7 else 0.0,
            page_bytes=16 * 73_728 * 8,
        )
        for stage in range(8)
    )
    return Profile(
        model="gpt3-175b",
        device="8 x 8 A100-80GB",
        dtype="float16",
        hidden_size=12288,
        num_layers=96,
        cost=CostModel(128, stages),
        link_latency_s=10e-6,
        link_bytes_per_s=200e9,
        jitter_cv=0.0,
        pages=216 * 4096 // 16,
        max_num_seqs=216,
    )


def deepseek_v3_h100_tp8pp2() -> Profile:
    """Return DeepSeek-V3 on 16 H100, with FP8 weights as they are published: 671 GB, at most 45 GB per GPU.

    This runtime loads FP8 weights as bfloat16. They would take 1.34 TB, and 16 H100 have 1.28 TB. So the preset assumes
    layers that keep FP8. Tensor parallelism is assumed too: this runtime does not have it for latent attention.
    """
    return h100_hosts(deepseek_v3(), 2, weight_bytes=1)


def deepseek_v3_h100_tp8pp4() -> Profile:
    """Return DeepSeek-V3 on 32 H100, with bfloat16 weights as this runtime loads them: 1.34 TB.

    A GPU has at most 45 GB of them. Tensor parallelism is assumed: this runtime does not have it for latent attention.
    """
    return h100_hosts(deepseek_v3(), 4, weight_bytes=2)


def qwen3_5_397b_h100_tp8pp2() -> Profile:
    """Return Qwen3.5-397B-A17B on 16 H100, with bfloat16 weights: 793 GB, at most 53 GB per GPU.

    The 2 KV heads are stored four times each, because every one of 8 GPUs needs one. Tensor parallelism is assumed.
    """
    return h100_hosts(qwen3_5_397b(), 2, weight_bytes=2)


def qwen3_5_397b_h100_tp8pp4() -> Profile:
    """Return Qwen3.5-397B-A17B on 32 H100, with bfloat16 weights: at most 28 GB per GPU. See the preset of 16 H100."""
    return h100_hosts(qwen3_5_397b(), 4, weight_bytes=2)


PRESETS = {
    "gpt3-a100-tp8pp8": gpt3_a100_tp8pp8,
    "deepseek-v3-h100-tp8pp2": deepseek_v3_h100_tp8pp2,
    "deepseek-v3-h100-tp8pp4": deepseek_v3_h100_tp8pp4,
    "qwen3.5-397b-h100-tp8pp2": qwen3_5_397b_h100_tp8pp2,
    "qwen3.5-397b-h100-tp8pp4": qwen3_5_397b_h100_tp8pp4,
}


def preset(name: str) -> Profile:
    """Return the profile of the preset with this name. Raises ConfigError if the name is not known."""
    if name not in PRESETS:
        raise ConfigError(f"--preset {name!r} is not known; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]()
