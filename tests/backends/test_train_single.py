"""What does a trainer slot do around its arithmetic? One slot, no groups: refusals, self-check, publishing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
import torch
import xxhash
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from nereus.backends.api import TrainBatch
from nereus.backends.torch.model import build_meta, check_layout, lay_out, tensor_specs, tied_names
from nereus.backends.torch.train import TorchTrainer
from nereus.config import JobConfig
from nereus.core.plan import POLICY_TRAINING, Emu, Layout, Plan
from nereus.errors import ConfigError
from nereus.runtime.checkpoints import CheckpointStore
from nereus.transition.reshard import covers, offsets_of, whole

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path: Path) -> tuple[Any, Path]:
    config = LlamaConfig(**SIZES)
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(config).eval()
    folder = tmp_path / "model"
    folder.mkdir()
    config.save_pretrained(folder)
    save_file({name: value.detach().clone() for name, value in built.named_parameters()}, folder / "model.safetensors")
    return built, folder


def trainer(folder: Path, **job: Any) -> TorchTrainer:
    config = msgspec.convert({"train": {"learning_rate": 1e-2}} | job, JobConfig)
    emu = Emu(POLICY_TRAINING, 0, Layout(), (7,))
    slot = TorchTrainer(config)
    slot.assign(emu, Plan(1, (emu,)), 7, store="")
    slot.load(folder)
    return slot


def on_policy_batch(model: Any, temperature: float = 1.0) -> TrainBatch:
    """Return a batch whose log-probabilities are those of ``model``."""
    random = np.random.default_rng(0)
    prompts, lengths = np.array([2, 2, 3, 3], np.int32), np.array([5, 1, 4, 7], np.int32)
    rows = [random.integers(0, 32, prompt + length) for prompt, length in zip(prompts, lengths, strict=True)]
    logprobs = []
    for ids, prompt in zip(rows, prompts, strict=True):
        tokens = torch.from_numpy(ids)
        with torch.no_grad():
            table = (model(tokens[None]).logits[0, prompt - 1 : -1] / temperature).log_softmax(-1)
        logprobs.append(table.gather(-1, tokens[prompt:, None])[:, 0].numpy())
    return TrainBatch(
        step=0,
        version=3,
        prompt_lengths=prompts,
        lengths=lengths,
        group_of=np.array([0, 0, 1, 1], np.int32),
        rewards=np.array([1.0, 0.0, 0.25, 0.75]),
        tokens=np.concatenate(rows).astype(np.int32),
        logprobs=np.concatenate(logprobs).astype(np.float32),
        versions=np.full(lengths.sum(), 3, np.int32),
    )


def test_the_first_on_policy_step_has_ratio_one_and_is_reported_once(model: tuple[Any, Path]) -> None:
    built, folder = model
    slot = trainer(folder)
    with structlog.testing.capture_logs() as logs:
        first = slot.train(slot.share(on_policy_batch(built)))
        second = slot.train(on_policy_batch(built))
    assert first.metrics["mismatch/first_step_ratio_error"] < 1e-4
    assert first.metrics["mismatch/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert first.metrics["kl/old"] == 0.0
    assert "mismatch/first_step_ratio_error" not in second.metrics
    assert not [entry for entry in logs if entry["log_level"] == "warning"]
    assert first.metrics["reward/mean"] == 0.5
    assert first.tokens == 27
    assert slot.updates == 2


def test_a_temperature_on_one_side_is_warned_about(model: tuple[Any, Path]) -> None:
    built, folder = model
    slot = trainer(folder, rollout={"temperature": 0.5})
    with structlog.testing.capture_logs() as logs:
        report = slot.train(on_policy_batch(built, temperature=1.0))
    assert report.metrics["mismatch/first_step_ratio_error"] > 1e-3
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert "temperature" in warning["likely_causes"]


def test_the_temperature_of_sampling_is_applied(model: tuple[Any, Path]) -> None:
    built, folder = model
    slot = trainer(folder, rollout={"temperature": 0.5})
    report = slot.train(on_policy_batch(built, temperature=0.5))
    assert report.metrics["mismatch/first_step_ratio_error"] < 1e-4


def test_a_gradient_that_is_not_finite_changes_nothing(model: tuple[Any, Path]) -> None:
    built, folder = model
    slot = trainer(folder, train={"warmup_steps": 2})
    slot.train(on_policy_batch(built))
    before = {kind: {n: t.clone() for n, (_, t) in slot.pieces(kind).items()} for kind in ("parameter", "exp_avg")}
    broken = on_policy_batch(built)
    broken.logprobs[3] = math.nan
    report = slot.train(broken)
    assert report.skipped
    assert math.isnan(report.metrics["optim/grad_norm"])
    assert slot.updates == 1
    for kind, tensors in before.items():
        assert all(torch.equal(slot.pieces(kind)[name][1], value) for name, value in tensors.items())
    assert not slot.train(on_policy_batch(built)).skipped


def test_six_steps_equal_three_saved_resumed_and_three_more(model: tuple[Any, Path], tmp_path: Path) -> None:
    built, folder = model
    batch = on_policy_batch(built)
    for dtype in ("float32", "bfloat16"):
        options = {"model": {"dtype": dtype}, "train": {"schedule": "cosine", "warmup_steps": 2}, "run": {"steps": 8}}
        straight = trainer(folder, **options)
        for _ in range(6):
            straight.train(batch)
        half = trainer(folder, **options)
        for _ in range(3):
            half.train(batch)
        checkpoints = CheckpointStore(tmp_path / dtype, 1)
        entry = half.save(checkpoints.begin(3), 3)
        resumed = trainer(checkpoints.commit(3, [entry], {}, model=folder, tensors=half.tensors), **options)
        assert resumed.updates == 3
        for _ in range(3):
            report = resumed.train(batch)
        assert "mismatch/first_step_ratio_error" not in report.metrics
        for kind in ("parameter", "exp_avg", "exp_avg_sq"):
            expected = straight.pieces(kind)
            for name, (_, value) in resumed.pieces(kind).items():
                assert torch.equal(value, expected[name][1]), f"{dtype}: {kind} of {name}"


def test_a_resumed_run_with_a_kl_term_needs_the_model_it_began_with(model: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = model
    checkpoints = CheckpointStore(tmp_path / "checkpoints", 1)
    started = trainer(folder, train={"loss": {"kl_coefficient": 0.1}})
    committed = checkpoints.commit(1, [started.save(checkpoints.begin(1), 1)], {}, model=folder)
    with pytest.raises(ConfigError, match="the reference model of a resumed run is not there"):
        trainer(committed, train={"loss": {"kl_coefficient": 0.1}})
    trainer(committed, train={"loss": {"kl_coefficient": 0.1}}, model={"path": str(folder)})


def test_training_raises_the_probability_of_what_was_rewarded(model: tuple[Any, Path]) -> None:
    built, folder = model
    slot = trainer(folder, train={"learning_rate": 3e-3, "loss": {"correction": "none"}})
    batch = on_policy_batch(built)
    losses = [slot.train(batch).metrics["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]


def test_published_bytes_are_the_weights(model: tuple[Any, Path], tmp_path: Path) -> None:
    built, folder = model
    for dtype in ("float32", "bfloat16"):
        slot = trainer(folder, model={"dtype": dtype})
        offsets, size = offsets_of(slot.tensors)
        path = tmp_path / dtype
        path.write_bytes(bytes(size))
        pieces = slot.publication()
        assert covers(slot.tensors, pieces) == ()
        checksums = slot.write(pieces, path, offsets)
        for spec in slot.tensors:
            found = torch.from_file(str(path), size=size, dtype=torch.uint8)[offsets[spec.name] :]
            weights = built.get_parameter(spec.name).detach().to(getattr(torch, dtype))
            raw = weights.contiguous().view(torch.uint8).flatten()
            assert torch.equal(found[: len(raw)], raw)
            position = pieces.index(whole(spec))
            assert checksums[position] == xxhash.xxh3_64_hexdigest(raw.numpy().tobytes())
        with pytest.raises(ValueError, match="does not hold"):
            slot.write([whole(msgspec.structs.replace(slot.tensors[0], name="stranger"))], path, offsets)
    assert slot.tied == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("layout", "sizes", "message"),
    [
        (Layout(tp=4), {}, "2 key-value heads do not divide over tp=4; take tp out of 1, 2"),
        (
            Layout(tp=3),
            {"num_key_value_heads": 3, "num_attention_heads": 4},
            "4 attention heads do not divide over tp=3",
        ),
        (Layout(tp=2), {"intermediate_size": 25}, "25 intermediate channels do not divide over tp=2"),
        (Layout(pp=3), {}, "2 layers cannot fill pp=3 pipeline ranks; take pp of at most 2"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_both_numbers(
    layout: Layout, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"train\.layout") as refused:
        check_layout(LlamaConfig(**(SIZES | sizes)), layout)
    assert message in str(refused.value)


@pytest.mark.parametrize("vocabulary", [32, 33])
@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2)])
def test_the_slots_of_a_unit_cover_the_model(layout: Layout, vocabulary: int) -> None:
    config = LlamaConfig(**(SIZES | {"vocab_size": vocabulary}))
    built = build_meta(config, "sdpa", torch.float32)
    specs = tensor_specs(built, layout, "float32")
    assert tied_names(built) == {"lm_head.weight": "model.embed_tokens.weight"}
    pieces = set()
    for index in range(layout.slots):
        entries, elements = lay_out(built, specs, layout, index)
        ends = [entry.offset + entry.elements for entry in entries]
        assert all(end <= after.offset for end, after in zip(ends, entries[1:], strict=False))
        assert ends[-1] <= elements
        pieces |= {entry.piece for entry in entries}
    assert covers(specs, pieces) == ()


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        trainer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="model type 'gpt2' is not supported"):
        trainer(tmp_path)
