"""What does the operator want? The job description: frozen values read from TOML files and dotted overrides.

The only reader of os.environ. Precedence: defaults < files from left to right < command line. Tables merge, lists
replace. An unknown key, a wrong type or an impossible value is a ``ConfigError`` that names the key, the file and line,
and the nearest valid name (``configuration/load.py``). The string below a field is its documentation and appears in the
configuration reference (``configuration/reference.py``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Decay = Annotated[float, Meta(ge=0, lt=1)]


class _Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the configuration tables."""


class RunConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[run]``"""

    name: str = "run"
    dir: str = "runs"
    """Run folders are created below this one."""
    seed: NonNegative = 0
    steps: Positive = 100
    deterministic: bool = False
    """On-policy, reproducible: staleness 0, interrupt "wait", float64 allowed, batch in global sample order."""
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class ClusterConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[cluster]``"""

    slots: Positive = 4
    device: Literal["cpu", "cuda"] = "cpu"
    transport: Literal["gloo", "nccl"] = "gloo"
    threads_per_slot: Positive = 1
    group_timeout_s: PositiveFloat = 60.0


class ModelConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[model]``: a Hugging Face folder, or a recipe that makes one (cached by content)."""

    path: str = ""
    recipe: str = ""
    """A recipe TOML, such as ``launchers/recipes/tiny_arithmetic.toml`` (see backends/torch/warmstart.py)."""
    cache: str = ".cache/models"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Compute dtype; masters and moments are float32 (float64 for float64)."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"


class DataConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[data]``: ``reasoning_gym:NAME`` or a JSONL file."""

    source: str = "reasoning_gym:chain_sum"
    prompt_key: str = ""
    """Empty: found among prompt, question, messages."""
    answer_key: str = ""
    """Empty: found among answer, ground_truth, label."""
    rows: Positive = 4096
    """How many rows to make (reasoning_gym) or to use at most (files)."""
    seed: NonNegative = 0
    shuffle: bool = True
    options: dict[str, Any] = {}
    """Passed to reasoning_gym.create_dataset."""
    template: str = "{prompt}"
    """How a plain prompt becomes text when ``chat`` is false."""
    system: str = ""
    """System prompt: a chat message of its own with ``chat``, else text before the template."""
    chat: bool = False
    """Apply the tokenizer's chat template."""


class RewardConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[reward]``: a plain function, run in killable processes."""

    function: str = ""
    """``file.py:fn``, ``pkg.mod:fn``; empty with a reasoning_gym source: the task's own scorer."""
    workers: Positive = 1
    timeout_s: PositiveFloat = 10.0
    on_failure: Literal["zero", "none", "stop"] = "zero"
    """What an exception, a time-out or a value that is no number counts as: reward 0, no reward, or the run's end."""


class RolloutConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[rollout]``"""

    layout: str = "d2t1p1"
    backend: str = "torch"
    group_size: Positive = 8
    max_prompt_tokens: Positive = 256
    max_new_tokens: Positive = 64
    max_live: Positive = 64
    """Sequences that one unit decodes at once."""
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    stop: list[str] = []
    """Strings whose last token ends a completion; each must be one token. The model's EOS always stops."""
    interrupt: Literal["keep", "wait", "abort"] = "keep"
    keep_rows: NonNegative = 8
    """Completions per step that are written to rollouts/ as text."""


class LossConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[train.loss]``"""

    advantage: Literal["std", "mean"] = "std"
    """Group-relative: (r - mean) / (std + 1e-6), or r - mean."""
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    clip_high: PositiveFloat = 0.28
    normalize: Literal["token", "sequence"] = "token"
    kl_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """KL to the reference model (k3 estimator); above 0 the reference model is loaded."""
    correction: Literal["decoupled", "truncated", "none"] = "decoupled"
    """Off-policy correction: decoupled PPO, truncated importance sampling, plain PPO against the behaviour policy."""
    correction_cap: PositiveFloat = 2.0
    entropy_coefficient: float = 0.0


class TrainConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[train]``"""

    layout: str = "d1t1p1"
    backend: str = "torch"
    groups_per_step: Positive = 8
    minibatches: Positive = 1
    """Optimizer updates per step; each takes an equal share of the groups."""
    micro_batch_tokens: Positive = 4096
    recompute: bool = False
    learning_rate: PositiveFloat = 1e-4
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: NonNegative = 0
    min_learning_rate: Annotated[float, Meta(ge=0)] = 0.0
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    epsilon: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat = 1.0
    loss: LossConfig = LossConfig()


class AsyncConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[async]``"""

    staleness: NonNegative = 1
    """The bound: version trained on minus version at a group's first token."""


class CheckpointConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[checkpoint]``"""

    every: NonNegative = 50
    """Steps between checkpoints; 0: only at the end and on drain."""
    keep: Positive = 2


class BusConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[bus]``"""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0: any free port."""
    heartbeat_s: PositiveFloat = 1.0
    liveness_s: PositiveFloat = 15.0
    start_timeout_s: PositiveFloat = 180.0
    window: Positive = 64
    """Unacknowledged messages to one peer."""
    max_message_bytes: Positive = 256 * 1024 * 1024


class TrackConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[track]``"""

    tensorboard: bool = True
    report: bool = True
    """Write report.html and PNG plots at the end."""


class JobConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"async_": "async"}):
    """A whole job."""

    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    async_: AsyncConfig = AsyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    bus: BusConfig = BusConfig()
    track: TrackConfig = TrackConfig()


def environment() -> Mapping[str, str]:
    """Return the process environment; ``configuration/load.py`` expands ``$NAME`` in paths from it."""
    return os.environ
