"""Which question do the words of ``nereus plan`` ask?

Turns options into the values that the planner takes, and refuses what can be refused before anything is searched.
Invariant (tests/commands/test_plan_command.py): every refusal names the option, the value and what would do.
"""

from __future__ import annotations

import re

from msgspec import Struct

from nereus.control.breakdown import Pricing
from nereus.control.choose import Pin, Question
from nereus.control.efficiency import Efficiencies
from nereus.core.cluster import Cluster
from nereus.core.plan import Layout, ModelStage, Replication
from nereus.core.profiles import load_cluster, load_model, profile_names
from nereus.core.shape import ModelShape
from nereus.core.workflow import Algorithm, Workflow, workflow
from nereus.core.workload import Lengths, Workload
from nereus.errors import ConfigError

MOST_SLOTS = 65_536
MOST_SAMPLES = 1 << 20
DEFAULT_LENGTHS = "2048"
DEFAULT_BATCH = 128
DEFAULT_GROUP_SIZE = {Algorithm.GRPO: 8}
PROMPT_SHARE = 4
"""Of a total length given alone, the prompt is one part in so many."""

_LENGTHS = re.compile(r"(?:([1-9]\d*)\+)?([1-9]\d*)")


class Options(Struct, frozen=True):
    """The words of the command line, by the names of their options. None: take the algorithm's default."""

    model: str
    cluster: str
    slots: int | None = None
    algorithm: str = "grpo"
    asynchronous: bool = False
    reference: bool = True
    reward_model: bool | None = None
    critic: bool | None = None
    lengths: str = DEFAULT_LENGTHS
    response_mean: float | None = None
    response_p95: float | None = None
    batch: int = DEFAULT_BATCH
    group_size: int | None = None
    minibatches: int = 1
    epochs: int = 1
    max_staleness: int = 1
    tp: int | None = None
    pp: int | None = None
    fix: tuple[str, ...] = ()


def question_of(options: Options) -> Question:
    """Return the planner's question; ``ConfigError`` for what cannot be asked."""
    for name, value in (("--model", options.model), ("--cluster", options.cluster)):
        if not value:
            kind = f"{name.removeprefix('--')}s"
            raise ConfigError(
                f"no {name} is given", where="command line", remedy=f"known: {', '.join(profile_names(kind))}"
            )
    shape = load_model(options.model)
    cluster = _cluster(options)
    work = _workload(options, shape)
    flow = _workflow(options, work.group_size)
    pins = _pins(options, flow)
    for pin in pins:
        _check(pin, shape, cluster)
    pricing = Pricing(cluster, {"policy": shape}, flow, work, Efficiencies.prior())
    return Question(pricing, pins=pins)


def _cluster(options: Options) -> Cluster:
    if options.slots is not None and options.slots > MOST_SLOTS:
        raise ConfigError(
            f"{options.slots} slots are more than the planner is made for",
            where="--slots",
            remedy=f"ask for at most {MOST_SLOTS}",
        )
    if options.slots is not None and options.slots < 1:
        raise ConfigError(f"{options.slots} slots make no cluster", where="--slots", remedy="ask for at least 1")
    return load_cluster(options.cluster, options.slots)


def _algorithm(options: Options) -> Algorithm:
    try:
        return Algorithm(options.algorithm.lower())
    except ValueError:
        known = ", ".join(Algorithm)
        raise ConfigError(f"there is no algorithm {options.algorithm!r}", where="--algorithm", remedy=known) from None


def _workflow(options: Options, group_size: int) -> Workflow:
    algorithm = _algorithm(options)
    scored = algorithm is not Algorithm.GRPO if options.reward_model is None else options.reward_model
    return workflow(
        algorithm,
        asynchronous=options.asynchronous,
        reference=options.reference,
        reward_model=scored,
        critic=options.critic,
        group_size=group_size,
    )


def _workload(options: Options, shape: ModelShape) -> Workload:
    prompt, response = _lengths(options)
    if prompt + response > shape.max_positions > 0:
        raise ConfigError(
            f"{prompt} + {response} = {prompt + response} tokens are above the model's {shape.max_positions} positions",
            where="--lengths",
            remedy=f"ask for at most {shape.max_positions}",
        )
    group_size = DEFAULT_GROUP_SIZE.get(_algorithm(options), 1) if options.group_size is None else options.group_size
    counts = {"--batch": options.batch, "--group-size": group_size, "--minibatches": options.minibatches}
    for name, count in {**counts, "--epochs": options.epochs}.items():
        if not 1 <= count <= MOST_SAMPLES:
            raise ConfigError(f"{count} is not possible", where=name, remedy=f"give 1 to {MOST_SAMPLES}")
    if options.max_staleness < 0:
        raise ConfigError(f"{options.max_staleness} is not possible", where="--max-staleness", remedy="give 0 or more")
    if options.batch % options.minibatches:
        raise ConfigError(
            f"{options.batch} prompts do not split into {options.minibatches} equal minibatches",
            where="--minibatches",
            remedy="give a divisor of --batch",
        )
    return Workload(
        Lengths.fixed(prompt),
        _responses(options, response),
        options.batch,
        group_size,
        options.minibatches,
        options.epochs,
    )


def _lengths(options: Options) -> tuple[int, int]:
    match = _LENGTHS.fullmatch(options.lengths)
    if not match or len(options.lengths) > 20 or (match[1] is None and int(match[2]) < PROMPT_SHARE):
        raise ConfigError(
            f"{options.lengths!r} gives no lengths",
            where="--lengths",
            remedy="write the longest sequence in tokens, such as 2048, or PROMPT+RESPONSE, such as 512+1536",
        )
    total = int(match[2])
    return (int(match[1]), total) if match[1] else (total // PROMPT_SHARE, total - total // PROMPT_SHARE)


def _responses(options: Options, longest: int) -> Lengths:
    if options.response_mean is None:
        if options.response_p95 is not None:
            raise ConfigError("needs --response-mean", where="--response-p95", remedy="give both")
        return Lengths.fixed(longest)
    mean = options.response_mean
    p95 = min(2.2 * mean, longest) if options.response_p95 is None else options.response_p95
    try:
        if max(mean, p95) > longest:
            raise ValueError(f"responses of {max(mean, p95):g} tokens are above the longest, {longest}")
        return Lengths.log_normal(mean, p95, longest)
    except ValueError as error:
        raise ConfigError(str(error), where="--response-mean", remedy="correct the lengths") from None


def _pins(options: Options, flow: Workflow) -> tuple[Pin, ...]:
    pins = {stage: pin for text in options.fix for stage, pin in [_pin(text, flow)]}
    if options.tp is None and options.pp is None:
        return tuple(pins.values())
    for name, degree in (("--tp", options.tp), ("--pp", options.pp)):
        if degree is not None and degree < 1:
            raise ConfigError(f"{degree} is no degree", where=name, remedy="give a power of two")
    return tuple(pins.get(stage, Pin(stage, tp=options.tp, pp=options.pp)) for stage in flow.model_stages)


def _pin(text: str, flow: Workflow) -> tuple[ModelStage, Pin]:
    name, _, layout = text.partition("=")
    try:
        stage, wanted = ModelStage.parse(name), Replication.parse(layout)
    except ValueError as error:
        raise ConfigError(str(error), where="--fix", remedy="write it like policy.training=d4t2p1") from None
    if stage not in flow.model_stages:
        known = ", ".join(map(str, flow.model_stages))
        raise ConfigError(f"this algorithm has no {stage}", where="--fix", remedy=f"choose one of {known}")
    dp = wanted.dp if layout.startswith("d") else None
    return stage, Pin(stage, dp, wanted.layout.tp, wanted.layout.pp)


def _check(pin: Pin, shape: ModelShape, cluster: Cluster) -> None:
    """Refuse degrees that the model, the nodes or the pool cannot hold."""
    layout, where = Layout(pin.tp or 1, pin.pp or 1), str(pin)
    for misfit in shape.misfits(layout):
        raise ConfigError(misfit, where=where, remedy="choose smaller degrees")
    if layout.tp > cluster.slots_per_node:
        what = f"tensor degree {layout.tp} is above the {cluster.slots_per_node} slots of a node"
        raise ConfigError(what, where=where, remedy="keep tensor groups inside a node")
    if layout.tp & (layout.tp - 1) or layout.pp & (layout.pp - 1):
        raise ConfigError("degrees are powers of two", where=where, remedy="choose 1, 2, 4, 8 ...")
    needed = layout.slots * (pin.dp or 1)
    if needed > cluster.size:
        what = f"{needed} slots are needed and there are {cluster.size}"
        raise ConfigError(what, where=where, remedy="choose smaller degrees, or more --slots")
