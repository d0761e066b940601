"""A small Llama for the tests of the generation engine: weights by version, and its log-probabilities step by step."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig

from nereus.backends.api import SampleRequest
from nereus.backends.torch.decode_model import Decoder, DecoderWeights, Shape, Span, shape_of
from nereus.backends.torch.generate import GenerateEngine

CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
SHAPE: Shape = shape_of(CONFIG, where="test")


def tensors(version: int) -> dict[str, Tensor]:
    """Return random weights, others for each version."""
    source = torch.Generator().manual_seed(100 + version)
    return {
        name: torch.randn(size, generator=source, dtype=torch.float64) * 0.4 for name, size in SHAPE.tensors.items()
    }


def weights(version: int) -> DecoderWeights:
    return DecoderWeights(SHAPE, tensors(version), CPU, torch.float64)


def engine(slots: int = 4, capacity: int = 40, version: int = 0) -> GenerateEngine:
    made = GenerateEngine(SHAPE, slots=slots, capacity=capacity, device=CPU, dtype=torch.float64)
    made.offer(weights(version), version, "keep")
    return made


def request(
    name: str, prompt: list[int] | None = None, *, group: int = 0, new: int = 10, **more: object
) -> SampleRequest:
    prompt = prompt if prompt is not None else [1, 2, 3, 4, 5]
    index = int(name.rpartition("-")[2])
    return SampleRequest(name, np.array(prompt, np.int32), (11, group, index), new, **more)  # type: ignore[arg-type]


@torch.inference_mode()
def logprobs(version: int, prompt: NDArray[np.int32], drawn: NDArray[np.int32], temperature: float = 1.0) -> Tensor:
    """Score ``drawn`` token by token, alone, from an empty cache."""
    decoder = Decoder(SHAPE, slots=1, capacity=64, device=CPU, dtype=torch.float64)
    decoder.weights = weights(version)
    zero = torch.zeros(1, dtype=torch.int64)
    decoder.set_lengths(zero, zero)
    fed = np.concatenate((prompt, drawn))
    rows = [
        decoder.decode(torch.tensor([int(token)]), zero + at, [Span(0, 1, at + 1)])[0]
        for at, token in enumerate(fed[:-1])
    ]
    scores = torch.log_softmax(torch.stack(rows) / temperature, -1)
    return scores[len(prompt) - 1 :].gather(1, torch.from_numpy(drawn.astype(np.int64))[:, None])[:, 0]
