"""How much memory does one slot of a unit need, roughly?

Plain arithmetic over a model's shape, every term named, nothing measured: right for parameters and optimizer state, an
estimate for activations. Temporary memory of kernels and of the allocator is left out.
"""

from __future__ import annotations

from nereus.core.plan import Layout
from nereus.core.shape import ModelShape

_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def training_memory(
    shape: ModelShape,
    layout: Layout,
    pp_rank: int,
    *,
    layers: int,
    dtype: str,
    micro_batch_tokens: int,
    recompute: bool,
) -> dict[str, int]:
    """Return bytes by purpose for a trainer slot that holds ``layers`` decoder layers as pipeline rank ``pp_rank``.

    Masters, moments and gradients are float32 (float64 for a float64 model). A float32 or float64 model is its own
    master. Pipeline rank ``r`` of ``pp`` keeps the activations of ``pp - r`` micro-batches alive (one forward, one
    backward).
    """
    compute, master = _BYTES[dtype], max(_BYTES[dtype], 4)
    first, last = pp_rank == 0, pp_rank == layout.pp - 1
    count = _parameters(shape, layout.tp, layers=layers, first=first, last=last)
    tokens = micro_batch_tokens * (layout.pp - pp_rank)
    whole_layer = _layer_activations(shape, layout.tp) * compute
    if recompute:
        activations = tokens * layers * shape.hidden * compute + micro_batch_tokens * whole_layer
    else:
        activations = tokens * layers * whole_layer
    return {
        "parameters": count * compute,
        "masters": count * master if master != compute else 0,
        "gradients": count * master,
        "moments": 2 * count * master,
        "activations": activations,
        "logits": 2 * micro_batch_tokens * shape.vocab * master if last else 0,
    }


def rollout_memory(shape: ModelShape, layout: Layout, *, dtype: str, max_live: int, max_tokens: int) -> dict[str, int]:
    """Return bytes by purpose for a rollout slot that decodes ``max_live`` sequences of up to ``max_tokens`` tokens."""
    compute = _BYTES[dtype]
    layers = -(-shape.layers // layout.pp)
    count = _parameters(shape, layout.tp, layers=layers, first=True, last=True)
    return {
        "parameters": count * compute,
        "KV cache": max_live * max_tokens * 2 * layers * shape.kv_heads * shape.head_dim * compute // layout.tp,
        "logits": max_live * shape.vocab * max(compute, 4),
    }


def relay_memory(shape: ModelShape, *, dtype: str) -> dict[str, int]:
    """Return bytes of shared memory for the weight-sync relay: the visible version and the one being written."""
    return {"published versions": 2 * shape.parameters * _BYTES[dtype]}


def _parameters(shape: ModelShape, tp: int, *, layers: int, first: bool, last: bool) -> int:
    """Count the parameters of one slot; embedding and head are counted whole on the ranks that hold them."""
    ends = shape.embedding_parameters * (first or (last and shape.tied))
    ends += shape.embedding_parameters * (last and not shape.tied) + shape.hidden * last
    return layers * shape.layer_parameters(tp) + ends


def _layer_activations(shape: ModelShape, tp: int) -> int:
    """Count the values that one layer keeps per token for its backward pass.

    Whole on each rank: two residual inputs, two norm outputs, two block outputs (6 x hidden). Cut by tp: queries, keys,
    values and the attention output; gate, up, activated gate and their product.
    """
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return 6 * shape.hidden + (attention + 4 * shape.intermediate) // tp
