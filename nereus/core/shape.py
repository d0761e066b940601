"""How large is a language model, and into which layouts can it be cut?

Values of the Llama family (Llama, Qwen2, Qwen3 ...): grouped-query attention and a gated feed-forward. No tensors:
enough to refuse a layout and to count parameters before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from nereus.core.plan import Layout


class ModelShape(Struct, frozen=True):
    """The sizes of one model; names are those of the field, not of a file format."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    tied: bool = False
    """The output head is the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False

    def layer_parameters(self, tp: int = 1) -> int:
        """Count the parameters of one decoder layer on one tensor-parallel rank; norms are on every rank."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys + self.qkv_bias * (queries + 2 * keys)
        norms = 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        return (attention + 3 * self.hidden * self.intermediate) // tp + norms

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Count all parameters; a tied head counts once."""
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.hidden
        return self.layers * self.layer_parameters() + ends

    def misfits(self, layout: Layout) -> Iterator[str]:
        """Yield why ``layout`` cannot hold this model, with both numbers."""
        tp, pp = layout.tp, layout.pp
        if tp > self.kv_heads:
            yield f"tensor degree {tp} is above the model's {self.kv_heads} key-value heads"
        divided = (
            (self.heads, "attention heads"),
            (self.kv_heads, "key-value heads"),
            (self.intermediate, "feed-forward channels (intermediate_size)"),
        )
        yield from (
            f"tensor degree {tp} does not divide the model's {size} {name}" for size, name in divided if size % tp
        )
        if pp > self.layers:
            yield f"pipeline degree {pp} is above the model's {self.layers} layers"
