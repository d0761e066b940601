"""Do the values of a job description fit together, and does every one that the operator wrote have an effect?

Pure: looks at values and their provenance only; what needs files is in ``nereus/runtime/preflight.py``. Invariants
(tests/configuration/test_rules.py): each rule refuses with every number involved, and the defaults plus a model pass.
"""

from __future__ import annotations

from collections.abc import Iterator

from nereus.configuration import schema
from nereus.configuration.job import LoadedJob
from nereus.configuration.render import setting
from nereus.core.change import parse_changes, parse_supply
from nereus.core.plan import Layout, Replication
from nereus.core.profiles import load_cluster, profile_names
from nereus.errors import ConfigError

_LAYOUT_KEYS = ("rollout.layout", "train.layout")


def check(job: LoadedJob) -> None:
    """Raise the ``ConfigError`` of the first rule that ``job`` breaks."""
    for rule in (
        _layouts,
        _model,
        _precision,
        _lengths,
        _batches,
        _exactness,
        _reward,
        _schedule,
        _bus,
        _changes,
        _adaptation,
        _emulation,
        _no_effect,
    ):
        for error in rule(job):
            raise error


def notes(job: LoadedJob) -> Iterator[str]:
    """Yield what is allowed but may surprise; the command line shows these as warnings."""
    config = job.config
    idle = config.cluster.slots - sum(replication(job, key).slots for key in _LAYOUT_KEYS)
    if idle:
        yield f"{idle} of cluster.slots {config.cluster.slots} stay idle: no layout uses them"
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        yield (
            f"rollout.top_p {config.rollout.top_p:g}, top_k {config.rollout.top_k}: samples come from a truncated "
            "distribution, the trainer scores them under the whole one, so ratios are not 1 even on-policy"
        )
    if config.model.dtype == "bfloat16" and config.cluster.device == "cpu":
        yield (
            "model.dtype bfloat16 is faster than float32 only on CPUs that multiply it (avx512_bf16 or amx_bf16 in "
            "/proc/cpuinfo) and much slower on others"
        )
    if config.run.deterministic and config.model.dtype != "float64":
        yield f"run.deterministic with {config.model.dtype} is equal to rounding only; float64 is equal to 1e-9"


def replication(job: LoadedJob, key: str) -> Replication:
    """Parse ``rollout.layout`` or ``train.layout``."""
    text = job.config.rollout.layout if key == "rollout.layout" else job.config.train.layout
    try:
        return Replication.parse(text)
    except ValueError as error:
        raise job.refuse(key, str(error), "replicas, tensor and pipeline degrees are each 1 or more") from None


def _layouts(job: LoadedJob) -> Iterator[ConfigError]:
    config = job.config
    rollout, train = (replication(job, key) for key in _LAYOUT_KEYS)
    if rollout.slots + train.slots > config.cluster.slots:
        blamed = next((key for key in ("cluster.slots", *_LAYOUT_KEYS) if job.is_set(key)), "cluster.slots")
        yield job.refuse(
            blamed,
            f"rollout.layout {rollout} needs {rollout.slots} slots and train.layout {train} needs {train.slots}, "
            f"together {rollout.slots + train.slots}, but cluster.slots is {config.cluster.slots}",
            f"set cluster.slots to {rollout.slots + train.slots} or use smaller layouts",
        )
    if config.rollout.backend == "torch" and rollout.layout != Layout(1, 1):
        yield job.refuse(
            "rollout.layout",
            f"the torch rollout backend runs one unit on one slot (t1p1), got t{rollout.layout.tp}p{rollout.layout.pp}",
            f"use more replicas instead: d{rollout.slots}t1p1",
        )


def _changes(job: LoadedJob) -> Iterator[ConfigError]:
    """Plan changes are written like ``20 d1t2p1 d2t1p1``, come in order, and fit the slots of the start."""
    config = job.config
    started = sum(replication(job, key).slots for key in _LAYOUT_KEYS)
    try:
        changes = parse_changes(config.adapt.at)
    except ValueError as error:
        yield job.refuse("adapt.at", str(error), "write STEP TRAIN ROLLOUT in the order of steps: 20 d1t2p1 d2t1p1")
        return
    for change in changes:
        slots = change.train.slots + change.rollout.slots
        if change.step >= config.run.steps:
            yield job.refuse(
                "adapt.at",
                f"'{change}' is not before the last of run.steps {config.run.steps}",
                "ask for it earlier, or run for more steps",
            )
        if slots > started:
            yield job.refuse(
                "adapt.at",
                f"'{change}' needs {slots} slots, but the run starts with {started}: "
                f"train.layout {config.train.layout} and rollout.layout {config.rollout.layout}",
                "use smaller layouts, or start with more replicas",
            )
        if config.rollout.backend == "torch" and change.rollout.layout != Layout(1, 1):
            yield job.refuse(
                "adapt.at",
                f"'{change}': the torch rollout backend runs one unit on one slot (t1p1)",
                f"use more replicas instead: d{change.rollout.slots}t1p1",
            )


def _model(job: LoadedJob) -> Iterator[ConfigError]:
    model = job.config.model
    if not model.path and not model.recipe:
        yield job.refuse(
            "model.path", "no model is named", "set model.path (a Hugging Face folder) or model.recipe (a TOML file)"
        )
    if model.path and model.recipe:
        yield job.refuse(
            "model.path",
            f"both model.path and model.recipe ({job.provenance['model.recipe']}) are set",
            "keep one of the two (an empty text unsets the other)",
        )


def _precision(job: LoadedJob) -> Iterator[ConfigError]:
    model, cluster = job.config.model, job.config.cluster
    if model.dtype == "float64" and cluster.device != "cpu":
        yield job.refuse(
            "model.dtype",
            f"float64 is for checks on CPUs, but cluster.device is {cluster.device}",
            "use float32 or bfloat16, or cluster.device cpu",
        )
    if cluster.transport == "nccl" and cluster.device != "cuda":
        yield job.refuse(
            "cluster.transport",
            f"nccl needs cluster.device cuda, but it is {cluster.device}",
            "set cluster.transport to gloo, or cluster.device to cuda",
        )
    if model.attention == "flash_attention_2" and (cluster.device != "cuda" or model.dtype != "bfloat16"):
        yield job.refuse(
            "model.attention",
            f"flash_attention_2 needs cuda (cluster.device {cluster.device}) and bfloat16 (model.dtype {model.dtype})",
            "use sdpa",
        )


def _lengths(job: LoadedJob) -> Iterator[ConfigError]:
    rollout, train = job.config.rollout, job.config.train
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if longest > train.micro_batch_tokens:
        yield job.refuse(
            "train.micro_batch_tokens",
            f"{train.micro_batch_tokens} tokens cannot hold the longest sample: rollout.max_prompt_tokens "
            f"{rollout.max_prompt_tokens} + rollout.max_new_tokens {rollout.max_new_tokens} = {longest}",
            f"set it to at least {longest}, or allow shorter samples",
        )


def _batches(job: LoadedJob) -> Iterator[ConfigError]:
    rollout, train = job.config.rollout, job.config.train
    if train.groups_per_step % train.minibatches:
        yield job.refuse(
            "train.minibatches",
            f"{train.minibatches} minibatches cannot share train.groups_per_step {train.groups_per_step} equally",
            "choose a divisor of train.groups_per_step",
        )
    if rollout.group_size == 1:
        yield job.refuse(
            "rollout.group_size",
            "a group of 1 has advantage 0 whatever its reward, so nothing would be learned",
            "use 2 or more completions per prompt",
        )


def _exactness(job: LoadedJob) -> Iterator[ConfigError]:
    config = job.config
    if not config.run.deterministic:
        return
    if config.async_.staleness:
        yield job.refuse(
            "run.deterministic",
            f"a deterministic run is on-policy, but async.staleness is {config.async_.staleness}",
            "set async.staleness to 0",
        )
    if config.rollout.interrupt != "wait":
        yield job.refuse(
            "run.deterministic",
            f'a deterministic run needs rollout.interrupt "wait", but it is "{config.rollout.interrupt}"',
            'set rollout.interrupt to "wait"',
        )


def _reward(job: LoadedJob) -> Iterator[ConfigError]:
    config = job.config
    if not config.reward.function and not config.data.source.startswith("reasoning_gym:"):
        yield job.refuse(
            "reward.function",
            f"no reward is named, and the data source {config.data.source} brings none",
            "set reward.function to file.py:function or package.module:function",
        )


def _schedule(job: LoadedJob) -> Iterator[ConfigError]:
    train, steps = job.config.train, job.config.run.steps
    if train.warmup_steps >= steps:
        yield job.refuse(
            "train.warmup_steps",
            f"a warm-up of {train.warmup_steps} steps does not end within run.steps {steps}",
            "warm up for fewer steps than the run has",
        )
    if train.schedule != "constant" and train.min_learning_rate > train.learning_rate:
        yield job.refuse(
            "train.min_learning_rate",
            f"{train.min_learning_rate:g} is above train.learning_rate {train.learning_rate:g}",
            "the schedule goes down from learning_rate to min_learning_rate",
        )


def _bus(job: LoadedJob) -> Iterator[ConfigError]:
    bus = job.config.bus
    if bus.liveness_s < 2 * bus.heartbeat_s:
        yield job.refuse(
            "bus.liveness_s",
            f"{bus.liveness_s:g} s of silence would count as death, but heartbeats come every {bus.heartbeat_s:g} s "
            "(bus.heartbeat_s)",
            f"allow at least {2 * bus.heartbeat_s:g} s, better ten heartbeats",
        )


def _adaptation(job: LoadedJob) -> Iterator[ConfigError]:
    """What decides about plans must know the devices, and a pool that changes needs somebody who decides."""
    config = job.config
    adapts = config.adapt.mode != "off"
    if adapts and config.cluster.device != "cpu" and not config.cluster.profile:
        yield job.refuse(
            "cluster.profile",
            f"adapt.mode {config.adapt.mode} compares plans, and nothing says how fast a slot is",
            f"name one of {', '.join(profile_names('clusters'))}, or a file like those of profiles/clusters",
        )
    if config.cluster.profile:
        load_cluster(config.cluster.profile, config.cluster.slots)
    try:
        supply = parse_supply(config.emulate.slots)
    except ValueError as error:
        yield job.refuse("emulate.slots", str(error), 'write it like "12 4; 24 6": after step 12 there are 4 slots')
        return
    if supply and not adapts:
        yield job.refuse(
            "emulate.slots", "the plan of a job without adapt.mode does not follow its pool", 'set adapt.mode to "on"'
        )
    most = max((one.slots for one in supply), default=0)
    if most > config.cluster.slots:
        yield job.refuse(
            "emulate.slots",
            f"{most} slots are more than cluster.slots {config.cluster.slots}",
            "raise cluster.slots: it is the most that the pool ever has",
        )


def _emulation(job: LoadedJob) -> Iterator[ConfigError]:
    """Limits are kept by the torch backends, and only a CPU can be slowed down by sleeping."""
    config = job.config
    limits = (name for name in config.emulate.__struct_fields__ if name != "slots")
    set_keys = [f"emulate.{name}" for name in limits if getattr(config.emulate, name)]
    for key in set_keys:
        for side, backend in (("rollout", config.rollout.backend), ("train", config.train.backend)):
            if backend != "torch":
                yield job.refuse(
                    key, f"{side}.backend {backend} keeps no such limit", "use the torch backend, or set it to 0"
                )
        if key != "emulate.memory_mb" and config.cluster.device != "cpu":
            yield job.refuse(
                key,
                f"only CPU slots can be slowed down, but cluster.device is {config.cluster.device}",
                "set it to 0, or cluster.device to cpu",
            )


def _no_effect(job: LoadedJob) -> Iterator[ConfigError]:
    """Refuse settings that the operator changed and that would change nothing; a default written out is harmless."""
    config = job.config
    made = config.data.source.startswith("reasoning_gym:")
    without_effect = {
        "train.loss.correction_cap": (config.train.loss.correction == "none", 'train.loss.correction is "none"'),
        "train.min_learning_rate": (config.train.schedule == "constant", 'train.schedule is "constant"'),
        "data.prompt_key": (made, f"{config.data.source} has a fixed prompt column"),
        "data.answer_key": (made, f"{config.data.source} has a fixed answer column"),
        "data.options": (not made, f"data.source {config.data.source} is a file"),
        "data.template": (config.data.chat, "data.chat uses the tokenizer's chat template"),
        "data.seed": (not made and not config.data.shuffle, "data.shuffle is false and the rows come from a file"),
    }
    for key, (idle, because) in without_effect.items():
        if idle and setting(job, key) != schema.settings()[key].default:
            blamed = next(
                name for name in job.provenance if schema.find(name) == schema.settings()[key] and job.is_set(name)
            )
            yield job.refuse(blamed, f"this setting has no effect because {because}", "remove it, or change the other")
