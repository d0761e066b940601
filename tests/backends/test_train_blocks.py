"""Are samples cut into blocks so that each token counts once, with weights that do not depend on the cut?"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.backends.api import TrainBatch
from nereus.backends.torch.blocks import check_batch, cut, minibatches
from nereus.config import LossConfig, TrainConfig
from nereus.core.plan import Layout, Replication


def make_batch(prompts: list[int], lengths: list[int], rewards: list[float], size: int = 2) -> TrainBatch:
    fed, drawn = sum(prompts) + sum(lengths), sum(lengths)
    return TrainBatch(
        step=0,
        version=0,
        prompt_lengths=np.array(prompts, np.int32),
        lengths=np.array(lengths, np.int32),
        group_of=(np.arange(len(prompts)) // size).astype(np.int32),
        rewards=np.array(rewards),
        tokens=np.arange(1, fed + 1, dtype=np.int32),
        logprobs=np.arange(drawn, dtype=np.float32),
        versions=np.zeros(drawn, np.int32),
    )


@settings(max_examples=50, deadline=None)
@given(
    samples=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9), st.booleans()), min_size=4, max_size=12),
    dp=st.integers(1, 3),
    pp=st.integers(1, 3),
    budget=st.integers(8, 60),
    normalize=st.sampled_from(["token", "sequence"]),
)
def test_every_scored_token_is_in_one_block(
    samples: list[tuple[int, int, bool]], dp: int, pp: int, budget: int, normalize: str
) -> None:
    samples = samples[: len(samples) // 2 * 2]
    prompts, lengths = [prompt for prompt, _, _ in samples], [length for _, length, _ in samples]
    rewards = [float(i) if has else np.nan for i, (_, _, has) in enumerate(samples)]
    batch = make_batch(prompts, lengths, rewards)
    loss = LossConfig(normalize=normalize)  # type: ignore[arg-type]
    config = TrainConfig(micro_batch_tokens=budget, minibatches=2, loss=loss)
    replication = Replication(dp, Layout(1, pp))
    seen: list[int] = []
    weights = 0.0
    per_replica = [
        cut(batch, config, replication, replica, torch.device("cpu"), torch.float64) for replica in range(dp)
    ]
    for cuts in per_replica:
        for part in cuts:
            shapes = {block.ids.shape for block in part.blocks}
            if pp > 1:
                assert len(part.blocks) >= pp and len(shapes) == 1
            for block in part.blocks:
                flat = block.ids.flatten()
                behaviour = block.targets.behaviour.long().tolist()
                seen += behaviour
                weights += float(block.targets.weights.sum())
                for position, token in zip(block.positions.tolist(), block.targets.tokens.tolist(), strict=True):
                    assert flat[position] == token - 1, "tokens count up, so each follows the one it is predicted from"
    ends = np.cumsum(lengths)
    expected = [t for i, r in enumerate(rewards) if r == r for t in range(ends[i] - lengths[i], ends[i])]
    assert sorted(seen) == expected
    filled = sum(part.samples > 0 for part in per_replica[0])
    assert weights == pytest.approx(filled)


def test_minibatches_take_whole_groups() -> None:
    parts = minibatches(np.array([0, 0, 1, 1, 1, 2, 2, 5], np.int32), 2)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    with pytest.raises(ValueError, match="2 groups cannot be divided into 3"):
        minibatches(np.array([0, 1], np.int32), 3)


def test_a_batch_that_does_not_fit_together_is_refused() -> None:
    good = make_batch([1, 2], [3, 4], [0.0, 1.0])
    check_batch(good, 11)
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    with pytest.raises(ValueError, match="logprobs has shape"):
        check_batch(TrainBatch(**(fields | {"logprobs": good.logprobs[:-1]})), 11)
    with pytest.raises(ValueError, match="at least one prompt and one completion token"):
        check_batch(make_batch([1, 2], [3, 0], [0.0, 1.0]), 11)
    with pytest.raises(ValueError, match="token 10 is not in the model's vocabulary of 10"):
        check_batch(good, 10)
