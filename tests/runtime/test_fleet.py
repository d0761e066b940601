from __future__ import annotations

from nereus.actors.names import RELAY, REWARD
from nereus.bus.messages import Hello
from nereus.config import ClusterConfig, JobConfig, RolloutConfig, TrainConfig
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING
from nereus.runtime.fleet import Fleet, State
from nereus.runtime.placement import initial_plan


def _fleet() -> Fleet:
    config = JobConfig(
        cluster=ClusterConfig(slots=4), rollout=RolloutConfig(layout="d2t1p1"), train=TrainConfig(layout="d1t2p1")
    )
    return Fleet.of_plan(initial_plan(config))


def _hello(worker: str, incarnation: str) -> Hello:
    return Hello(worker, incarnation, "here", 1, f"tcp://127.0.0.1:{len(worker)}")


def test_a_plan_names_its_workers() -> None:
    fleet = _fleet()
    assert {worker.name for worker in fleet} == {RELAY, REWARD, "slot-0", "slot-1", "slot-2", "slot-3"}
    assert [worker.name for worker in fleet.of(POLICY_TRAINING)] == ["slot-0", "slot-1"]
    assert [worker.name for worker in fleet.of(POLICY_GENERATION)] == ["slot-2", "slot-3"]


def test_a_replacement_starts_from_nothing() -> None:
    fleet = _fleet()
    worker = fleet.joined(_hello("slot-2", "one"))
    worker.state, worker.version, worker.switching, worker.fault = State.LIVE, 3, 3, "broken"
    worker.running |= {7, 9}
    assert fleet.lost("slot-2") == {7, 9}
    assert worker.state is State.GONE
    again = fleet.joined(_hello("slot-2", "two"))
    assert again is worker
    assert (again.incarnation, again.state, again.version, again.switching) == ("two", State.JOINED, None, None)
    assert not again.running and not again.fault


def test_what_is_missing_is_named_and_peers_are_those_that_joined() -> None:
    fleet = _fleet()
    for name in (RELAY, REWARD, "slot-0", "slot-1", "slot-3"):
        fleet.joined(_hello(name, "one"))
    assert fleet.missing(at_least=State.JOINED) == ["slot-2"]
    fleet.joined(_hello("slot-2", "one"))
    assert fleet.missing(at_least=State.JOINED) == []
    fleet.lost("slot-3")
    assert fleet.missing(at_least=State.JOINED) == ["slot-3"]
    assert {peer.worker for peer in fleet.peers()} >= {RELAY, REWARD}


def test_slots_are_where_their_workers_say() -> None:
    fleet = _fleet()
    for name, host in ((RELAY, "one"), ("slot-0", "one"), ("slot-3", "two")):
        fleet.joined(Hello(name, "first", host, 1, "tcp://127.0.0.1:1"))
    assert fleet.hosts() == {0: "one", 1: "", 2: "", 3: "two"}
