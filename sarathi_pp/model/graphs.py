"""A stage's forward as CUDA graphs: one launch instead of hundreds for a microbatch whose shape was captured.

    microbatch   [ chunk 480 | 31 decodes ]        511 tokens
    graph        [          512 rows       ]       captured once, one extra row is computed and dropped
    tables       token ids, positions, pages, attention's work: fixed addresses, filled before each replay

Microbatches of a uniform size have few shapes, so a few dozen graphs serve nearly all of them. The others run without a
graph. Graphs share the memory that they work in, read and write, since they are replayed one after the other on one
stream.

On the last stage, a graph for decodes has the LM head in it, because every row needs logits. Any other graph ends with
the rows before the LM head. The LM head is then launched for the rows that need it, which are fewer than a graph has
room for, and none if no prompt ends and no sequence decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sarathi_pp.errors import PeerLostError
from sarathi_pp.model.attention import CapturableBackend
from sarathi_pp.model.inputs import CapturableInputs, Span
from sarathi_pp.model.kv import KVShard
from sarathi_pp.model.stage_model import LMHead, StageModel

# A larger microbatch keeps the device busy for longer than its launches take, so a graph saves nothing. Launching a
# model of 1.5B takes 1.5 times as long as an H100 takes for 1,024 tokens (estimated).
_MOST_TOKENS = 2048
# Number of sizes between two powers of two: neighbouring sizes differ by at most an eighth.
_STEPS_PER_DOUBLING = 8


class CaptureError(RuntimeError):
    """Work cannot be captured as a CUDA graph."""


class Graph(Protocol):
    """Work of a device that is recorded once and repeated at the same addresses."""

    def capture(self, work: Callable[[], None]) -> None: ...
    def replay(self) -> None: ...


class CudaGraph:
    """A CUDA graph of torch.

    Args:
        pool: torch's handle of the memory that all graphs of a stage share.
    """

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def capture(self, work: Callable[[], None]) -> None:
        """Capture the work.

        Raises:
            CaptureError: it cannot be captured, for example because the host waits for the device in it, or because
                NCCL refuses a sum.
        """
        before = torch.cuda.current_stream()
        try:
            # thread_local: calls of other threads to the device do not disturb the capture.
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        except PeerLostError as error:
            # A sum that is captured waits for no rank. So none is lost, and the library's own text gives the reason.
            raise CaptureError(str(error.__cause__ or error)) from error
        finally:
            # A failed capture leaves its own stream as the current one, and copies of inputs do not wait for that one.
            torch.cuda.set_stream(before)

    def replay(self) -> None:
        self._graph.replay()


@dataclass(frozen=True, slots=True)
class Shape:
    """The largest microbatch that a graph serves.

    Attributes:
        num_tokens: most tokens of the microbatch.
        num_seqs: most sequences of the microbatch.
        decodes: if true, it serves microbatches in which every sequence has one token; if false, all others.
    """

    num_tokens: int
    num_seqs: int
    decodes: bool


def graph_shapes(max_tokens: int, max_seqs: int) -> tuple[Shape, ...]:
    """Return the shapes to capture for microbatches of up to max_tokens tokens and max_seqs sequences.

    The largest is first, because graphs share memory: what is large enough for the first one serves all.
    """
    sizes = graph_sizes(min(max_tokens, _MOST_TOKENS))
    decodes = [Shape(size, size, decodes=True) for size in sizes if size <= _up(min(max_seqs, max_tokens), sizes)]
    mixed = [Shape(size, min(size, max_seqs), decodes=False) for size in sizes if size > 1]
    return tuple(sorted((*decodes, *mixed), key=lambda shape: shape.num_tokens, reverse=True))


def graph_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens to capture: 1, 2, 4, 8, 16 .. 64 in steps of 8, then in steps of at most an eighth.

    The last one is `most`.
    """
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < _STEPS_PER_DOUBLING else max(8, (1 << (size.bit_length() - 1)) // _STEPS_PER_DOUBLING)
    return (*sizes, most)


def _up(count: int, sizes: Sequence[int]) -> int:
    return next((size for size in sizes if size >= count), sizes[-1])


class StageGraphs:
    """The CUDA graphs of one stage, captured when this object is made.

    First all shapes are launched without a graph, then all are captured. So a rank of a tensor-parallel stage launches
    no sum after the first capture, and the other ranks wait for none of its sums if a capture fails.

    Attributes:
        hits: number of microbatches that a graph ran.
        misses: number of microbatches that fit no graph.

    Args:
        shapes: largest microbatch of each graph, the largest first.
        graphs: an empty graph for each shape.

    Raises:
        CaptureError: a capture has failed.
    """

    def __init__(
        self,
        model: StageModel,
        kv: KVShard,
        shapes: Sequence[Shape],
        hidden_size: int,
        num_heads: int,
        device: torch.device,
        graphs: Sequence[Graph],
    ) -> None:
        self.hits = self.misses = 0
        self._page_size = kv.page_size
        most = max(shape.num_tokens for shape in shapes)
        x = torch.zeros((most, hidden_size), dtype=kv.dtype, device=device)
        self._graphs: list[_StageGraph] = []
        most_rows = max(shape.num_seqs if model.has_lm_head else shape.num_tokens for shape in shapes)
        outs: dict[int, Tensor] = {}  # by width: on the last stage some graphs end before the LM head
        widths = []
        for shape, graph in zip(shapes, graphs, strict=True):
            stage_graph = _StageGraph(model, kv, shape, x, num_heads, device, graph)
            y = stage_graph.warm_up()
            widths.append(y.shape[1])
            if widths[-1] not in outs:
                outs[widths[-1]] = torch.empty((most_rows, widths[-1]), dtype=y.dtype, device=device)
            del y  # the next shape warms up in its memory
            self._graphs.append(stage_graph)
        for stage_graph, width in zip(self._graphs, widths, strict=True):
            stage_graph.capture(outs[width])
        self._graphs.reverse()

    def prepare(
        self,
        spans: Sequence[Span],
        logit_rows: Sequence[int],
        token_ids: Sequence[int],
        fill: Callable[[Tensor], Tensor] | None = None,
    ) -> Callable[[Tensor | None], Tensor] | None:
        """Write a microbatch's inputs for the smallest graph that fits it.

        Args:
            fill: returns the token ids with codes replaced, as LatestDraw does; None if there are no codes.

        Returns:
            The function that replays the graph; None if no graph fits. It takes hidden states, or None if the stage
            embeds, and returns what StageModel.forward does. No later replay writes to this result.
        """
        num_tokens = sum(span.num_tokens for span in spans)
        decodes = num_tokens == len(spans)
        num_page_ids = sum(-(-(span.start + span.num_tokens) // self._page_size) for span in spans)
        for graph in self._graphs:
            shape = graph.shape
            fits = num_tokens <= shape.num_tokens and len(spans) <= shape.num_seqs
            if fits and decodes == shape.decodes and num_page_ids <= graph.most_page_ids:
                self.hits += 1
                return graph.prepare(spans, logit_rows, token_ids, fill)
        self.misses += 1
        return None


class _StageGraph:
    """The graph of one shape.

    Args:
        x: (most tokens of any graph, hidden_size), from which all graphs read activations.
    """

    def __init__(
        self,
        model: StageModel,
        kv: KVShard,
        shape: Shape,
        x: Tensor,
        num_heads: int,
        device: torch.device,
        graph: Graph,
    ) -> None:
        self.shape = shape
        self._model = model
        self._kv = kv
        self._graph = graph
        num_logit_rows = shape.num_seqs if model.has_lm_head else 0
        self._inputs = CapturableInputs(shape.num_tokens, num_logit_rows, kv.num_pages, kv.page_size, device)
        self.most_page_ids = self._inputs.most_page_ids
        self._x = x[: shape.num_tokens]
        longest = 1 if shape.decodes else shape.num_tokens
        windows = model.specs.windows[model.layers[0] : model.layers[1]]
        assert isinstance(model.backend, CapturableBackend), "the caller has checked it"
        self._attention = model.backend.for_capture(shape.num_tokens, shape.num_seqs, longest, kv, num_heads, windows)
        self._head: LMHead | None = model.rows_head() if model.has_lm_head and not shape.decodes else None
        self._out: Tensor | None = None

    def warm_up(self) -> Tensor:
        """Compile all kernels, which is not possible during capture. Return the rows that the graph will write."""
        y = self._forward()
        if self._head is not None:
            self._head.forward(y)
        return y

    def _forward(self) -> Tensor:
        """Run the graph's part of the stage on the inputs that are at its addresses, without the graph."""
        x = self._inputs.token_ids if self._model.embed else self._x
        if self._head is not None:
            return self._model.forward_rows(x, self._inputs.inputs, self._kv, self._attention)
        return self._model.forward(x, self._inputs.inputs, self._kv, self._attention)

    def capture(self, out: Tensor) -> None:
        """Capture the forward. All graphs of the stage with rows of the same width write them to `out`."""
        self._out = out

        def work() -> None:
            found = self._forward()
            out[: found.shape[0]].copy_(found)

        self._graph.capture(work)

    def prepare(
        self,
        spans: Sequence[Span],
        logit_rows: Sequence[int],
        token_ids: Sequence[int],
        fill: Callable[[Tensor], Tensor] | None,
    ) -> Callable[[Tensor | None], Tensor]:
        inputs = self._inputs.load(spans, logit_rows, token_ids)
        self._attention.load(inputs)
        num_rows = len(logit_rows) if self._model.has_lm_head else sum(span.num_tokens for span in spans)

        def compute(hidden: Tensor | None) -> Tensor:
            if hidden is not None:
                self._x[: hidden.shape[0]].copy_(hidden)
            if fill is not None:
                self._inputs.token_ids.copy_(fill(self._inputs.token_ids))
            self._graph.replay()
            assert self._out is not None, "it was captured"
            rows = self._out[:num_rows]
            if self._head is not None:
                return self._head.forward(rows)
            # The next replay writes to the same memory, and this result may still be on its way to the next stage then.
            return rows.clone()

        return compute
