"""The decoder gives transformers' logits, for every family, prefill and decode, and refuses what it cannot serve."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nereus.backends.torch.decode_model import Decoder, DecoderWeights, Span, read_shape, shape_of
from nereus.errors import ConfigError
from tests.tiers import spread

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "llama tied": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama biases": (LlamaForCausalLM, LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    "llama one kv head": (LlamaForCausalLM, LlamaConfig(**{**SMALL, "num_key_value_heads": 1})),
    "llama no gqa": (LlamaForCausalLM, LlamaConfig(**{**SMALL, "num_key_value_heads": 6})),
    "llama rope llama3": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=LLAMA3)),
    "llama rope linear": (
        LlamaForCausalLM,
        LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"})),
    "qwen2 tied": (
        Qwen2ForCausalLM,
        Qwen2Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}, tie_word_embeddings=True),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL)),
}


def reference(case: str, dtype: torch.dtype) -> torch.nn.Module:
    """Make the model with all parameters random: a norm weight of one or a bias of zero would hide a fault."""
    kind, config = CASES[case]
    torch.manual_seed(3)
    model = kind(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            # transformers computes norms in float32 even in a float64 model, which hides anything below 1e-6.
            module.forward = partial(norm, module.weight, module.variance_epsilon)
    return model


def norm(weight: torch.Tensor, epsilon: float, x: torch.Tensor) -> torch.Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


def stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 5e-5)])
@pytest.mark.parametrize("case", spread(list(CASES), 4))
def test_logits_equal_transformers(case: str, dtype: torch.dtype, tolerance: float) -> None:
    model = reference(case, dtype)
    shape = shape_of(model.config, where="test")
    assert {name: tuple(t.shape) for name, t in stored(model).items()} == shape.tensors
    cpu = torch.device("cpu")
    decoder = Decoder(shape, slots=4, capacity=40, device=cpu, dtype=dtype)
    decoder.weights = DecoderWeights(shape, stored(model), cpu, dtype)
    lengths = [5, 17, 1, 6]
    torch.manual_seed(4)
    ids = [torch.randint(96, (length + 8,)) for length in lengths]
    with torch.inference_mode():
        fed = [x[: n - 1] for x, n in zip(ids, lengths, strict=True) if n > 1]
        decoder.prefill([i for i in range(4) if lengths[i] > 1], fed)
        decoder.set_lengths(torch.arange(4), torch.tensor(lengths) - 1)
        expected = [model(x[None]).logits[0] for x in ids]
        for step in range(8):
            positions = torch.tensor(lengths) - 1 + step
            tokens = torch.stack([x[p] for x, p in zip(ids, positions, strict=True)])
            each = [Span(row, row + 1, int(position) + 1) for row, position in enumerate(positions)]
            logits = decoder.decode(tokens, positions, each if step % 2 else [Span(0, 4, int(positions.max()) + 1)])
            for row, position in enumerate(positions):
                assert (logits[row] - expected[row][position]).abs().max() < tolerance


@given(lengths=st.lists(st.integers(0, 40_000), min_size=1, max_size=40))
def test_caches_are_read_as_far_as_neighbours_need_where_that_pays(lengths: list[int]) -> None:
    shape = shape_of(reference("llama", torch.float64).config, where="test")
    decoder = Decoder(shape, slots=1, capacity=1, device=torch.device("cpu"), dtype=torch.float32)
    spans = decoder.spans(np.array(lengths))
    assert [slot for span in spans for slot in range(span.first, span.stop)] == list(range(len(lengths)))
    assert all(span.tokens == max(lengths[span.first : span.stop]) + 1 for span in spans)
    read = sum((span.stop - span.first) * (span.tokens - 1) for span in spans)
    spared = (len(lengths) * max(lengths) - read) * shape.kv_heads * shape.head_dim
    assert spared >= 100_000 * (len(spans) - 1)


def test_one_long_sequence_does_not_have_all_others_read_as_far() -> None:
    shape = shape_of(reference("llama", torch.float64).config, where="test")
    decoder = Decoder(shape, slots=1, capacity=1, device=torch.device("cpu"), dtype=torch.float32)
    assert decoder.spans(np.array([40_000] + [30] * 63)) == [Span(0, 1, 40_001), Span(1, 64, 31)]
    assert decoder.spans(np.array([30] * 64)) == [Span(0, 64, 31)]


def test_copied_slots_go_on_like_their_source() -> None:
    model = reference("llama", torch.float64)
    shape = shape_of(model.config, where="test")
    cpu = torch.device("cpu")
    decoder = Decoder(shape, slots=3, capacity=16, device=cpu, dtype=torch.float64)
    decoder.weights = DecoderWeights(shape, stored(model), cpu, torch.float64)
    ids = torch.arange(7)
    with torch.inference_mode():
        decoder.prefill([0], [ids])
        decoder.copy(torch.tensor([0, 0]), torch.tensor([1, 2]), 7)
        decoder.set_lengths(torch.arange(3), torch.tensor([7, 7, 7]))
        logits = decoder.decode(torch.tensor([9, 9, 10]), torch.tensor([7, 7, 7]), [Span(0, 3, 8)])
    torch.testing.assert_close(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["llama", "llama tied", "llama biases", "qwen3"])
def test_weights_are_copied_from_what_is_lent(case: str, dtype: torch.dtype) -> None:
    model = reference(case, dtype)
    shape = shape_of(model.config, where="test")
    cpu = torch.device("cpu")
    lent = {name: tensor.clone() for name, tensor in stored(model).items()}
    decoder = Decoder(shape, slots=1, capacity=8, device=cpu, dtype=dtype)
    decoder.weights = DecoderWeights(shape, lent, cpu, dtype)
    with torch.inference_mode():
        decoder.set_lengths(torch.tensor([0]), torch.tensor([0]))
        before = decoder.decode(torch.tensor([1]), torch.tensor([0]), [Span(0, 1, 1)])
        for tensor in lent.values():
            tensor.zero_()
        after = decoder.decode(torch.tensor([1]), torch.tensor([0]), [Span(0, 1, 1)])
    torch.testing.assert_close(before, after, rtol=0, atol=0)


def write_config(folder: Path, **changes: Any) -> Path:
    base = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SMALL}
    (folder / "config.json").write_text(json.dumps({**base, **changes}))
    return folder


def test_config_json_is_read(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path))
    assert (shape.layers, shape.kv_heads, shape.context) == (3, 2, 64)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 4,
                "max_window_layers": 1,
            },
            "sliding-window",
        ),
    ],
)
def test_what_is_unsupported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        read_shape(write_config(tmp_path, **changes))
    assert "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in str(refused.value)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_shape(tmp_path)
