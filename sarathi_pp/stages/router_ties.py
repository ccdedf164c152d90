"""Choices of experts that rounding decides, and a way to take the same experts as transformers in them.

A router scores all experts for each row and takes the best k, with torch.topk in every family. If the k-th score and
the next one are nearly equal, the order of sums decides which expert is taken. Another expert changes the row by much
more than rounding, and through attention the later rows of its prompt. So the reference records its ties, and a stage
takes the same experts in them:

    reference   scores  .40  .300001  .30      takes 0 and 1, and records the tie of 1 and 2
    stage       scores  .40  .30      .300001  would take 0 and 2, and takes 0 and 1
    stage       scores  .40  .25      .35      takes 0 and 2: no rounding explains it

Everything else is computed as before: the scores, the weights of the experts, and the experts. So each row can still be
compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Two scores tie if they differ by less than this share of the k-th score, or of the largest one if scores have signs.
_TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Choice:
    """The ties in one choice of a router, for n of the rows of a prompt.

    Attributes:
        layer: index of the router's layer.
        rows: (n,) int64, positions of the rows with a tie, in ascending order.
        tied: (n, num_experts) bool, the experts whose score ties with the k-th one.
        taken: (n, k) int64, the experts that the router took.
    """

    layer: int
    rows: Tensor
    tied: Tensor
    taken: Tensor


class RecordTies(TorchFunctionMode):
    """A mode in which the ties of all routers are recorded, while one prompt is computed.

    Attributes:
        layer: index of the layer that is computed. The caller sets it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = 0
        self._choices: list[Choice] = []

    def pop(self) -> list[Choice]:
        """Return the choices since the last call, in the order in which they were made."""
        choices, self._choices = self._choices, []
        return choices

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if _chooses(function, result):
            self._choices.append(_ties(self.layer, args[0], result.indices))
        return result


class TakeTies(TorchFunctionMode):
    """A mode in which routers take the experts of the reference in its ties. It counts the rows that this changes.

    Args:
        parts: for each part of the rows of a microbatch, in order: the position of its first row in its prompt, its
            number of rows, and the recorded choices of its prompt for the layers that are computed.
        changed: number of rows that took other experts than without this mode, by layer. It is counted up.
    """

    def __init__(self, parts: Sequence[tuple[int, int, Sequence[Choice]]], changed: Counter[int]) -> None:
        super().__init__()
        self._parts = parts
        self._changed = changed
        self._num_done = 0

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not _chooses(function, result):
            return result
        indices, offset = result.indices.clone(), 0
        for first, num_rows, choices in self._parts:
            choice = choices[self._num_done]
            here = (choice.rows >= first) & (choice.rows < first + num_rows)
            rows = choice.rows[here] - first + offset
            taken, tied = choice.taken[here], choice.tied[here]
            ours, theirs = (torch.zeros_like(tied).scatter(1, chosen, True) for chosen in (indices[rows], taken))
            others = ours != theirs
            changed = others.any(-1) & (~others | tied).all(-1)
            indices[rows[changed]] = taken[changed]
            self._changed[choice.layer] += int(changed.sum())
            offset += num_rows
        self._num_done += 1
        return torch.return_types.topk((args[0].gather(-1, indices), indices))


def _chooses(function: Callable[..., Any], result: Any) -> bool:
    """Return whether a call is a router's choice of experts, or of groups of them, for each of its rows.

    The other calls add up the best scores within each group, and have three axes.
    """
    return function in (torch.topk, Tensor.topk) and result.indices.ndim == 2


def _ties(layer: int, scores: Tensor, taken: Tensor) -> Choice:
    """Return the rows in which an expert that was not taken ties with one that was."""
    finite = scores.masked_fill(~scores.isfinite(), 0)
    last = scores.gather(-1, taken).amin(-1, keepdim=True)
    scale = torch.where(finite.amin(-1, keepdim=True) < 0, finite.abs().amax(-1, keepdim=True), last)
    tied = (scores - last).abs() <= _TIE * scale
    num_taken = tied.gather(-1, taken).sum(-1)
    rows = (tied.sum(-1) > num_taken).nonzero()[:, 0]
    return Choice(layer, rows, tied[rows], taken[rows])
