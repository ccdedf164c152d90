"""Transformers' own layers, fed with whole prompts, and the activations between them: what a stage must reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sarathi_pp.model.checkpoint.tensor_file import ReadCount
from sarathi_pp.model.loader import load_reference


class Reference:
    """The layers [first, end) of a model, as transformers computes them in float32 on CPU.

    Attributes:
        layers: (first, end).
    """

    def __init__(
        self, directory: Path, layers: tuple[int, int], num_layers: int, count: ReadCount | None = None
    ) -> None:
        self.layers = layers
        self._num_layers = num_layers
        family, self._model = load_reference(directory, layers, count)
        self._base = self._model.get_submodule(family.base)
        self._blocks = getattr(self._base, family.layers)
        self._inputs: dict[int, Tensor] = {}
        for index in range(*layers):
            self._blocks[index].register_forward_pre_hook(self._keeper(index), with_kwargs=True)

    @torch.inference_mode()
    def activations(self, prompts: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """Return the activations before each layer, and after the last one, for every prompt.

        Args:
            prompts: token ids (T,) int64 if the layers begin with the first one. Otherwise the activations
                (T, hidden_size) before the first layer.

        Returns:
            By index of the layer: its inputs (T, hidden_size) per prompt. The index `end` has the activations after the
            last layer, or the logits (T, vocab_size) if the layers end with the model's last one.
        """
        found: dict[int, list[Tensor]] = {index: [] for index in range(self.layers[0], self.layers[1] + 1)}
        for prompt in prompts:
            name = "input_ids" if self.layers[0] == 0 else "inputs_embeds"
            call = {name: prompt[None], "position_ids": torch.arange(len(prompt))[None], "use_cache": False}
            if self.layers[1] == self._num_layers:
                last = self._model(**call).logits[0]
            else:
                last = self._base(**call).last_hidden_state[0]
            for index in range(*self.layers):
                found[index].append(self._inputs.pop(index))
            found[self.layers[1]].append(last)
        return found

    def _keeper(self, index: int) -> Any:
        inputs = self._inputs  # not self: the model would keep itself alive

        def keep(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            inputs[index] = hidden[0]

        return keep
