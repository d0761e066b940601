"""What does the planner take this job's slots to be, and what may it choose from?

From the configuration to the planner's terms, before anything runs: a cluster of so many equal slots, priors for their
speed, the space of plans that the backends can carry out, and the workload that the job file describes. Invariants
(tests/runtime/test_pool.py): emulated figures replace those of the profile; what the backends cannot do is not offered.
"""

from __future__ import annotations

from msgspec.structs import replace

from nereus.config import JobConfig
from nereus.control.breakdown import Pricing
from nereus.control.choose import Pin
from nereus.control.efficiency import Efficiencies, OperationClass
from nereus.control.estimate import Estimate, live_space
from nereus.control.memory import MemoryCalibration
from nereus.core.cluster import Cluster, Device, Link, uniform_nodes
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, Replication
from nereus.core.profiles import load_cluster
from nereus.core.shape import ModelShape
from nereus.core.units import GB, GIGA, MEGA, MICRO
from nereus.core.workflow import Algorithm, workflow
from nereus.core.workload import Lengths, Workload

_BYTES = {"bfloat16": 2.0, "float32": 4.0, "float64": 8.0}


def cluster_of(config: JobConfig) -> Cluster:
    """Return the job's slots; ``ConfigError`` if the profile is not known. CPU slots are all on one node."""
    stated = load_cluster(config.cluster.profile or "cpu", config.cluster.slots)
    emulate, device, link = config.emulate, stated.device, stated.in_node
    device = Device(
        device.name,
        emulate.memory_mb * MEGA or device.memory_bytes,
        emulate.gflops * GIGA or device.flops_per_s,
        emulate.memory_gb_s * GB or device.bytes_per_s,
    )
    link = Link(emulate.link_latency_us * MICRO or link.latency_s, emulate.link_gb_s * GB or link.bytes_per_s)
    nodes = stated.nodes
    if config.cluster.device == "cpu":
        nodes = uniform_nodes(config.cluster.slots, config.cluster.slots)
    return replace(stated, device=device, in_node=link, nodes=nodes)


def starting_estimate(config: JobConfig, shape: ModelShape, cluster: Cluster) -> Estimate:
    """Return what is believed of the job before its first step."""
    train, rollout = config.train, config.rollout
    flow = workflow(
        Algorithm.GRPO, asynchronous=True, reference=False, reward_model=False, group_size=rollout.group_size
    )
    load = Workload(
        Lengths.fixed(max(1, rollout.max_prompt_tokens // 2)),
        Lengths.fixed(max(1, rollout.max_new_tokens // 2)),
        train.groups_per_step,
        rollout.group_size,
        train.minibatches,
        lead=max(1, config.async_.staleness),
    )
    space = live_space(
        micro_batch_tokens=train.micro_batch_tokens,
        max_live=rollout.max_live,
        compute_bytes=_BYTES[config.model.dtype],
        recompute=train.recompute,
    )
    on_cpu = config.cluster.device == "cpu"
    memory = MemoryCalibration(workspace_bytes=0.0) if on_cpu else MemoryCalibration()
    pricing = Pricing(cluster, {"policy": shape}, flow, load, _prior(config), memory, space)
    return Estimate.starting(pricing, _pins(config))


def _prior(config: JobConfig) -> Efficiencies:
    """Emulated slots reach what is stated of them; others as much as slots commonly do."""
    emulate = config.emulate
    stated: dict[OperationClass, float] = {}
    if emulate.gflops:
        stated |= dict.fromkeys((OperationClass.GEMM, OperationClass.ATTENTION, OperationClass.VOCABULARY), 1.0)
    if emulate.memory_gb_s:
        decoding = (OperationClass.MEMORY, OperationClass.DECODE, OperationClass.CACHE, OperationClass.OPTIMIZER)
        stated |= dict.fromkeys(decoding, 1.0)
    if emulate.link_gb_s:
        links = (OperationClass.ALLREDUCE_IN_NODE, OperationClass.GRADIENTS_IN_NODE, OperationClass.P2P_IN_NODE)
        stated |= dict.fromkeys(links, 1.0)
    return Efficiencies.of(stated)


def _pins(config: JobConfig) -> tuple[Pin, ...]:
    """Return what may not change: the built-in engine's units have one slot, and with ``replicas`` all layouts stay."""
    rollout = Replication.parse(config.rollout.layout).layout
    pins = list[Pin]()
    if config.rollout.backend == "torch" or config.adapt.mode == "replicas":
        pins.append(Pin(POLICY_GENERATION, tp=rollout.tp, pp=rollout.pp))
    if config.adapt.mode == "replicas":
        train = Replication.parse(config.train.layout).layout
        pins.append(Pin(POLICY_TRAINING, tp=train.tp, pp=train.pp))
    return tuple(pins)
