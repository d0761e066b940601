from __future__ import annotations

import numpy as np
import pytest

from nereus.actors.trainer import Collector, HeldGroup, make_batch, read_group
from nereus.bus.messages import Group, GroupRef, Sample
from nereus.errors import ProtocolError


def _group(group: int, lengths: tuple[int, ...], *, attempt: int = 0, prompt: int = 3) -> Group:
    samples = tuple(Sample(n, None if i == 1 else float(i), "stop", 4, 5) for i, n in enumerate(lengths))
    return Group(group, attempt, 7, "slot-2", prompt, samples)


def _frames(group: Group, **changes: np.ndarray) -> tuple[memoryview, ...]:
    total = sum(sample.tokens for sample in group.samples)
    arrays = {
        "prompt": np.arange(group.prompt_tokens, dtype=np.int32),
        "tokens": np.arange(100, 100 + total, dtype=np.int32),
        "logprobs": np.full(total, -0.25, np.float32),
        "versions": np.full(total, 4, np.int32),
    } | changes
    return tuple(memoryview(array).cast("B") for array in arrays.values())


def _held(group: int, lengths: tuple[int, ...], **options: int) -> HeldGroup:
    message = _group(group, lengths, **options)
    return read_group(message, _frames(message))


def test_frames_become_arrays_without_copies() -> None:
    message = _group(0, (2, 3))
    frames = _frames(message)
    held = read_group(message, frames)
    assert held.tokens.tolist() == [100, 101, 102, 103, 104]
    assert np.shares_memory(held.tokens, np.frombuffer(frames[1], np.int32))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokens": np.zeros(4, np.int32)}, "frame 1 has 16 bytes, expected 20"),
        ({"logprobs": np.array([0, np.nan, 0, 0, 0], np.float32)}, "not finite"),
        ({"tokens": np.array([1, 2, -3, 4, 5], np.int32)}, "negative"),
    ],
)
def test_frames_that_do_not_fit_are_refused(changes: dict[str, np.ndarray], complaint: str) -> None:
    message = _group(0, (2, 3))
    with pytest.raises(ProtocolError, match=complaint):
        read_group(message, _frames(message, **changes))


def test_missing_frames_and_empty_completions_are_refused() -> None:
    message = _group(0, (2, 3))
    with pytest.raises(ProtocolError, match="expected 4 frames, got 3"):
        read_group(message, _frames(message)[:3])
    empty = _group(0, (2, 0))
    with pytest.raises(ProtocolError, match="empty"):
        read_group(empty, _frames(empty))


def test_a_batch_lays_samples_side_by_side() -> None:
    batch = make_batch(9, 8, [_held(4, (2, 1)), _held(6, (1, 3), prompt=2)])
    assert batch.prompt_lengths.tolist() == [3, 3, 2, 2]
    assert batch.lengths.tolist() == [2, 1, 1, 3]
    assert batch.group_of.tolist() == [0, 0, 1, 1]
    assert batch.rewards.tolist()[0::2] == [0.0, 0.0]
    assert np.isnan(batch.rewards[1::2]).all()
    assert batch.tokens.tolist() == [0, 1, 2, 100, 101, 0, 1, 2, 102, 0, 1, 100, 0, 1, 101, 102, 103]
    assert len(batch.logprobs) == len(batch.versions) == 7


def test_a_repeated_delivery_is_held_once_and_a_release_forgets_all_attempts() -> None:
    collector = Collector()
    assert collector.accept(_held(1, (1,)))
    assert not collector.accept(_held(1, (1,)))
    assert collector.accept(_held(1, (1,), attempt=1))
    assert [held.message.attempt for held in collector.take([GroupRef(1, 1), GroupRef(1, 0)])] == [1, 0]
    collector.release([1])
    assert len(collector) == 0
    with pytest.raises(ProtocolError, match=r"does not hold group 1 \(attempt 1\)"):
        collector.take([GroupRef(1, 1)])
