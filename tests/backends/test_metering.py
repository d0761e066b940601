"""What does a trainer slot say of its time and memory, and what does it do at its limits? One slot, no groups."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from nereus.backends.api import TrainBatch
from nereus.backends.emulation import Speeds, TrainingCosts, merged
from nereus.backends.torch.metering import Kept
from nereus.backends.torch.train import TorchTrainer
from nereus.config import EmulateConfig, JobConfig
from nereus.control.efficiency import CLASSES
from nereus.core.plan import POLICY_TRAINING, Emu, Layout, Plan
from nereus.core.shape import ModelShape
from nereus.errors import OutOfMemory
from tests.tiers import spread

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
EMU = Emu(POLICY_TRAINING, 0, Layout(), (7,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**SIZES)
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(config)
    made = tmp_path_factory.mktemp("model")
    config.save_pretrained(made)
    save_file({name: value.detach().clone() for name, value in built.named_parameters()}, made / "model.safetensors")
    return made


def trainer(folder: Path, **job: Any) -> TorchTrainer:
    config = msgspec.convert(job, JobConfig)
    slot = TorchTrainer(config)
    slot.assign(EMU, Plan(1, (EMU,), (POLICY_TRAINING,) if config.train.recompute else ()), 7, store="")
    slot.load(folder)
    return slot


def batch(lengths: tuple[int, ...] = (5, 9, 4, 7), step: int = 0) -> TrainBatch:
    random = np.random.default_rng(step)
    drawn, prompts = np.array(lengths, np.int32), np.full(len(lengths), 3, np.int32)
    return TrainBatch(
        step=step,
        version=step,
        prompt_lengths=prompts,
        lengths=drawn,
        group_of=(np.arange(len(lengths)) // 2).astype(np.int32),
        rewards=random.random(len(lengths)),
        tokens=random.integers(0, 64, int((prompts + drawn).sum())).astype(np.int32),
        logprobs=np.full(drawn.sum(), -4.0, np.float32),
        versions=np.full(drawn.sum(), step, np.int32),
    )


def state(slot: TorchTrainer) -> dict[str, torch.Tensor]:
    return {
        f"{kind}/{name}": value.clone()
        for kind in ("parameter", "exp_avg", "exp_avg_sq")
        for name, (_, value) in slot.pieces(kind).items()
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def storages() -> dict[int, int]:
    """Return the size of every storage that a tensor of this process uses."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor) and item.device.type == "cpu"]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("job", [{}, {"model": {"dtype": "bfloat16"}}, {"train": {"loss": {"kl_coefficient": 0.1}}}])
def test_the_state_is_counted_as_the_tensors_that_are_there(folder: Path, job: dict[str, Any]) -> None:
    before = storages()
    slot = trainer(folder, **job)
    new = {place: size for place, size in storages().items() if place not in before}
    counted = slot._meter.needed_bytes  # the report adds what a step needs
    flat = slot.pieces("parameter")["model.embed_tokens.weight"][1].untyped_storage().nbytes()
    assert counted["masters"] == counted["gradient"] == flat
    assert counted["moments"] == 2 * flat
    assert counted["parameters"] == (flat // 2 if "model" in job else 0)
    assert counted["reference"] == (flat if "train" in job else 0)
    small = 2000  # rotary frequencies, counters
    assert 0 <= sum(new.values()) - sum(counted.values()) < small


class Marker:
    """Something that can be referred to weakly."""


def test_what_autograd_keeps_counts_each_storage_once_and_not_the_state() -> None:
    flat = torch.randn(100, requires_grad=True)
    weight, x = flat[:32].view(8, 4), torch.randn(16, 8)
    kept = Kept([flat])
    with kept.counting():
        grown = (x @ weight).exp()  # keeps x, the weight, and the result
        total = (grown.view(-1) * grown.flatten()).sum()  # keeps the result again, in two shapes
    assert kept.size_bytes == x.nbytes + grown.nbytes
    abandoned = Kept([flat])
    with abandoned.counting():
        lost = (x @ weight).exp()
    lost.marker = Marker()  # type: ignore[attr-defined]
    marker = weakref.ref(lost.marker)  # type: ignore[attr-defined]
    del lost
    assert marker() is None, "what no backward pass frees goes with its last reference"
    total.backward()
    assert flat.grad is not None and flat.grad[:32].any()


def test_recomputation_keeps_little_more_than_the_inputs_of_layers(tmp_path: Path) -> None:
    kept = {}
    for layers, again in itertools.product((2, 4), (False, True)):
        config = LlamaConfig(**SIZES | {"num_hidden_layers": layers})
        folder = tmp_path / f"{layers}-{again}"
        folder.mkdir()
        built = AutoModelForCausalLM.from_config(config)
        config.save_pretrained(folder)
        save_file(
            {name: value.detach().clone() for name, value in built.named_parameters()}, folder / "model.safetensors"
        )
        slot = trainer(folder, train={"recompute": again, "micro_batch_tokens": 400})
        report = slot.train(batch())
        state_bytes = sum(slot._meter.needed_bytes.values())
        kept[layers, again] = report.peak_bytes - state_bytes
    tokens = 4 * 11
    hidden = tokens * SIZES["hidden_size"] * 4
    per_layer = (kept[4, False] - kept[2, False]) / 2
    assert per_layer > 8 * hidden
    assert (kept[4, True] - kept[2, True]) / 2 == hidden
    assert kept[2, True] - hidden > per_layer, "one layer is whole while its backward pass runs"


def test_recomputation_comes_and_goes_with_the_plan(folder: Path) -> None:
    changing, plain = trainer(folder), trainer(folder)
    peaks = []
    for step, recomputed in enumerate(((), (POLICY_TRAINING,), ())):
        if step:
            changing.assign(EMU, Plan(1 + step, (EMU,), recomputed), 7, store="")
            assert changing.adopt() == step
        peaks.append(changing.train(batch(step=step)).peak_bytes)
        plain.train(batch(step=step))
    assert peaks[1] < peaks[0] == peaks[2]
    for kind, tensor in state(plain).items():
        assert torch.allclose(tensor, state(changing)[kind], atol=1e-6)


def test_reports_carry_lengths_peak_and_operations(folder: Path) -> None:
    slot = trainer(folder)
    first, second = slot.train(batch()), slot.train(batch(step=1))
    assert first.metrics["length/mean"] == 9.25
    assert first.metrics["length/p95"] == pytest.approx(np.percentile([8, 12, 7, 10], 95))
    assert first.metrics["response_length/p95"] == pytest.approx(np.percentile([5, 9, 4, 7], 95))
    assert first.metrics["perf/peak_mem_gib"] == first.peak_bytes / (1 << 30)
    assert set(second.operations) == {"gemm", "attention", "vocabulary", "memory", "optimizer"}
    assert set(second.operations) <= set(map(str, CLASSES))
    assert "optimizer" not in first.operations, "the update follows the report"
    timed = second.metrics["timing_s/forward_backward"] + second.metrics["timing_s/optimizer"]
    assert 0.3 * timed < sum(second.operations.values()) <= timed
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in slot._policy.stage.modules())


def test_limits_that_are_not_reached_change_nothing(folder: Path) -> None:
    plain, limited = trainer(folder), trainer(folder, emulate={"memory_mb": 10, "gflops": 1e6})
    for step in range(2):
        one, other = plain.train(batch(step=step)), limited.train(batch(step=step))
        assert one.peak_bytes == other.peak_bytes
        assert one.metrics["loss"] == other.metrics["loss"]
    assert equal(state(plain), state(limited))


@pytest.mark.deep
def test_a_paced_step_takes_what_the_emulated_slot_would(folder: Path) -> None:
    """So slow that a loaded machine is faster; speeds at which it is not are left to ``test_emulation.py``."""
    config = EmulateConfig(gflops=0.001, memory_gb_s=0.02)
    slot = trainer(folder, emulate=msgspec.to_builtins(config), train={"recompute": True})
    speeds = Speeds.of(config)
    assert speeds is not None
    costs = TrainingCosts(speeds, ModelShape.from_config(LlamaConfig(**SIZES).to_dict()), Layout(), 0, 4)
    report = slot.train(batch((2, 3)))
    # A sample is fed without its last token.
    expected = merged(costs.forward(2, 5), costs.head(5), costs.backward(2, 5, 5, True))
    for kind, seconds in expected.items():
        assert report.operations[kind] == pytest.approx(seconds)
    assert report.metrics["timing_s/forward_backward"] > 0.99 * sum(expected.values())
    elements = sum(value.numel() for _, value in slot.pieces("parameter").values())
    assert report.seconds > 0.99 * sum(expected.values()) + elements * 7 * 4 / 0.02e9


@pytest.mark.parametrize("minibatches", spread([2, 1], 1))
def test_a_step_that_needs_too_much_changes_nothing_and_can_be_made_again(folder: Path, minibatches: int) -> None:
    small, large = batch(), batch((5, 9, 60, 7), step=1)  # the largest sample comes in the last minibatch
    free = trainer(folder, train={"minibatches": minibatches})
    fits, needs = free.train(small).peak_bytes, free.train(large).peak_bytes
    assert needs > fits + 50_000
    slot = trainer(folder, train={"minibatches": minibatches}, emulate={"memory_mb": 1})
    slot._meter._limit_bytes = (fits + needs) // 2  # finer than MB
    slot.train(small)
    before, updates = state(slot), slot.updates
    with pytest.raises(
        OutOfMemory, match=r"policy.training/0 on slot 7 needs .* MB \(.*activations .* limit"
    ) as caught:
        slot.train(large)
    assert caught.value.needed_bytes.keys() >= {"masters", "gradient", "moments", "activations", "logits"}
    assert sum(caught.value.needed_bytes.values()) - caught.value.limit_bytes == caught.value.shortfall_bytes > 0
    standing = slot.standing()
    assert (standing.step, standing.ready, standing.torn) == (1, False, False)
    slot.assign(EMU, Plan(2, (EMU,)), 7, store="")
    assert slot.adopt() == 1
    assert equal(before, state(slot)) and slot.updates == updates
    again, reference = batch(step=1), trainer(folder, train={"minibatches": minibatches})
    reference.train(small)
    reference.train(again)
    slot.train(again)
    assert equal(state(reference), state(slot))


def test_the_state_alone_can_be_too_much(folder: Path) -> None:
    slot = trainer(folder, emulate={"memory_mb": 1})
    slot._meter._limit_bytes = 1000
    with pytest.raises(OutOfMemory, match=r"its limit is 0.0 MB"):
        slot.train(batch())
