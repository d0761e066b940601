"""How is the next token's distribution computed from weights in Hugging Face names?

Owner: the generation engine. A lean decoder for the Llama family: fused projections, one preallocated key-value
cache, and one forward per token over all live sequences. Sequences lie in dense slots ``0 .. live - 1``.

Three rearrangements leave every logit as it was and save work at each token. The rows of q, k and v are grouped by
key-value head, so that grouped-query attention is one batched product without repeating keys. The two halves of each
head that RoPE rotates are interleaved, so that a rotation is one complex product. Keys lie transposed in the cache, as
the product with the queries reads them.

Invariants (tests/backends/test_generate_model.py): logits equal those of transformers for each family, prefill and
decode alike; weights hold no reference to the tensors they were made from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nereus.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES = ("default", "linear", "llama3")
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

_PREFILL_TOKENS = 4096
"""A prefill forward takes at most this many tokens (or one sequence): bounds its memory."""

_CUT_FLOATS = 100_000
"""Ours: reading so many more keys of a layer takes longer than the operations that a cut adds to it."""

_PADDING = 1.25
"""Sequences are prefilled together if the longest has at most this many times the tokens of the shortest."""

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """The numbers of an architecture that the decoder needs; ``tensors`` holds the expected names and shapes."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    context: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    frequencies: Tensor = field(repr=False)
    """RoPE: radians per position, float32 [head_dim / 2]."""
    rope_scale: float = 1.0

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that is stored, by global name; a tied output head is left out."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocabulary, self.hidden), FINAL_NORM: (self.hidden,)}
        if not self.tied:
            shapes[HEAD] = (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            projections = {
                "self_attn.q_proj": (q, self.hidden, self.qkv_bias),
                "self_attn.k_proj": (kv, self.hidden, self.qkv_bias),
                "self_attn.v_proj": (kv, self.hidden, self.qkv_bias),
                "self_attn.o_proj": (self.hidden, q, self.out_bias),
                "mlp.gate_proj": (self.intermediate, self.hidden, self.mlp_bias),
                "mlp.up_proj": (self.intermediate, self.hidden, self.mlp_bias),
                "mlp.down_proj": (self.hidden, self.intermediate, self.mlp_bias),
            }
            for name, (rows, columns, bias) in projections.items():
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}{name}.weight"] = (self.hidden,)
            if self.qk_norm:
                shapes[f"{prefix}self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes

    @property
    def parameters(self) -> int:
        """Count all parameters; a tied head counts once."""
        return sum(map(math.prod, self.tensors.values()))

    @property
    def tied_names(self) -> dict[str, str]:
        """Alias name -> stored name."""
        return {HEAD: EMBEDDING} if self.tied else {}


def read_shape(folder: Path) -> Shape:
    """Read the shape from a model folder's config.json; ``ConfigError`` if it is missing or unsupported."""
    if not (folder / "config.json").is_file():
        raise ConfigError("there is no config.json", where=str(folder), remedy="give a Hugging Face model folder")
    return shape_of(AutoConfig.from_pretrained(folder), where=str(folder / "config.json"))


def shape_of(config: PretrainedConfig, *, where: str) -> Shape:
    """Return the shape; ``ConfigError`` names ``where`` and what is supported."""

    def refuse(what: str) -> ConfigError:
        remedy = f"the built-in engine serves {', '.join(ARCHITECTURES)}"
        return ConfigError(what, where=where, remedy=remedy)

    names = config.architectures or []
    architecture = names[0] if names else f"model type {config.model_type}"
    if not names and (found := {"llama": 0, "qwen2": 1, "qwen3": 2}.get(config.model_type)) is not None:
        architecture = ARCHITECTURES[found]
    if architecture not in ARCHITECTURES:
        raise refuse(f"architecture {architecture} is not supported")
    if config.hidden_act != "silu":
        raise refuse(f"activation {config.hidden_act!r} is not supported (silu is)")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise refuse("sliding-window attention is not supported")
    rope = config.rope_parameters["rope_type"]
    if rope not in ROPES:
        raise refuse(f"RoPE type {rope!r} is not supported ({', '.join(ROPES)} are)")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    frequencies, scale = _frequencies(config, rope, head_dim)
    qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = bool(getattr(config, "attention_bias", False))
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        epsilon=config.rms_norm_eps,
        context=config.max_position_embeddings,
        tied=config.tie_word_embeddings,
        qkv_bias=qwen2 or attention_bias,
        out_bias=not qwen2 and attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        frequencies=frequencies,
        rope_scale=scale,
    )


def _frequencies(config: PretrainedConfig, rope: str, head_dim: int) -> tuple[Tensor, float]:
    if rope != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope](config)
        return frequencies, scale
    base = config.rope_parameters["rope_theta"]
    return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), 1.0


@dataclass(frozen=True)
class _Layer:
    norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    """[heads per kv head + 1, head_dim]: the weights of q_norm, and of k_norm in the last row."""
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class DecoderWeights:
    """One version of the weights, rearranged for decoding; never changed once made."""

    def __init__(self, shape: Shape, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        """Copy ``tensors`` (all of ``shape.tensors``, on any device, in any floating dtype)."""
        with torch.inference_mode():
            get = _Reader(shape, tensors, device, dtype)
            self.embedding = get(EMBEDDING)
            self.norm = get(FINAL_NORM)
            self.head = linear(self.embedding if shape.tied else get(HEAD), None)
            self.layers = [get.layer(f"model.layers.{layer}.") for layer in range(shape.layers)]


class _Reader:
    """Takes tensors by name, on the device and in the compute dtype, and fuses those of one layer."""

    def __init__(self, shape: Shape, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._shape, self._tensors, self._device, self._dtype = shape, tensors, device, dtype
        # Pairs (i, i + head_dim / 2), which RoPE rotates, become neighbours.
        self._pairs = torch.arange(shape.head_dim).view(2, -1).t().flatten().to(device)

    def __call__(self, name: str) -> Tensor:
        # Always a copy: what is lent may be unmapped or overwritten as soon as the weights are made.
        return self._tensors[name].to(self._device, self._dtype, copy=True)

    def layer(self, prefix: str) -> _Layer:
        shape, pairs = self._shape, self._pairs
        qk_norm = None
        if shape.qk_norm:
            q_norm, k_norm = (self(f"{prefix}self_attn.{name}_norm.weight")[pairs] for name in "qk")
            qk_norm = torch.stack([q_norm] * (shape.heads // shape.kv_heads) + [k_norm])
        biased = shape.qkv_bias
        return _Layer(
            norm=self(f"{prefix}input_layernorm.weight"),
            qkv=linear(self._qkv(prefix, "weight"), self._qkv(prefix, "bias") if biased else None),
            qk_norm=qk_norm,
            out=self._projection(f"{prefix}self_attn.o_proj", bias=shape.out_bias),
            mlp_norm=self(f"{prefix}post_attention_layernorm.weight"),
            gate_up=linear(self._gate_up(prefix, "weight"), self._gate_up(prefix, "bias") if shape.mlp_bias else None),
            down=self._projection(f"{prefix}mlp.down_proj", bias=shape.mlp_bias),
        )

    def _qkv(self, prefix: str, part: str) -> Tensor:
        """Rows in the order: per key-value head, its query heads, its key, its value."""
        shape = self._shape
        q, k, v = (self(f"{prefix}self_attn.{name}_proj.{part}") for name in "qkv")
        heads = (shape.kv_heads, -1, shape.head_dim)
        q, k, v = (x.unflatten(0, heads) for x in (q, k, v))
        return torch.cat([q[:, :, self._pairs], k[:, :, self._pairs], v], dim=1).flatten(0, 2)

    def _gate_up(self, prefix: str, part: str) -> Tensor:
        return torch.cat([self(f"{prefix}mlp.{name}_proj.{part}") for name in ("gate", "up")])

    def _projection(self, name: str, *, bias: bool) -> Linear:
        return linear(self(f"{name}.weight"), self(f"{name}.bias") if bias else None)


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return ``x -> x @ weight.T + bias`` in the fastest form for this device and dtype.

    On CPUs in float32 the weight is packed once for oneDNN, which is up to twice as fast as F.linear: BLAS packs at
    each call and on some processors uses narrower instructions.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        apply = torch.ops.mkldnn._linear_pointwise
        return lambda x: apply(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)


class Span(NamedTuple):
    """Neighbouring slots whose first ``tokens`` cached tokens are read."""

    first: int
    stop: int
    tokens: int


def _cuts(lengths: NDArray[np.int64], worth: float) -> list[tuple[int, int]]:
    """Return [first, stop) of neighbours; each cut between them spares at least ``worth`` tokens of reading."""
    found, rest = list[tuple[int, int]](), [(0, len(lengths))]
    while rest:
        first, stop = rest.pop()
        here = lengths[first:stop]
        before = np.maximum.accumulate(here)
        behind = np.maximum.accumulate(here[::-1])[::-1]
        sizes = np.arange(1, len(here))
        spared = len(here) * before[-1] - (sizes * before[:-1] + (len(here) - sizes) * behind[1:])
        at = int(spared.argmax()) if len(spared) else 0
        if len(spared) and spared[at] >= worth:
            rest += [(first + at + 1, stop), (first, first + at + 1)]
        else:
            found.append((first, stop))
    return found


class Decoder:
    """The forward passes over a preallocated cache of ``slots`` sequences of at most ``capacity`` tokens.

    Not thread-safe. ``weights`` may be replaced between two calls.
    """

    def __init__(self, shape: Shape, slots: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.capacity, self.device, self.dtype = shape, capacity, device, dtype
        self.weights: DecoderWeights | None = None
        kv, head_dim = shape.kv_heads, shape.head_dim
        self._group = shape.heads // kv
        self._scale = 1 / math.sqrt(head_dim)
        with torch.inference_mode():
            # Zeroed, because a value beyond a sequence's end is multiplied by 0: it must be finite.
            self._keys = torch.zeros(shape.layers, slots * kv, head_dim, capacity, device=device, dtype=dtype)
            self._values = torch.zeros(shape.layers, slots * kv, capacity, head_dim, device=device, dtype=dtype)
            self._keys_by_slot = self._keys.unflatten(1, (slots, kv))
            self._values_by_slot = self._values.unflatten(1, (slots, kv))
            self._places = [keys.transpose(1, 2) for keys in self._keys]
            self._mask = torch.full((slots * kv, 1, capacity), -torch.inf, device=device, dtype=dtype)
            self._rows = torch.arange(slots * kv, device=device)
            self._slot_of_row = self._rows // kv
            self._epsilon = torch.tensor(shape.epsilon, device=device, dtype=dtype)
            self._turns = _turns(shape, capacity, device, dtype)

    def cache_bytes(self) -> int:
        """Return the size of the cache."""
        return 2 * int(self._keys.nbytes)

    def set_lengths(self, slots: Tensor, lengths: Tensor) -> None:
        """Let ``slots`` attend to their first ``lengths`` cached tokens."""
        seen = torch.arange(self.capacity, device=self.device) < lengths[:, None]
        mask = torch.zeros(seen.shape, device=self.device, dtype=self.dtype).masked_fill_(~seen, -torch.inf)
        by_slot = self._mask.view(-1, self.shape.kv_heads, self.capacity)
        by_slot[slots] = mask[:, None]

    def copy(self, source: Tensor, target: Tensor, tokens: int) -> None:
        """Copy the first ``tokens`` cached tokens of the slots ``source`` to the slots ``target``."""
        for cache in (self._keys_by_slot[..., :tokens], self._values_by_slot[..., :tokens, :]):
            cache.index_copy_(1, target, cache.index_select(1, source))

    def prefill(self, slots: Sequence[int], tokens: Sequence[Tensor]) -> None:
        """Fill the caches of ``slots`` with the keys and values of ``tokens`` (int64 on the device, not empty).

        Sequences of about one length go through one forward, right-padded: with causal attention no token sees padding,
        and what padding leaves in the cache lies beyond the sequence's length.
        """
        order = sorted(range(len(slots)), key=lambda i: len(tokens[i]))
        while order:
            shortest = len(tokens[order[0]])
            fit = [i for n, i in enumerate(order) if n == 0 or self._fits(n + 1, len(tokens[i]), shortest)]
            order = order[len(fit) :]
            ids = torch.nn.utils.rnn.pad_sequence([tokens[i] for i in fit], batch_first=True)
            self._prefill(torch.tensor([slots[i] for i in fit], device=self.device), ids)

    @staticmethod
    def _fits(count: int, longest: int, shortest: int) -> bool:
        return longest <= max(_PADDING * shortest, shortest + 8) and count * longest <= _PREFILL_TOKENS

    def _prefill(self, slots: Tensor, ids: Tensor) -> None:
        weights, group = self._current(), self._group
        count, width = ids.shape
        heads = (count, width, self.shape.kv_heads, group + 2, self.shape.head_dim)
        turns = self._turns[:width, None, None]
        x = weights.embedding[ids]
        for layer, keys, values in zip(weights.layers, self._keys_by_slot, self._values_by_slot, strict=True):
            qkv = layer.qkv(self._norm(x, layer.norm)).view(heads)
            qk = self._rotate(qkv[..., : group + 1, :], layer.qk_norm, turns)
            q, k, v = qk[..., :group, :], qk[..., group, :], qkv[..., group + 1, :]
            keys[..., :width].index_copy_(0, slots, k.permute(0, 2, 3, 1))
            values[..., :width, :].index_copy_(0, slots, v.transpose(1, 2))
            attended = F.scaled_dot_product_attention(
                q.flatten(2, 3).transpose(1, 2),
                k.transpose(1, 2).repeat_interleave(group, 1),
                v.transpose(1, 2).repeat_interleave(group, 1),
                is_causal=True,
            )
            x = self._rest(layer, x, attended.transpose(1, 2).reshape(count, width, -1))

    def spans(self, lengths: NDArray[np.int64]) -> list[Span]:
        """Divide the first slots into neighbours whose caches are read equally far, where that pays.

        ``lengths``: cached tokens of each slot. New sequences come behind those that have been there for long, so one
        long sequence does not have all others read as far as itself. A cut costs a few small operations in each layer;
        it is made where it saves more reading than these take.
        """
        worth = _CUT_FLOATS / (self.shape.kv_heads * self.shape.head_dim)
        return [Span(first, stop, int(lengths[first:stop].max()) + 1) for first, stop in _cuts(lengths, worth)]

    def decode(self, tokens: Tensor, positions: Tensor, spans: Sequence[Span]) -> Tensor:
        """Feed one token to each of the first slots and return the logits of the next, ``[live, vocabulary]``.

        ``tokens`` and ``positions`` are int64 ``[live]``; ``spans`` cover these slots in order, see there.
        """
        weights, shape, group = self._current(), self.shape, self._group
        live = len(tokens)
        count = live * shape.kv_heads
        rows = self._rows[:count]
        at = positions[self._slot_of_row[:count]]
        self._mask[rows, 0, at] = 0.0
        turns = self._turns[at].unsqueeze(1)
        x = weights.embedding[tokens]
        heads = (count, group + 2, shape.head_dim)
        for layer, keys, places, values in zip(weights.layers, self._keys, self._places, self._values, strict=True):
            qkv = layer.qkv(self._norm(x, layer.norm)).view(heads)
            qk = self._rotate(qkv[:, : group + 1], layer.qk_norm, turns)
            places.index_put_((rows, at), qk[:, group])
            values.index_put_((rows, at), qkv[:, group + 1])
            attended = [self._attend(qk[:, :group], keys, values, span) for span in spans]
            x = self._rest(layer, x, (attended[0] if len(spans) == 1 else torch.cat(attended)).view(live, -1))
        return weights.head(self._norm(x, weights.norm))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, span: Span) -> Tensor:
        """Return what the queries of some slots find in their first tokens, ``[rows, group, head_dim]``."""
        kv, length = self.shape.kv_heads, span.tokens
        rows = slice(span.first * kv, span.stop * kv)
        scores = torch.baddbmm(self._mask[rows, :, :length], queries[rows], keys[rows, :, :length], alpha=self._scale)
        return torch.bmm(torch.softmax(scores, -1), values[rows, :length])

    def _rest(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        x = layer.out(attended).add_(x)
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
        return layer.down(F.silu(gate).mul_(up)).add_(x)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._scale_to_unit(x).mul_(weight)

    def _scale_to_unit(self, x: Tensor) -> Tensor:
        """Divide by the root mean square over the last dimension: RMSNorm without its weight."""
        size = x.shape[-1]
        if x.dtype not in (torch.float32, torch.float64):
            return F.rms_norm(x, (size,), None, self.shape.epsilon)
        # Four operations; on CPUs F.rms_norm is made of twelve.
        norm = torch.linalg.vector_norm(x, 2, -1, True)
        return x * torch.addcmul(self._epsilon, norm, norm, value=1 / size).rsqrt_()

    def _rotate(self, qk: Tensor, norm: Tensor | None, turns: Tensor) -> Tensor:
        """Apply q_norm and k_norm, if there are any, and RoPE."""
        if norm is not None:
            qk = self._scale_to_unit(qk).mul_(norm)
        real = qk if qk.dtype in (torch.float32, torch.float64) else qk.float()
        torch.view_as_complex(real.unflatten(-1, (-1, 2))).mul_(turns)
        return real.to(qk.dtype)

    def _current(self) -> DecoderWeights:
        if self.weights is None:
            raise ValueError("the decoder has no weights yet")
        return self.weights


def _turns(shape: Shape, capacity: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return RoPE's rotations as complex numbers ``[capacity, head_dim / 2]``.

    Angles are float32 whatever the compute dtype, as transformers computes them.
    """
    angles = torch.arange(capacity, dtype=torch.float32)[:, None] * shape.frequencies.float()
    turns = torch.complex(angles.cos() * shape.rope_scale, angles.sin() * shape.rope_scale)
    return turns.to(device, torch.complex128 if dtype == torch.float64 else torch.complex64)
