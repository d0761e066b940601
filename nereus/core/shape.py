"""How large is a language model, and into which layouts can it be cut?

Values of the Llama family (Llama, Qwen2, Qwen3 ...): grouped-query attention and a gated feed-forward. No tensors:
enough to refuse a layout and to count parameters before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from nereus.core.plan import Layout

_SIZES = {"num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


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
    gated: bool = True
    """The feed-forward has a gate (three matrices); GPT-2 and BLOOM have none (two)."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a Hugging Face ``config.json``; ``ValueError`` names the sizes that are missing or of the wrong kind.

        Models with experts are refused: their work per token is not that of their size (``active_matrix_parameters``
        is where a count of active experts would enter).
        """
        missing = sorted(_SIZES - config.keys())
        if missing:
            raise ValueError(f"the model configuration lacks {', '.join(missing)}")
        if any(config.get(name) for name in _EXPERTS):
            raise ValueError("models with experts are not supported; use a dense decoder")
        heads = config["num_attention_heads"]
        sizes = {
            "layers": config["num_hidden_layers"],
            "hidden": config["hidden_size"],
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // max(1, heads),
            "intermediate": config["intermediate_size"],
            "vocab": config["vocab_size"],
            "max_positions": config.get("max_position_embeddings", 0),
        }
        wrong = [name for name, size in sizes.items() if not isinstance(size, int) or size < (name != "max_positions")]
        if wrong:
            raise ValueError(f"the model configuration has no positive whole number for {', '.join(wrong)}")
        kind = config.get("model_type", "llama")
        return cls(
            **sizes,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        )

    def layer_parameters(self, tp: int = 1) -> int:
        """Count the parameters of one decoder layer on one tensor-parallel rank; norms are on every rank."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys + self.qkv_bias * (queries + 2 * keys)
        norms = 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        return (attention + (2 + self.gated) * self.hidden * self.intermediate) // tp + norms

    @property
    def attention_matrix_parameters(self) -> int:
        """Count the weights of one layer's four attention projections."""
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    @property
    def active_matrix_parameters(self) -> int:
        """Count the weights of one layer that multiply each token: 2 FLOPs a token each, forward."""
        return self.attention_matrix_parameters + (2 + self.gated) * self.hidden * self.intermediate

    @property
    def kv_values_per_token(self) -> int:
        """Count the keys and values that one layer keeps of each token."""
        return 2 * self.kv_heads * self.head_dim

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
