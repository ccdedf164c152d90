"""The memory that a stage on a GPU needs besides its weights and KV pages, such as activations, logits and CUDA graphs.

A run measures it with a loaded stage, before pages are counted. A plan estimates it from the model's shape.

The measurement computes the largest microbatch that the policy can emit (d is a decode). In it, as many sequences as
possible draw a token (x), because each of them needs a row of logits:

    sequences    d  d  d  d  [ prompt ......... ]  [ prompt ... ]
    drawn        x  x  x  x   x

All tokens are synthetic and share one KV page and one state slot, so the measurement takes almost no memory for the KV
cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from sarathi_pp.checkpoint.facts.mlp import MLPShape
from sarathi_pp.checkpoint.facts.support import ModelFacts
from sarathi_pp.core.draw_rules import DrawRules
from sarathi_pp.core.plan import Chunk, MicroBatch, SamplingRow, Scored
from sarathi_pp.core.policy import Limits, PolicySpec
from sarathi_pp.drawing.draw import draw
from sarathi_pp.drawing.history import Edit, History
from sarathi_pp.drawing.scoring import SLICE_ROWS, score
from sarathi_pp.model.graphs import Shape, StageGraphs, graph_shapes
from sarathi_pp.model.inputs import Span, build_inputs
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.stage_model import StageModel
from sarathi_pp.sampling_params import MOST_LOGPROBS
from sarathi_pp.wire.channel import edge_buffers

# Rules change a float32 copy of the logits. The sampling kernel's sums have less than a byte for each token of a large
# vocabulary.
_DRAWING_BYTES = 4 + 1
# Most bytes for each token of the vocabulary while one row of logits is scored: a few copies in float64 and int64.
_SCORING_BYTES = 64
# Sampling parameters of synthetic rows.
GREEDY = SamplingRow(position=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
DRAWN = SamplingRow(position=0, temperature=1.0, top_k=1, top_p=0.9, min_p=0.0, seed=0)


@dataclass(frozen=True, slots=True)
class LargestMicrobatch:
    """The size of the largest microbatch that a policy can emit.

    Attributes:
        num_tokens: most tokens of a microbatch.
        num_rows: most sequences of a microbatch that draw a token. Each needs a row of logits.
        max_model_len: most tokens of a sequence.
    """

    num_tokens: int
    num_rows: int
    max_model_len: int

    @classmethod
    def of(cls, policy: PolicySpec, limits: Limits) -> LargestMicrobatch:
        num_tokens = policy.max_tokens(limits)
        return cls(num_tokens, min(limits.max_num_seqs, num_tokens), limits.max_model_len)

    def spans(self, page_size: int) -> list[Span]:
        """Return the sequences of the microbatch: decodes, and prompt chunks of at most max_model_len tokens.

        All share page 0 and state slot 0. The prompt chunks and the first decode end at the longest context. The other
        decodes have no context, because one decode with the longest context takes as much memory as several.
        """
        end = self.max_model_len
        table = array("q", [0]) * -(-end // page_size)
        decodes = [Span(end - 1, 1, table, slot=0), *[Span(0, 1, table, slot=0)] * (self.num_rows - 2)]
        decodes = decodes[: self.num_rows - 1]
        left = self.num_tokens - len(decodes)
        counts = [end] * (left // end) + [left % end] * (left % end > 0)
        return [*decodes, *(Span(end - count, count, table, prompt=True, slot=0) for count in counts)]


def smaller_options(policy: PolicySpec, limits: Limits) -> str:
    """Return the names of the options whose smaller values make the largest microbatch smaller, joined by "or".

    The result is for an error message.
    """
    halves = {
        "--chunk-size": replace(limits, chunk_size=max(1, limits.chunk_size // 2)),
        "--max-model-len": replace(limits, max_model_len=max(1, limits.max_model_len // 2)),
    }
    num_tokens = policy.max_tokens(limits)
    smaller = [option for option, half in halves.items() if policy.max_tokens(half) < num_tokens]
    return " or ".join((*smaller, "--max-num-seqs"))


def measure_working_bytes(
    model: StageModel, kv: KVShard, largest: LargestMicrobatch, hidden_size: int, num_heads: int, *, graphed: bool
) -> int:
    """Measure the bytes that a loaded stage needs besides its weights and KV pages.

    This is the peak while the largest microbatch is computed, its tokens are drawn and prompt tokens are scored. The
    memory of the CUDA graphs is added to it.

    Args:
        kv: KV pages and states of the stage: at least one page, a state slot if it keeps states, and a spare page if
            `graphed`.
        graphed: the stage has CUDA graphs.

    Raises:
        torch.OutOfMemoryError: the device has less memory.
    """
    device = kv.device
    with _measured(device) as computing:
        _compute(model, kv, largest, hidden_size, device)
    if not graphed:
        return computing.num_bytes
    shapes = deciding_shapes(graph_shapes(largest.num_tokens, largest.num_rows))
    with _measured(device) as capturing:
        StageGraphs(model, kv, shapes, hidden_size, num_heads, device, [_NotCaptured()] * len(shapes))
    return computing.num_bytes + capturing.num_bytes


def deciding_shapes(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Return the shapes that decide how much memory the graphs take, which all graphs share.

    These are the largest shape of decodes alone and the largest of the others. The second one has more activations, and
    only the first one has logits in it.
    """
    most = {
        decodes: max((one.num_tokens for one in shapes if one.decodes == decodes), default=0)
        for decodes in (False, True)
    }
    return tuple(shape for shape in shapes if shape.num_tokens == most[shape.decodes])


def estimate_working_bytes(
    facts: ModelFacts,
    mlp: MLPShape,
    largest: LargestMicrobatch,
    item_bytes: int,
    *,
    has_lm_head: bool,
    graphed: bool,
) -> int:
    """Estimate the result of `measure_working_bytes` in bytes, without a loaded stage.

        layer    T * (4 hidden + the larger of attention and MLP)   4: residual, norm, output of the module, sum
        draw     (T + R) * hidden + R * vocabulary, and R float32 copies and the sums of the sampling kernel
        score    (T + R) * hidden + S * vocabulary, and copies of one row
        graphs   the larger of layer and draw again for the largest graph, whose memory stays allocated

    The estimate is the largest of the first three lines, plus the fourth. T is the number of tokens, R the number of
    rows that draw a token, and S the number of scored rows whose logits are in memory at once (SLICE_ROWS).

    Args:
        facts: facts of the model. Its attention heads are those of one rank.
        mlp: the part of the MLP that one rank has.
        item_bytes: bytes of one number of an activation.
        graphed: the stage has CUDA graphs.
    """
    attention = (3 * facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
    wide = mlp.matrices * mlp.width
    if mlp.num_experts > 1:
        wide = mlp.experts_per_token * (wide + 2 * facts.hidden_size)  # each expert copies its tokens

    def computing(num_tokens: int, *, draws: bool) -> int:
        layer = num_tokens * (4 * facts.hidden_size + max(attention, wide)) * item_bytes
        if not has_lm_head:
            return layer
        num_rows = min(largest.num_rows, num_tokens)
        logits = num_rows * facts.vocab_size * (item_bytes + draws * _DRAWING_BYTES)
        if draws:
            scored = min(SLICE_ROWS, num_tokens) * facts.vocab_size * item_bytes + facts.vocab_size * _SCORING_BYTES
            logits = max(logits, scored)
        return max(layer, (num_tokens + num_rows) * facts.hidden_size * item_bytes + logits)

    num_bytes = computing(largest.num_tokens, draws=True)
    if graphed:
        num_bytes += computing(graph_shapes(largest.num_tokens, largest.num_rows)[0].num_tokens, draws=False)
    return num_bytes


def edge_bytes(num_edges: int, num_tokens: int, hidden_size: int, item_bytes: int, inflight: int) -> int:
    """Return the bytes of activations on a GPU that are being received or sent.

    Received activations need buffers. Activations to send keep the memory in which they were computed until they have
    left. In the worst case, every message of every edge has the largest size.

    Args:
        num_edges: number of edges that carry activations to or from this stage: 0 to 2.
        num_tokens: tokens of the largest microbatch.
        item_bytes: bytes of one number of an activation.
        inflight: most microbatches in flight.
    """
    return num_edges * edge_buffers(inflight) * num_tokens * hidden_size * item_bytes


def _compute(
    model: StageModel, kv: KVShard, largest: LargestMicrobatch, hidden_size: int, device: torch.device
) -> None:
    inputs = build_inputs(
        largest.spans(kv.page_size), range(largest.num_rows) if model.has_lm_head else (), kv.page_size, device
    )
    if model.embed:
        x = torch.zeros(largest.num_tokens, dtype=torch.int64, device=device)
    else:
        x = torch.zeros(largest.num_tokens, hidden_size, dtype=kv.dtype, device=device)
    y = model.forward(x, inputs, kv)
    if model.has_lm_head:
        # One row that is not greedy is enough: then all rows have sums for its filters. Rules copy each row.
        draw(y, [DRAWN, *[GREEDY] * (largest.num_rows - 1)], dict.fromkeys(range(largest.num_rows), _penalised()))
        del y
        _score(model, kv, x[:1], largest)


def _score(model: StageModel, kv: KVShard, x: torch.Tensor, largest: LargestMicrobatch) -> None:
    """Score as many prompt tokens as have logits at once, next to the inputs of the LM head for all tokens.

    Args:
        x: the stage's input for one token.
    """
    inputs = build_inputs([Span(0, 1, array("q", [0]), slot=0)], (0,), kv.page_size, x.device)
    row = model.forward_rows(x, inputs, kv)
    rows = row.new_zeros(largest.num_tokens + largest.num_rows, row.shape[1])
    count = min(SLICE_ROWS, largest.num_tokens)
    chunk = Chunk(0, 0, 0, count, token_ids=(0,) * count, scored=Scored(1, count + 1, MOST_LOGPROBS, 0))
    score(model.rows_head(), rows[:count], MicroBatch(0, (chunk,)))


def _penalised() -> Edit:
    """Return the changes of a row whose request has a penalty."""
    history = History(DrawRules(num_prompt=1, repetition_penalty=2.0))
    history.extend(0, (0,))
    return history.edit()


class _NotCaptured:
    """A stand-in for a CUDA graph: `capture` runs the work instead. This takes as much memory as capturing it."""

    def capture(self, work: Callable[[], None]) -> None:
        work()

    def replay(self) -> None:
        raise AssertionError("nothing was captured")


@dataclass(slots=True)
class _Peak:
    """The most bytes that were allocated at the same time, beyond those that were allocated before."""

    num_bytes: int = 0


@contextmanager
def _measured(device: torch.device) -> Iterator[_Peak]:
    peak, before = _Peak(), torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield peak
    peak.num_bytes = torch.cuda.max_memory_allocated(device) - before
