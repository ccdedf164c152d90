"""Transformers' own layers, fed with whole prompts, and the activations between them: what a stage must reproduce."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sarathi_pp.checkpoint.tensor_file import ReadCount
from sarathi_pp.errors import InputError
from sarathi_pp.model.loader import load_reference
from sarathi_pp.stages.router_ties import Choice, RecordTies


@dataclass(frozen=True, slots=True)
class Expected:
    """The results of transformers for some prompts.

    Attributes:
        activations: by index of a layer: its inputs (T, hidden_size) for every prompt. The index `end` has the
            activations after the last layer, or the logits (T, vocab_size) if the layers end with the model's last one.
        choices: for every prompt, the choices of experts that its routers made, in order.
    """

    activations: dict[int, list[Tensor]]
    choices: list[list[Choice]]


class Reference:
    """The layers [first, end) of a model, as transformers computes them in float32 on CPU.

    Attributes:
        layers: (first, end).
    """

    def __init__(
        self, directory: Path, layers: tuple[int, int], num_layers: int, count: ReadCount | None = None
    ) -> None:
        self.layers = layers
        self._directory = directory
        self._num_layers = num_layers
        family, self._model = load_reference(directory, layers, count)
        self._base = self._model.get_submodule(family.base)
        blocks = getattr(self._base, family.layers)
        self._inputs: dict[int, Tensor] = {}
        self._ties = RecordTies()
        for index in range(*layers):
            blocks[index].register_forward_pre_hook(self._keeper(index), with_kwargs=True)

    @torch.inference_mode()
    def compute(self, prompts: Sequence[Tensor], kept: Collection[int]) -> Expected:
        """Compute prompts, each in one piece.

        Args:
            prompts: token ids (T,) int64 if the layers begin with the first one. Otherwise the activations
                (T, hidden_size) before the first layer.
            kept: indices of the layers whose inputs are returned, besides the results of the last layer.

        Raises:
            InputError: the activations are not finite.
        """
        first, end = self.layers
        found = Expected({index: [] for index in sorted({*kept, end})}, [])
        for prompt in prompts:
            name = "input_ids" if first == 0 else "inputs_embeds"
            call = {name: prompt[None], "position_ids": torch.arange(len(prompt))[None], "use_cache": False}
            with self._ties:
                if end == self._num_layers:
                    self._inputs[end] = self._model(**call).logits[0]
                else:
                    self._inputs[end] = self._base(**call).last_hidden_state[0]
            found.choices.append(self._ties.pop())
            for index, rows in found.activations.items():
                rows.append(self._inputs[index])
                self._require_finite(index, rows[-1])
            self._inputs.clear()
        if first == 0 and 0 in found.activations:
            found.activations[0][:] = prompts  # the first stage gets token ids
        return found

    def _require_finite(self, index: int, rows: Tensor) -> None:
        if not rows.isfinite().all():
            where = "in the logits" if index == self._num_layers else f"before layer {index}"
            raise InputError(
                f"{self._directory}: transformers itself computes NaN or infinity {where}, so nothing can be compared; "
                f"download the weights again"
            )

    def _keeper(self, index: int) -> Any:
        inputs, ties = self._inputs, self._ties  # not self: the model would keep itself alive

        def keep(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            inputs[index] = hidden[0]
            ties.layer = index

        return keep
