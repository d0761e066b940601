"""Which arrays does a micro-batch consist of?

Owner: the trainer. Every rank cuts the same batch in the same way, so all counts that a loss is divided by are known
without communication. Only samples with a reward are trained on: the others are in no block and in no count.

Invariants (tests/backends/test_train_blocks.py): each completion token of a scored sample is in exactly one block;
weights of one minibatch sum to 1 (if every one of its samples has equal weight in the loss, that is).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereus.algo.advantage import group_advantages, scorable
from nereus.algo.packing import MicroBatch, pack
from nereus.backends.api import TrainBatch
from nereus.backends.torch.loss import Targets
from nereus.config import TrainConfig
from nereus.core.plan import Replication


class Block(NamedTuple):
    """One micro-batch on the device; a dummy has no positions."""

    ids: Tensor
    """int64 [rows, width], right-padded; the last token of a sample is only predicted and not fed."""
    positions: Tensor
    """int64 [n]: where in the flattened [rows * width] outputs the completion tokens are predicted."""
    targets: Targets


@dataclass(frozen=True)
class Cut:
    """One replica's blocks of one minibatch, and the minibatch's counts over all replicas."""

    blocks: list[Block]
    samples: int
    tokens: int
    """Completion tokens."""
    fed_tokens: int
    """Prompt and completion tokens."""


def minibatches(group_of: NDArray[np.int32], count: int) -> list[NDArray[np.int64]]:
    """Return the samples of each minibatch: whole groups, in order, as equal in number as they divide."""
    groups = np.unique(group_of)
    if count > len(groups):
        raise ValueError(f"{len(groups)} groups cannot be divided into {count} minibatches")
    return [np.flatnonzero(np.isin(group_of, part)) for part in np.array_split(groups, count)]


def check_batch(batch: TrainBatch, vocabulary: int) -> None:
    """Refuse a batch whose arrays do not fit together or the model; ``ValueError`` says which."""
    fed = int(batch.prompt_lengths.sum() + batch.lengths.sum())
    drawn = int(batch.lengths.sum())
    for name, array, size in (
        ("tokens", batch.tokens, fed),
        ("logprobs", batch.logprobs, drawn),
        ("versions", batch.versions, drawn),
        ("rewards", batch.rewards, len(batch.lengths)),
        ("group_of", batch.group_of, len(batch.lengths)),
        ("prompt_lengths", batch.prompt_lengths, len(batch.lengths)),
    ):
        if array.shape != (size,):
            raise ValueError(f"step {batch.step}: {name} has shape {array.shape}, expected ({size},)")
    if (batch.prompt_lengths < 1).any() or (batch.lengths < 1).any():
        raise ValueError(f"step {batch.step}: every sample needs at least one prompt and one completion token")
    if batch.tokens.min() < 0 or batch.tokens.max() >= vocabulary:
        worst = int(batch.tokens.max() if batch.tokens.min() >= 0 else batch.tokens.min())
        raise ValueError(f"step {batch.step}: token {worst} is not in the model's vocabulary of {vocabulary}")


def cut(
    batch: TrainBatch,
    config: TrainConfig,
    replication: Replication,
    replica: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Cut]:
    """Return the blocks that ``replica`` computes, minibatch after minibatch.

    Pipelined units get blocks of one shape and at least as many as they have ranks. Without pipelining nothing is
    done for dummies: replicas meet only when gradients are summed.
    """
    advantages = group_advantages(batch.rewards, batch.group_of, config.loss.advantage)
    scored = scorable(batch.rewards)
    layout = _Layout(batch, advantages, device, dtype)
    cuts = []
    for members in minibatches(batch.group_of, config.minibatches):
        samples = members[scored[members]]
        micro_batches = _pack(layout.fed[samples] - 1, config.micro_batch_tokens, replication, replica)
        drawn = int(batch.lengths[samples].sum())
        weights = _weights(batch.lengths, len(samples), drawn, config.loss.normalize)
        blocks = [layout.block(micro, samples, weights) for micro in micro_batches]
        cuts.append(Cut(blocks, len(samples), drawn, int(layout.fed[samples].sum())))
    return cuts


def _weights(
    lengths: NDArray[np.int32], samples: int, tokens: int, normalize: Literal["token", "sequence"]
) -> NDArray[np.float64]:
    """Return the weight in the loss of each token of each sample."""
    if normalize == "token":
        return np.full(len(lengths), 1.0 / max(1, tokens))
    return 1.0 / (max(1, samples) * lengths.astype(np.float64))


def _pack(lengths: NDArray[np.int64], budget: int, replication: Replication, replica: int) -> list[MicroBatch]:
    pp = replication.layout.pp
    if pp == 1:
        packing = pack(lengths.tolist(), replicas=replication.dp, budget=budget)
        return [micro for micro in packing.micro_batches[replica] if micro.samples]
    # Small enough micro-batches that every pipeline rank gets one.
    rows = max(1, len(lengths) // (replication.dp * pp))
    widest = int(lengths.max(initial=2))
    packing = pack(lengths.tolist(), replicas=replication.dp, budget=max(2, min(budget, rows * widest)), uniform=True)
    mine = list(packing.micro_batches[replica])
    return mine + [MicroBatch((), mine[0].rows, mine[0].width)] * (pp - len(mine))


class _Layout:
    """Where each sample's tokens lie in the flat arrays of a batch."""

    def __init__(
        self, batch: TrainBatch, advantages: NDArray[np.float64], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.fed = (batch.prompt_lengths + batch.lengths).astype(np.int64)
        self._batch = batch
        self._advantages = advantages
        self._starts = np.cumsum(self.fed) - self.fed
        self._drawn_starts = np.cumsum(batch.lengths, dtype=np.int64) - batch.lengths
        self._device = device
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def block(self, micro: MicroBatch, samples: NDArray[np.int64], weights: NDArray[np.float64]) -> Block:
        """Return the arrays of ``micro``, whose numbers count ``samples``."""
        batch, width = self._batch, micro.width
        members = samples[list(micro.samples)]
        ids = np.zeros((micro.rows, width), np.int64)
        positions, tokens, behaviour = [_NOTHING], [_NOTHING], [_NOTHING]
        for row, sample in enumerate(members.tolist()):
            start, prompt, drawn = self._starts[sample], batch.prompt_lengths[sample], batch.lengths[sample]
            end = start + prompt + drawn
            ids[row, : prompt + drawn - 1] = batch.tokens[start : end - 1]
            tokens.append(batch.tokens[start + prompt : end])
            first = row * width + prompt - 1
            positions.append(np.arange(first, first + drawn))
            drawn_start = self._drawn_starts[sample]
            behaviour.append(batch.logprobs[drawn_start : drawn_start + drawn])
        lengths = batch.lengths[members]
        return Block(
            self._integers([ids]),
            self._integers(positions),
            Targets(
                self._integers(tokens),
                self._floats(np.repeat(self._advantages[members], lengths)),
                self._floats(np.concatenate(behaviour)),
                self._floats(np.repeat(weights[members], lengths)),
            ),
        )

    def _integers(self, parts: Sequence[NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False)).to(self._device)

    def _floats(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device, self._dtype)


_NOTHING: NDArray[np.generic] = np.zeros(0, np.int64)
