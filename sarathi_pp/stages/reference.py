"""Transformers' own layers, fed with whole prompts, and the activations between them: what a stage must reproduce."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sarathi_pp.errors import InputError
from sarathi_pp.model.checkpoint.tensor_file import ReadCount
from sarathi_pp.model.loader import load_reference

Activations = dict[int, list[Tensor]]


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
        for index in range(*layers):
            blocks[index].register_forward_pre_hook(self._keeper(index), with_kwargs=True)

    @torch.inference_mode()
    def activations(self, prompts: Sequence[Tensor], kept: Collection[int]) -> Activations:
        """Return the activations before some layers, and after the last one, for every prompt.

        Args:
            prompts: token ids (T,) int64 if the layers begin with the first one. Otherwise the activations
                (T, hidden_size) before the first layer.
            kept: indices of the layers whose inputs are returned.

        Returns:
            By index of the layer: its inputs (T, hidden_size) per prompt. The index `end` has the activations after the
            last layer, or the logits (T, vocab_size) if the layers end with the model's last one.

        Raises:
            InputError: the activations are not finite.
        """
        first, end = self.layers
        found: Activations = {index: [] for index in (*sorted(set(kept) - {end}), end)}
        for prompt in prompts:
            name = "input_ids" if first == 0 else "inputs_embeds"
            call = {name: prompt[None], "position_ids": torch.arange(len(prompt))[None], "use_cache": False}
            if end == self._num_layers:
                self._inputs[end] = self._model(**call).logits[0]
            else:
                self._inputs[end] = self._base(**call).last_hidden_state[0]
            for index, rows in found.items():
                rows.append(self._inputs[index])
                self._require_finite(index, rows[-1])
            self._inputs.clear()
        return found

    def _require_finite(self, index: int, rows: Tensor) -> None:
        if not rows.isfinite().all():
            where = "in the logits" if index == self._num_layers else f"before layer {index}"
            raise InputError(
                f"{self._directory}: transformers itself computes NaN or infinity {where}, so nothing can be compared; "
                f"download the weights again"
            )

    def _keeper(self, index: int) -> Any:
        inputs = self._inputs  # not self: the model would keep itself alive

        def keep(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            inputs[index] = hidden[0]

        return keep
