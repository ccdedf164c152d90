"""The shape of one layer: the numbers on which its time and its memory depend, whatever the layer computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

# First words of the kinds of layers that keep a state per sequence.
STATE_KINDS = ("linear", "mamba", "conv")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one layer.

    Attributes:
        kind: name of the kind of layer for the user, such as "attention".
        weights: numbers that a microbatch reads, all experts included. Norms and biases are left out.
        token_weights: weights that one token is multiplied with, without the experts that it does not use.
        score_channels: products per query row and key, over all heads: those of the score and those with the value.
        decode_channels: score_channels, if a decode's products with a key can take longer than reading it, as with
            the latents of MLA; 0 otherwise.
        token_values: numbers that the layer stores in KV pages per token.
        kv_heads: equal parts of token_values that tensor shards can divide; 1 for the latents of MLA.
        state_values: numbers of the recurrent state, which each token reads and writes; 0 for attention.
    """

    kind: str
    weights: int
    token_weights: int
    score_channels: int = 0
    decode_channels: int = 0
    token_values: int = 0
    kv_heads: int = 1
    state_values: int = 0

    @property
    def keeps_state(self) -> bool:
        """Return whether the layer keeps a state per sequence, instead of KV pages."""
        return keeps_state(self.kind)

    @classmethod
    def plain(
        cls,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mlp_matrices: int = 3,
        num_experts: int = 1,
        experts_per_token: int = 1,
    ) -> LayerShape:
        """Return the shape of a layer of attention and an MLP, or experts.

        Args:
            intermediate_size: channels between the matrices of the MLP, or of one expert.
            head_dim: channels of a key, and of a value.
            mlp_matrices: 3 with a gate, 2 without.
            num_experts: experts of the layer; 1 for an MLP.
        """
        attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
        expert = mlp_matrices * hidden_size * intermediate_size
        return cls(
            kind="attention",
            weights=attention + num_experts * expert,
            token_weights=attention + experts_per_token * expert,
            score_channels=2 * num_heads * head_dim,
            token_values=2 * num_kv_heads * head_dim,
            kv_heads=num_kv_heads,
        )

    def shard_values(self, shards: int) -> int:
        """Return the numbers that one of `shards` tensor shards stores per token: at least one part of them."""
        return self.token_values // self.kv_heads * max(1, self.kv_heads // shards)


def keeps_state(kind: str) -> bool:
    """Return whether layers of a kind keep a state per sequence, instead of KV pages."""
    return kind.partition(" ")[0] in STATE_KINDS


def count_kinds(kinds: Iterable[str]) -> str:
    """Return how many layers each kind has, such as "12 linear, 4 attention". Kinds are in the order of the layers."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())
