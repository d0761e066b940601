"""Is every contradiction between settings refused, with the numbers named, and nothing else?"""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.configuration.job import LoadedJob
from nereus.configuration.load import load_job
from nereus.configuration.rules import notes
from nereus.errors import ConfigError


def load(text: str) -> LoadedJob:
    """Load ``key=value key=value ...``."""
    overrides = [tuple(part.split("=", 1)) for part in text.split()]
    return load_job([], [("model.path", "/m"), *overrides], {}, directory=Path("/here"))  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rollout.layout=d3 train.layout=d1t2", ("needs 3 slots", "needs 2", "together 5", "cluster.slots is 4")),
        ("cluster.slots=2", ("together 3", "cluster.slots is 2", "set cluster.slots to 3")),
        ("rollout.layout=t2p1d1", ("'t2p1d1' is not a layout", "d2t2p1")),
        ("train.layout=d0", ("'d0' is not a layout",)),
        ("rollout.layout=d1t2", ("t1p1", "got t2p1", "d2t1p1")),
        ("model.path=", ("no model is named",)),
        ("model.recipe=r.toml", ("both model.path and model.recipe",)),
        ("cluster.device=cuda model.dtype=float64", ("float64", "cuda")),
        ("cluster.transport=nccl", ("nccl needs cluster.device cuda", "cpu")),
        ("model.attention=flash_attention_2", ("flash_attention_2", "cpu", "float32")),
        ("train.micro_batch_tokens=300", ("300", "256", "64", "= 320", "at least 320")),
        ("train.groups_per_step=8 train.minibatches=3", ("3 minibatches", "groups_per_step 8")),
        ("rollout.group_size=1", ("advantage 0",)),
        ("run.deterministic=true rollout.interrupt=wait", ("async.staleness is 1",)),
        ("run.deterministic=true async.staleness=0", ('"wait"', '"keep"')),
        ("data.source=rows.jsonl", ("no reward is named",)),
        ("run.steps=10 train.warmup_steps=10", ("10 steps", "run.steps 10")),
        ("train.schedule=cosine train.min_learning_rate=1", ("1 is above train.learning_rate 0.0001",)),
        ("bus.heartbeat_s=10", ("15 s", "10 s")),
        ("train.loss.correction=none train.loss.correction_cap=3", ("no effect", 'correction is "none"')),
        ("train.min_learning_rate=1e-6", ("no effect", 'schedule is "constant"')),
        ("data.prompt_key=q", ("no effect", "reasoning_gym:chain_sum")),
        ("data.source=a.jsonl reward.function=m:f data.options.x=1", ("data.options.x", "no effect", "is a file")),
        ("data.chat=true data.template={prompt}!", ("no effect", "chat template")),
        ("emulate.gflops=1 cluster.device=cuda", ("emulate.gflops", "only CPU slots", "cuda")),
        ("emulate.memory_mb=9 train.backend=fake", ("emulate.memory_mb", "train.backend fake", "torch backend")),
        ("emulate.link_gb_s=1 rollout.backend=vllm", ("emulate.link_gb_s", "rollout.backend vllm")),
    ],
)
def test_contradictions_are_refused(text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert "(command line)" in caught.value.where or "(default)" in caught.value.where
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("at", "parts"),
    [
        ("soon d1t1p1 d1t1p1", ("'soon d1t1p1 d1t1p1' is not a plan change", "20 d1t2p1 d2t1p1")),
        ("5 d1t1p1", ("'5 d1t1p1' is not a plan change",)),
        ("5 d1x2 d1t1p1", ("'5 d1x2 d1t1p1' is not a plan change",)),
        ("0 d1t1p1 d1t1p1", ("not after step 0",)),
        ("100 d1t1p1 d1t1p1", ("before the last of run.steps 100",)),
        ("9 d1t1p1 d1t1p1; 9 d1t2p1 d1t1p1", ("'9 d1t2p1 d1t1p1' is not after step 9",)),
        ("9 d2t2p1 d1t1p1", ("needs 5 slots", "starts with 3", "rollout.layout d2t1p1")),
        ("9 d1t1p1 d1t2p1", ("t1p1", "d2t1p1")),
    ],
)
def test_impossible_plan_changes_are_refused(at: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job([], [("model.path", "/m"), ("adapt.at", at)], {}, directory=Path("/here"))
    for part in ("adapt.at (command line)", *parts):
        assert part in str(caught.value)


def test_plan_changes_that_fit_pass() -> None:
    load_job([], [("model.path", "/m"), ("adapt.at", "3 d1t2p1 d1t1p1; 7 d1t1p1 d2t1p1")], {}, directory=Path("/here"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cluster.slots=3",
        "cluster.slots=8 train.layout=d2t2p1",
        "run.deterministic=true async.staleness=0 rollout.interrupt=wait model.dtype=float64",
        "cluster.device=cuda cluster.transport=nccl model.dtype=bfloat16 model.attention=flash_attention_2",
        "data.source=rows.jsonl reward.function=m:f",
        "model.path= model.recipe=r.toml",
        "train.loss.correction=none train.loss.correction_cap=2.0",
        "emulate.gflops=1 emulate.memory_mb=100 emulate.memory_gb_s=2 emulate.link_gb_s=1 emulate.link_latency_us=50",
        "emulate.memory_mb=100 cluster.device=cuda",
    ],
)
def test_sound_jobs_pass(text: str) -> None:
    load(text)


def test_notes_name_what_surprises() -> None:
    assert not list(notes(load("cluster.slots=3")))
    said = " ".join(notes(load("cluster.slots=4 rollout.top_p=0.9 model.dtype=bfloat16")))
    assert "1 of cluster.slots 4 stay idle" in said
    assert "rollout.top_p 0.9" in said
    assert "bfloat16" in said
