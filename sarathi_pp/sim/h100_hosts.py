"""Pipelines of hosts with 8 H100 each: every stage is one host, whose GPUs share its layers (tensor parallel).

Each figure is from a data sheet or assumed, and nothing was measured:

    GPU      H100 SXM: 989 TFLOP/s dense bfloat16, of which linear layers reach 61 % and attention a quarter of that.
             3.35 TB/s, of which 78 % are reached. These are the shares of core/cost/cards.py.
    layer    20 us of launches, as in the preset gpt3-a100-tp8pp8
    sums     two per layer, in a ring over NVLink 4: 450 GB/s each way, of which 78 % are reached
    links    each of the 8 GPUs sends an eighth of the activations over its own 400 Gbit/s port: 400 GB/s together,
             10 us latency
    memory   nine tenths of 80e9 bytes, less 4e9 for computing. The KV cache has what weights and states leave.
    split    by time, by default for microbatches of 1920 prompt tokens and 128 decodes with a context of 2048
    experts  each GPU has an eighth of every expert. All experts are read in every microbatch.

FP8 weights (1 byte) are read as they are stored and multiplied in bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

from sarathi_pp.core.cost.cards import CARDS
from sarathi_pp.core.cost.estimate import estimate_cost
from sarathi_pp.core.cost.model import CostModel, Load
from sarathi_pp.core.cost.profile import Profile
from sarathi_pp.core.cost.repartition import stage_seconds
from sarathi_pp.core.partition import Layers, partition, partition_by_time
from sarathi_pp.sim.published_models import PublishedModel

GPUS_PER_HOST = 8
SEQS_PER_STAGE = 128
_PAGE_SIZE = 16
_ROOM_BYTES = 0.9 * 80e9 - 4e9
_SPEED = replace(CARDS["h100-80g"].speed, layer_s=20e-6)
_TYPICAL = Load(1920, 1920 * 1024.0, 128, 128 * 2048)
_COMPUTE_BYTES, _STATE_BYTES = 2, 4


def h100_hosts(model: PublishedModel, num_hosts: int, weight_bytes: int, load: Load = _TYPICAL) -> Profile:
    """Return the profile of a pipeline with one host per stage.

    Its number of pages is at most 0 if the model does not fit.

    Args:
        weight_bytes: bytes of a weight of a layer. Embedding and LM head are in bfloat16.
        load: microbatch for which the stages take about equal times.
    """

    def cost_of(layers: Layers) -> CostModel:
        return estimate_cost(
            layers,
            shapes=model.shapes,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            weight_bytes=weight_bytes,
            compute_bytes=_COMPUTE_BYTES,
            speed=_SPEED,
            page_size=_PAGE_SIZE,
            shards=GPUS_PER_HOST,
        )

    num_layers = len(model.shapes)
    seconds = stage_seconds(cost_of(partition(num_layers, num_hosts)), load, num_hosts)
    cost = cost_of(partition_by_time(num_layers, num_hosts, seconds))
    return Profile(
        model=model.name,
        device=f"{num_hosts} x {GPUS_PER_HOST} H100-80GB",
        dtype="bfloat16",
        hidden_size=model.hidden_size,
        num_layers=num_layers,
        cost=cost,
        link_latency_s=10e-6,
        link_bytes_per_s=GPUS_PER_HOST * 50e9,
        jitter_cv=0.0,
        pages=min(_pages(model, cost, stage, weight_bytes) for stage in range(num_hosts)),
        max_num_seqs=SEQS_PER_STAGE * num_hosts,
        page_size=_PAGE_SIZE,
        tensor_parallel_size=GPUS_PER_HOST,
    )


def weights_bytes(model: PublishedModel, cost: CostModel, stage: int, weight_bytes: int) -> float:
    """Return the bytes of the weights on each GPU of a stage. Embedding and LM head are whole on each of them."""
    first, end = cost.stages[stage].layers
    ends = (first == 0) + (end == len(model.shapes))
    layers = sum(shape.weights for shape in model.shapes[first:end]) * weight_bytes / GPUS_PER_HOST
    return layers + ends * model.hidden_size * model.vocab_size * _COMPUTE_BYTES


def _pages(model: PublishedModel, cost: CostModel, stage: int, weight_bytes: int) -> int:
    """Return the KV pages for which the GPUs of a stage have room."""
    first, end = cost.stages[stage].layers
    states = sum(shape.state_values for shape in model.shapes[first:end]) * _STATE_BYTES / GPUS_PER_HOST
    num_seqs = SEQS_PER_STAGE * len(cost.stages)
    room = _ROOM_BYTES - weights_bytes(model, cost, stage, weight_bytes) - num_seqs * states
    return int(room // cost.stages[stage].page_bytes)
