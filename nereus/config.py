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
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Decay = Annotated[float, Meta(ge=0, lt=1)]


class _Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the configuration tables."""


class RunConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[run]``"""

    name: str = "run"
    """Start of the run folder's name, and the run's name in logs and trackers."""
    dir: str = "runs"
    """Run folders are created below this one."""
    seed: NonNegative = 0
    """Seed of sampling: each completion draws from a stream of its own made from this seed."""
    steps: Positive = 100
    """How many training steps to make."""
    deterministic: bool = False
    """On-policy, reproducible: staleness 0, interrupt "wait", float64 allowed, batch in global sample order."""
    log_format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object a line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least urgent lines that are logged."""


class ClusterConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[cluster]``"""

    slots: Positive = 4
    """How many accelerators, or CPU processes that stand for one, the run may use."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What a slot computes on."""
    transport: Literal["gloo", "nccl"] = "gloo"
    """Library for collectives between trainer slots; nccl needs cuda."""
    threads_per_slot: Positive = 1
    """CPU threads of each slot's process."""
    profile: str = ""
    """What the planner takes a slot and its links to be: a profile of ``profiles/clusters`` or a TOML file. Empty: the
    profile ``cpu`` for CPU slots."""
    joinable: Annotated[int, Meta(ge=0, le=1024)] = 8
    """How many more slots may join while the job runs (``nereus worker --join``)."""
    group_timeout_s: PositiveFloat = 60.0
    """How long a collective may take before its peers count as lost."""


class ModelConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[model]``: a Hugging Face folder, or a recipe that makes one (cached by content)."""

    path: str = ""
    """A Hugging Face model folder with config.json, safetensors weights and a tokenizer."""
    recipe: str = ""
    """A recipe TOML, such as ``launchers/recipes/tiny_arithmetic.toml`` (see backends/torch/warmstart.py)."""
    cache: str = ".cache/models"
    """Where models made from recipes are kept."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Compute dtype; masters and moments are float32 (float64 for float64)."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation; flash_attention_2 needs cuda and bfloat16."""


class DataConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[data]``: ``reasoning_gym:NAME`` or a JSONL file."""

    source: str = "reasoning_gym:chain_sum"
    """``reasoning_gym:NAME``, or the path of a JSONL file."""
    prompt_key: str = ""
    """Empty: found among prompt, question, messages."""
    answer_key: str = ""
    """Empty: found among answer, ground_truth, label."""
    rows: Positive = 4096
    """How many rows to make (reasoning_gym) or to use at most (files)."""
    seed: NonNegative = 0
    """Seed of the rows that reasoning_gym makes and of the shuffle."""
    shuffle: bool = True
    """Draw rows in a random order, a new one for each pass over the data."""
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
    """Processes that score."""
    timeout_s: PositiveFloat = 10.0
    """A call that takes longer is killed with its process, and counts as a failure."""
    on_failure: Literal["zero", "none", "stop"] = "zero"
    """What an exception, a time-out or a value that is no number counts as: reward 0, no reward, or the run's end."""


class RolloutConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[rollout]``"""

    layout: str = "d2t1p1"
    """Replicas, tensor and pipeline degrees of generation: ``d2t1p1`` is two units of one slot each."""
    backend: str = "torch"
    """Generation engine; torch is the built-in one, for units of one slot."""
    group_size: Positive = 8
    """Completions per prompt, 2 or more."""
    max_prompt_tokens: Positive = 256
    """Longest prompt; longer ones are refused."""
    max_new_tokens: Positive = 64
    """Longest completion."""
    max_live: Positive = 64
    """Sequences that one unit decodes at once."""
    temperature: PositiveFloat = 1.0
    """Divides the logits, when sampling and when the trainer scores."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that together have this probability."""
    top_k: NonNegative = 0
    """Sample from this many most likely tokens; 0: all."""
    stop: list[str] = []
    """Strings whose last token ends a completion; each must be one token. The model's EOS always stops."""
    interrupt: Literal["keep", "wait", "abort"] = "keep"
    """Sequences in flight when new weights come: go on, finish first, or start again from their prefix."""
    keep_rows: NonNegative = 8
    """Completions per step that are written to rollouts/ as text."""


class LossConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[train.loss]``"""

    advantage: Literal["std", "mean"] = "std"
    """Group-relative: (r - mean) / (std + 1e-6), or r - mean."""
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Ratios are clipped below 1 minus this."""
    clip_high: PositiveFloat = 0.28
    """Ratios are clipped above 1 plus this."""
    normalize: Literal["token", "sequence"] = "token"
    """Mean over all tokens of the step, or over sequences of each one's mean."""
    kl_coefficient: Annotated[float, Meta(ge=0)] = 0.0
    """KL to the reference model (k3 estimator); above 0 the reference model is loaded."""
    correction: Literal["decoupled", "truncated", "none"] = "decoupled"
    """Off-policy correction: decoupled PPO, truncated importance sampling, plain PPO against the behaviour policy."""
    correction_cap: PositiveFloat = 2.0
    """Upper bound of the importance weight."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""


class TrainConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[train]``"""

    layout: str = "d1t1p1"
    """Replicas, tensor and pipeline degrees of training: ``d1t2p1`` is one unit of two slots."""
    backend: str = "torch"
    """Training engine."""
    groups_per_step: Positive = 8
    """Prompts, with all their completions, in one training step."""
    minibatches: Positive = 1
    """Optimizer updates per step; each takes an equal share of the groups."""
    micro_batch_tokens: Positive = 4096
    """Tokens packed into one forward pass; at least the longest prompt and completion."""
    recompute: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    learning_rate: PositiveFloat = 1e-4
    """Highest learning rate, after the warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate goes from its highest value to ``min_learning_rate`` at the end of the run."""
    warmup_steps: NonNegative = 0
    """Steps in which the learning rate rises linearly from 0."""
    min_learning_rate: Annotated[float, Meta(ge=0)] = 0.0
    """Learning rate at the end of a cosine or linear schedule."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    beta1: Decay = 0.9
    """AdamW's decay of the first moment."""
    beta2: Decay = 0.95
    """AdamW's decay of the second moment."""
    epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
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
    """How many of the newest checkpoints stay; an old one goes only after a new one is committed."""


class BusConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[bus]``"""

    host: str = "127.0.0.1"
    """Address to listen on; loopback keeps the bus on this host."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0: any free port."""
    heartbeat_s: PositiveFloat = 1.0
    """A process that has nothing to say says so this often."""
    liveness_s: PositiveFloat = 15.0
    """A process that is silent for this long counts as lost."""
    start_timeout_s: PositiveFloat = 180.0
    """A process that is not ready after this long counts as lost."""
    orphan_s: Annotated[float, Meta(ge=0.0, le=86400.0)] = 60.0
    """A process whose supervisor is lost waits for another one this long (``nereus run --resume``), then leaves; 0: at
    once."""
    window: Positive = 64
    """Unacknowledged messages to one peer."""
    max_message_bytes: Positive = 256 * 1024 * 1024
    """Larger messages are refused."""


class TrackConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[track]``"""

    tensorboard: bool = True
    """Write event files for TensorBoard beside metrics.jsonl."""
    report: bool = True
    """Write report.html and PNG plots at the end."""


class AdaptConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[adapt]``: changes of the plan while the job runs."""

    mode: Literal["off", "on", "replicas"] = "off"
    """``on``: change layouts and the split between training and generation when the savings repay the change, or when
    the plan cannot go on. ``replicas``: change only how many units there are. ``off``: only what ``at`` asks for."""
    gamma: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """A change must pay for itself within this share of the steps that its cause is expected to last; 0: urgent changes
    only."""
    calibrate_steps: Positive = 4
    """Steps after which the plan of the job file is compared with what was measured. A plan that was chosen is looked
    at again once it has been measured itself."""
    patience_s: PositiveFloat = 60.0
    """How long a lost slot may take to come back before the plan does without it."""
    at: str = ""
    """Plan changes, such as "20 d1t2p1 d2t1p1; 40 d2t1p1 d1t1p1": after step 20 train as d1t2p1, generate as d2t1p1."""
    timeout_s: PositiveFloat = 120.0
    """How long one message of a plan change may go unanswered before the change is given up."""
    spare_mb: NonNegative = 4096
    """How much memory (10^6 bytes) a trainer slot on a CPU keeps of state that it gave up, for the next plan change."""
    reserve_mb: NonNegative = 0
    """How much memory (10^6 bytes) each trainer slot on a CPU makes ready at its start, beside the training, so that no
    plan change waits for new pages: where those are slow, as in many virtual machines, as much as the largest share of
    state and gradients that a plan may bring."""


class EmulateConfig(_Table, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[emulate]``: slots of a smaller and slower device than the one at hand; 0 leaves a figure as it is."""

    memory_mb: NonNegative = 0
    """Memory of a slot in MB (10^6 bytes); a step that needs more ends in ``OutOfMemory`` and changes nothing."""
    gflops: NonNegativeFloat = 0.0
    """Arithmetic of a slot in 10^9 FLOP/s; a slot that is done earlier sleeps."""
    memory_gb_s: NonNegativeFloat = 0.0
    """Bandwidth of a slot's memory in 10^9 bytes/s: what decoding and the optimizer wait for."""
    link_gb_s: NonNegativeFloat = 0.0
    """Bandwidth between two slots in 10^9 bytes/s, in each direction: what collectives between slots wait for."""
    link_latency_us: NonNegativeFloat = 0.0
    """What starting a message between two slots takes, in microseconds."""
    slots: str = ""
    """A pool that shrinks and grows, such as "12 4; 24 6": 4 slots after step 12, 6 after 24. Needs ``adapt.mode``."""


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
    adapt: AdaptConfig = AdaptConfig()
    emulate: EmulateConfig = EmulateConfig()


def environment() -> Mapping[str, str]:
    """Return the process environment; ``configuration/load.py`` expands ``$NAME`` in paths from it."""
    return os.environ
