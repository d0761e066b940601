"""The rollout backend: verified weights or the old ones, no call that hangs, cancellation that frees the slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from nereus.backends.api import SampleRequest
from nereus.backends.torch.rollout import TorchRollout
from nereus.bus.messages import PullFrom
from nereus.config import ClusterConfig, EmulateConfig, JobConfig, ModelConfig, RolloutConfig
from nereus.core.plan import POLICY_GENERATION, Emu, Layout
from nereus.core.shape import ModelShape
from nereus.errors import ConfigError, OutOfMemory, TransitionError
from nereus.transition.checksum import tensors_checksum
from nereus.transition.reshard import TensorSpec
from tests.backends import generate_models as models
from tests.tiers import spread

LIMIT_S = 60.0
JOB = JobConfig(
    cluster=ClusterConfig(threads_per_slot=1),
    model=ModelConfig(dtype="float64"),
    rollout=RolloutConfig(max_prompt_tokens=8, max_new_tokens=50, max_live=4),
)


def lend(folder: Path, version: int, dtype: str = "float64") -> PullFrom:
    """Write the weights of ``version`` as a relay would."""
    torch_dtype = getattr(torch, dtype)
    offsets: dict[str, int] = {}
    content = bytearray()
    specs = []
    for name, tensor in models.tensors(version).items():
        offsets[name] = len(content)
        content += tensor.to(torch_dtype).flatten().view(torch.uint8).numpy().tobytes()
        content += b"\xff" * (-len(content) % 64)
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype))
    path = folder / f"weights{version}"
    path.write_bytes(content)
    checksum = tensors_checksum(bytes(content), specs, offsets)
    return PullFrom(version, str(path), offsets, tuple(specs), {}, checksum)


@asynccontextmanager
async def backend(folder: Path, job: JobConfig = JOB) -> AsyncIterator[TorchRollout]:
    models.CONFIG.save_pretrained(folder)
    made = TorchRollout(job)
    try:
        await made.start(folder, emu=Emu(POLICY_GENERATION, 0, Layout(1, 1), (0,)), slot=0)
        yield made
    finally:
        await made.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    asyncio.run(bounded())


def asked(index: int, new: int = 10) -> SampleRequest:
    return SampleRequest(f"a-{index}", np.array([1, 2, 3], np.int32), (0, 0, index), new)


def test_completions_come_from_the_lent_weights(tmp_path: Path) -> None:
    async def test() -> None:
        async with backend(tmp_path) as rollout:
            assert rollout.version == -1
            assert await rollout.switch(lend(tmp_path, 5), interrupt="keep") == 0
            assert rollout.version == 5
            done = await asyncio.gather(*(rollout.generate(asked(index)) for index in range(9)))
            assert [completion.id for completion in done] == [f"a-{index}" for index in range(9)]
            for completion in done:
                expected = models.logprobs(5, asked(0).prompt, completion.tokens)
                np.testing.assert_allclose(completion.logprobs, expected, atol=1e-6)
                assert set(completion.versions.tolist()) == {5}
            stats = rollout.stats()
            assert (stats["tokens"], stats["live"], stats["prefill_tokens"]) == (90, 0, stats["prefill_tokens"])
            assert stats["busy_s"] > stats["decode_s"] + stats["prefill_s"] > 0
            # Two prompt tokens are cached before the first step, which adds the third: it sees 3, 4, ..., 12.
            assert stats["cached_tokens"] == 9 * sum(range(3, 13))

    run(test)


def test_decoding_is_as_slow_as_the_emulated_memory(tmp_path: Path) -> None:
    slow = msgspec.structs.replace(JOB, emulate=EmulateConfig(memory_gb_s=0.005))

    async def test() -> None:
        async with backend(tmp_path, slow) as rollout:
            await rollout.switch(lend(tmp_path, 5), interrupt="keep")
            await asyncio.gather(*(rollout.generate(asked(index)) for index in range(4)))
            stats = rollout.stats()
            shape = ModelShape.from_config(models.CONFIG.to_dict())
            weights = shape.layers * shape.active_matrix_parameters + shape.embedding_parameters
            cache = shape.layers * shape.kv_values_per_token * stats["cached_tokens"]
            due_s = (stats["decode_steps"] * weights + cache) * 8 / 0.005e9
            assert (
                stats["decode_s"] + stats["prefill_s"] >= 0.99 * due_s
            )  # what prefill overslept, decoding makes up for

    run(test)


def test_an_engine_that_is_too_big_is_refused_by_purpose(tmp_path: Path) -> None:
    async def test() -> None:
        async with backend(tmp_path) as rollout:
            needed = rollout.stats()["peak_bytes"]
            assert needed == sum(rollout._needed_bytes.values())
            assert rollout._needed_bytes["KV cache"] == rollout._engine._decoder.cache_bytes()
            stored = sum(tensor.numel() for tensor in models.tensors(1).values())
            assert rollout._needed_bytes["weights"] == 2 * 8 * stored
        big = msgspec.structs.replace(JOB.rollout, max_live=4 + int(4e6 / needed * 4))
        limited = msgspec.structs.replace(JOB, rollout=big, emulate=EmulateConfig(memory_mb=1))
        with pytest.raises(
            OutOfMemory, match=r"policy.generation/0 on slot 0 needs .* MB \(KV cache .*its limit is 1.0"
        ):
            async with backend(tmp_path, limited):
                pass

    run(test)


def test_weights_are_converted_to_the_compute_dtype(tmp_path: Path) -> None:
    async def test() -> None:
        async with backend(tmp_path) as rollout:
            await rollout.switch(lend(tmp_path, 1, "float32"), interrupt="keep")
            completion = await rollout.generate(asked(0))
            expected = models.logprobs(1, asked(0).prompt, completion.tokens)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)

    run(test)


def test_the_lent_file_may_be_overwritten_after_the_switch(tmp_path: Path) -> None:
    async def test() -> None:
        async with backend(tmp_path) as rollout:
            source = lend(tmp_path, 1)
            await rollout.switch(source, interrupt="keep")
            overwrite(source.path)
            completion = await rollout.generate(asked(0))
            np.testing.assert_allclose(
                completion.logprobs, models.logprobs(1, asked(0).prompt, completion.tokens), atol=1e-6
            )

    run(test)


def overwrite(path: str) -> None:
    with open(path, "r+b") as file:
        file.write(b"\x00" * Path(path).stat().st_size)


def changed(source: PullFrom, **changes: Any) -> PullFrom:
    return msgspec.structs.replace(source, **changes)


def flipped(source: PullFrom) -> PullFrom:
    path = Path(source.path)
    content = bytearray(path.read_bytes())
    content[source.offsets["model.norm.weight"] + 3] ^= 1
    path.write_bytes(content)
    return source


def renamed(source: PullFrom) -> PullFrom:
    specs = tuple(
        msgspec.structs.replace(spec, name="model.final.weight") if spec.name == "model.norm.weight" else spec
        for spec in source.tensors
    )
    return changed(source, tensors=specs, offsets={**source.offsets, "model.final.weight": 0})


def transposed(source: PullFrom) -> PullFrom:
    name = "model.layers.0.mlp.down_proj.weight"
    specs = tuple(
        msgspec.structs.replace(spec, shape=spec.shape[::-1]) if spec.name == name else spec for spec in source.tensors
    )
    return changed(source, tensors=specs)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flipped, "checksum"),
        (renamed, "missing model.norm.weight; unexpected model.final.weight"),
        (transposed, r"down_proj.weight has shape \(24, 16\), expected \(16, 24\)"),
        (lambda source: changed(source, tensors=source.tensors[1:]), "missing model.embed_tokens.weight"),
        (lambda source: changed(source, tensors=source.tensors + source.tensors[:1]), "given twice"),
        (lambda source: changed(source, tied={"lm_head.weight": "model.embed_tokens.weight"}), "tied"),
        (lambda source: changed(source, path=source.path + ".gone"), "cannot be read"),
        (lambda source: changed(source, offsets={**source.offsets, "model.norm.weight": 1 << 40}), "lies outside"),
        (lambda source: changed(source, offsets={}), "no offset for"),
        (
            lambda source: changed(
                source, tensors=tuple(msgspec.structs.replace(spec, dtype="int4") for spec in source.tensors)
            ),
            "dtype int4",
        ),
    ],
)
def test_damaged_weights_leave_the_old_version_in_service(
    tmp_path: Path, damage: Callable[[PullFrom], PullFrom], named: str
) -> None:
    async def test() -> None:
        async with backend(tmp_path) as rollout:
            await rollout.switch(lend(tmp_path, 1), interrupt="keep")
            with pytest.raises(TransitionError, match=named):
                await rollout.switch(damage(lend(tmp_path, 2)), interrupt="keep")
            assert rollout.version == 1
            completion = await rollout.generate(asked(0))
            assert set(completion.versions.tolist()) == {1}
            await rollout.switch(lend(tmp_path, 3), interrupt="keep")
            assert rollout.version == 3

    run(test)


def test_cancelling_frees_the_slots(tmp_path: Path) -> None:
    async def test() -> None:
        async with backend(tmp_path) as rollout:
            await rollout.switch(lend(tmp_path, 1), interrupt="keep")
            calls = [asyncio.create_task(rollout.generate(asked(index, 50))) for index in range(12)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            again = await rollout.generate(asked(0))
            assert len(again.tokens) == 10
            assert (rollout.stats()["live"], rollout.stats()["waiting"]) == (0, 0)

    run(test)


@pytest.mark.parametrize("interrupt", spread(["keep", "wait", "abort"], 1))
def test_switching_while_generating(tmp_path: Path, interrupt: Any) -> None:
    async def test() -> None:
        async with backend(tmp_path) as rollout:
            await rollout.switch(lend(tmp_path, 1), interrupt="keep")
            first = asyncio.create_task(rollout.generate(asked(0, 5)))
            calls = [asyncio.create_task(rollout.generate(asked(index, 50))) for index in range(1, 12)]
            await first
            interrupted = await rollout.switch(lend(tmp_path, 2), interrupt=interrupt)
            assert 0 <= interrupted <= 4
            done = await asyncio.gather(*calls)
            for completion in done:
                assert (np.diff(completion.versions) >= 0).all()
                if interrupt == "wait":
                    assert len(set(completion.versions.tolist())) == 1
            assert done[-1].versions[-1] == 2

    run(test)


def test_a_failing_engine_fails_every_call(tmp_path: Path) -> None:
    async def test() -> None:
        async with backend(tmp_path) as rollout:
            source = lend(tmp_path, 1)
            await rollout.switch(source, interrupt="keep")
            calls = [asyncio.create_task(rollout.generate(asked(index, 50))) for index in range(6)]
            await rollout.generate(asked(9, 1))
            poisoned = {name: tensor.fill_(torch.nan) for name, tensor in models.tensors(2).items()}
            await rollout.switch(lend_tensors(tmp_path, 2, poisoned), interrupt="keep")
            calls.append(asyncio.create_task(rollout.generate(asked(20, 50))))
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(results[-1], TransitionError)
            assert "not finite" in str(results[-1])
            with pytest.raises(TransitionError, match="not finite"):
                await rollout.generate(asked(21))
            with pytest.raises(TransitionError, match="not finite"):
                await rollout.switch(source, interrupt="keep")

    run(test)


def lend_tensors(folder: Path, version: int, content: dict[str, torch.Tensor]) -> PullFrom:
    """Like ``lend``, of these tensors in float64."""
    source = lend(folder, version)
    data = bytearray(Path(source.path).read_bytes())
    for name, tensor in content.items():
        raw = tensor.flatten().view(torch.uint8).numpy().tobytes()
        data[source.offsets[name] : source.offsets[name] + len(raw)] = raw
    Path(source.path).write_bytes(data)
    return changed(source, checksum=tensors_checksum(bytes(data), source.tensors, source.offsets))


def test_closing_fails_what_waits(tmp_path: Path) -> None:
    async def test() -> None:
        async with backend(tmp_path) as rollout:
            await rollout.switch(lend(tmp_path, 1), interrupt="keep")
            calls = [asyncio.create_task(rollout.generate(asked(index, 50))) for index in range(40)]
            await rollout.generate(asked(99, 1))
            await rollout.close()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(results[-1], TransitionError)
            with pytest.raises(TransitionError, match="closed"):
                await rollout.generate(asked(0))

    run(test)


def test_a_bad_request_fails_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with backend(tmp_path) as rollout:
            with pytest.raises(TransitionError, match="no weights"):
                await rollout.generate(asked(0))
            await rollout.switch(lend(tmp_path, 1), interrupt="keep")
            good = asyncio.create_task(rollout.generate(asked(0)))
            with pytest.raises(ValueError, match="vocabulary"):
                await rollout.generate(SampleRequest("b", np.array([99], np.int32), (0, 0, 0), 5))
            assert len((await good).tokens) == 10

    run(test)


def test_other_layouts_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match=r"t2p1.*more replicas"):
            await TorchRollout(JOB).start(tmp_path, emu=Emu(POLICY_GENERATION, 0, Layout(2, 1), (0, 1)), slot=0)

    run(test)
