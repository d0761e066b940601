"""On one GPU, in bf16: a small Llama trains, generates and takes over weights as the relay lends them.

``python -m pytest -m gpu -s tests/gpu`` prints the figures of each step. Not yet run: no GPU was at hand.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from pathlib import Path

import numpy as np
import pytest

from nereus.backends.api import Completion, SampleRequest, TrainBatch
from nereus.bus.messages import PullFrom
from nereus.config import ClusterConfig, JobConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, Emu, Layout, Plan
from nereus.transition.checksum import tensors_checksum
from nereus.transition.reshard import offsets_of

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

GROUPS, GROUP, NEW_TOKENS, STEPS = 16, 8, 128, 5


def _model(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def _publish(trainer: object, path: Path, version: int) -> PullFrom:
    """Write the trainer's weights as the relay would lend them."""
    specs = trainer.tensors  # type: ignore[attr-defined]
    offsets, size = offsets_of(specs)
    with path.open("wb") as file:
        file.truncate(size)
    trainer.write(trainer.publication(), path, offsets)  # type: ignore[attr-defined]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        checksum = tensors_checksum(memory, specs, offsets)
    return PullFrom(version, str(path), offsets, specs, trainer.tied, checksum)  # type: ignore[attr-defined]


def _batch(step: int, prompts: list[np.ndarray], drawn: list[Completion]) -> TrainBatch:
    rng = np.random.default_rng(step)
    return TrainBatch(
        step=step,
        version=step,
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        lengths=np.array([len(one.tokens) for one in drawn], np.int32),
        group_of=np.repeat(np.arange(GROUPS, dtype=np.int32), GROUP),
        rewards=rng.random(len(drawn)),
        tokens=np.concatenate([np.concatenate((p, c.tokens)) for p, c in zip(prompts, drawn, strict=True)]),
        logprobs=np.concatenate([one.logprobs for one in drawn]),
        versions=np.concatenate([one.versions for one in drawn]),
    )


def test_train_generate_and_sync_in_bf16(tmp_path: Path) -> None:
    from nereus.backends.torch.rollout import TorchRollout
    from nereus.backends.torch.train import TorchTrainer

    model = _model(tmp_path / "model")
    config = JobConfig(
        run=RunConfig(steps=STEPS),
        cluster=ClusterConfig(slots=2, device="cuda", transport="nccl"),
        model=ModelConfig(path=str(model), dtype="bfloat16"),
        rollout=RolloutConfig(
            layout="d1t1p1", group_size=GROUP, max_new_tokens=NEW_TOKENS, max_live=GROUPS * GROUP, max_prompt_tokens=64
        ),
        train=TrainConfig(groups_per_step=GROUPS, micro_batch_tokens=16384),
    )
    trains, draws = Emu(POLICY_TRAINING, 0, Layout(), (0,)), Emu(POLICY_GENERATION, 0, Layout(), (1,))
    trainer = TorchTrainer(config)
    trainer.assign(trains, Plan(0, (trains, draws)), 0, store="")
    trainer.load(model)

    async def main() -> None:
        rollout = TorchRollout(config)
        await rollout.start(model, emu=draws, slot=1)
        try:
            for step in range(STEPS):
                began = time.perf_counter()
                source = _publish(trainer, tmp_path / f"weights-{step}", step)
                await rollout.switch(source, interrupt="keep")
                synced = time.perf_counter()
                rng = np.random.default_rng(step)
                prompts = [rng.integers(10, 31000, 32, dtype=np.int32) for _ in range(GROUPS) for _ in range(GROUP)]
                prompts = [prompts[index - index % GROUP] for index in range(len(prompts))]
                requests = [
                    SampleRequest(f"{step}.{index}", prompt, (0, index // GROUP, index % GROUP), NEW_TOKENS)
                    for index, prompt in enumerate(prompts)
                ]
                drawn = list(await asyncio.gather(*map(rollout.generate, requests)))
                generated = time.perf_counter()
                report = trainer.train(trainer.share(_batch(step, prompts, drawn)))
                trained = time.perf_counter()
                assert not report.skipped
                assert {int(version) for one in drawn for version in one.versions} == {step}
                tokens = sum(len(one.tokens) for one in drawn)
                print(
                    f"step {step}: sync {synced - began:.3f} s, "
                    f"generate {tokens / (generated - synced):,.0f} tokens/s, "
                    f"train {report.tokens / (trained - generated):,.0f} tokens/s, "
                    f"mismatch {report.metrics['mismatch/abs_diff']:.2g}, "
                    f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
                )
                if step == 0:  # bf16 on both sides, in different kernels
                    assert report.metrics["mismatch/abs_diff"] < 0.05
        finally:
            await rollout.close()

    asyncio.run(main())
    trainer.close()
