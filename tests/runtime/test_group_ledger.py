from __future__ import annotations

from pathlib import Path

import pytest

from nereus.algo.history import check_history
from nereus.algo.staleness import Waiting
from nereus.bus.messages import Grant, GroupAccepted, GroupFailed, GroupRef, Hello, Sample
from nereus.config import AsyncConfig, ClusterConfig, DataConfig, JobConfig, RolloutConfig, RunConfig, TrainConfig
from nereus.runtime.dataset import open_dataset
from nereus.runtime.fleet import Fleet, State
from nereus.runtime.groups import MAX_ATTEMPTS, Groups
from nereus.runtime.journal import Journal, plain, read_journal
from nereus.runtime.placement import initial_plan
from nereus.runtime.surroundings import Origin, RunFailed

TRAINER, ONE, TWO = "slot-0", "slot-1", "slot-2"


class Ledger:
    """Groups with a trainer and two rollouts, of which tests say what they do."""

    def __init__(self, folder: Path, *, staleness: int = 1, steps: int = 4) -> None:
        data = folder / "rows.jsonl"
        data.write_text("".join(f'{{"prompt": "p{i}", "answer": "{i}"}}\n' for i in range(5)))
        config = JobConfig(
            run=RunConfig(steps=steps),
            cluster=ClusterConfig(slots=3),
            data=DataConfig(source=str(data), shuffle=False),
            rollout=RolloutConfig(layout="d2t1p1", group_size=2, max_live=8),
            train=TrainConfig(layout="d1t1p1", groups_per_step=2),
            async_=AsyncConfig(staleness=staleness),
        )
        self.fleet = Fleet.of_plan(initial_plan(config))
        self.journal = Journal(folder / "journal.jsonl", clock=lambda: 0.0)
        self.path = folder / "journal.jsonl"
        origin = Origin(folder, folder)
        self.groups = Groups(config, open_dataset(config.data), origin, self.fleet, self.journal, lambda: 0.0)
        self.refs: dict[str, list[GroupRef]] = {ONE: [], TWO: []}
        """What each rollout has been granted and has not finished."""
        for name in (TRAINER, ONE, TWO):
            self.join(name)

    def join(self, name: str, version: int = 0) -> None:
        """Let a (new) incarnation of a worker come up."""
        incarnation = f"{name}.{id(object())}.{version}.{self.fleet[name].incarnation}"
        self.fleet.joined(Hello(name, incarnation, "here", 1, f"tcp://{name}"))
        self.fleet[name].state, self.fleet[name].version = State.LIVE, version
        self.refs[name] = []

    def lose(self, name: str) -> None:
        self.fleet.lost(name)
        self.groups.lost(self.fleet[name], "lost")

    def grant(self) -> dict[str, Grant]:
        granted = self.groups.grants()
        for name, grant in granted.items():
            self.refs[name] += [GroupRef(spec.group, spec.attempt) for spec in grant.groups]
        return granted

    def accept(self, name: str, ref: GroupRef, version: int = 0) -> bool:
        """Let the collector say that it holds a group of a rollout."""
        samples = (Sample(3, 1.0, "stop", version, version), Sample(4, 0.0, "stop", version, version))
        row = ref.group % 5
        return self.groups.accept(GroupAccepted(ref.group, ref.attempt, row, name, version, version, 2, samples))

    def finish(self, name: str, version: int = 0) -> GroupRef:
        """Let a rollout finish its oldest group."""
        ref = self.refs[name].pop(0)
        assert self.accept(name, ref, version)
        return ref

    def kinds(self) -> list[str]:
        return [str(record["kind"]) for record in plain(read_journal(self.path).entries)]

    def problems(self, staleness: int = 1) -> list[str]:
        return check_history(plain(read_journal(self.path).entries), staleness=staleness, groups_per_step=2)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path)


def _train(ledger: Ledger, version: int) -> list[int]:
    refs = ledger.groups.choose(version)
    assert not isinstance(refs, Waiting), refs
    return [held.group for held in ledger.groups.trained(version, refs)]


def test_grants_keep_to_the_bound_and_spread_over_the_rollouts(ledger: Ledger) -> None:
    granted = ledger.grant()
    assert {name: len(grant.groups) for name, grant in granted.items()} == {ONE: 2, TWO: 2}
    assert sorted(spec.group for grant in granted.values() for spec in grant.groups) == [0, 1, 2, 3]
    assert ledger.grant() == {}, "two steps of two groups are out, and the bound is one step"


def test_a_rollout_that_does_not_serve_yet_gets_nothing(ledger: Ledger) -> None:
    ledger.fleet[ONE].state = State.READY
    ledger.fleet[TWO].version = None
    assert ledger.grant() == {}


def test_an_accepted_group_is_trained_once_and_what_is_repeated_changes_nothing(ledger: Ledger) -> None:
    ledger.grant()
    first = ledger.finish(ONE)
    assert ledger.accept(ONE, first), "the collector may keep what it holds already"
    assert ledger.kinds().count("accepted") == 1
    second = ledger.finish(TWO)
    assert _train(ledger, 0) == sorted((first.group, second.group))
    assert not ledger.accept(ONE, first), "it is trained: the collector is to let go of it"
    assert not ledger.accept(ONE, GroupRef(first.group, 7)), "nobody has granted that"
    assert ledger.problems() == []


def test_what_a_lost_rollout_was_doing_is_granted_again_and_its_late_word_is_refused(ledger: Ledger) -> None:
    ledger.grant()
    lost = list(ledger.refs[ONE])
    done = ledger.finish(TWO)
    ledger.lose(ONE)
    granted = ledger.grant()
    again = [GroupRef(spec.group, spec.attempt) for spec in granted[TWO].groups]
    assert again == [GroupRef(ref.group, 1) for ref in sorted(lost, key=lambda ref: ref.group)]
    assert not ledger.accept(ONE, lost[0]), "an attempt that was given up"
    while ledger.refs[TWO]:
        ledger.finish(TWO)
    trained = _train(ledger, 0) + _train(ledger, 1)
    assert sorted(trained) == [0, 1, 2, 3] and done.group in trained
    assert ledger.problems() == []


def test_a_group_older_than_its_rollout_had_said_is_done_again(ledger: Ledger) -> None:
    ledger.grant()
    for _ in range(2):
        ledger.finish(ONE)
        ledger.finish(TWO)
    _train(ledger, 0)
    for name in (ONE, TWO):
        ledger.fleet[name].version = 1
    ledger.grant()
    ref = ledger.refs[ONE].pop(0)
    assert not ledger.accept(ONE, ref, version=0)
    assert [spec.attempt for grant in ledger.grant().values() for spec in grant.groups] == [1]


def test_a_group_that_fails_is_tried_elsewhere_but_not_for_ever(ledger: Ledger) -> None:
    ledger.fleet[TWO].state = State.READY
    ledger.grant()
    group = ledger.refs[ONE][0].group
    for attempt in range(MAX_ATTEMPTS - 1):
        ledger.groups.fail(ledger.fleet[ONE], GroupFailed(group, attempt, "no room"))
        granted = ledger.grant()[ONE].groups
        assert [(spec.group, spec.attempt) for spec in granted] == [(group, attempt + 1)]
    with pytest.raises(RunFailed, match=f"group {group} failed {MAX_ATTEMPTS} times, last: too long"):
        ledger.groups.fail(ledger.fleet[ONE], GroupFailed(group, MAX_ATTEMPTS - 1, "too long"))


def test_a_late_word_about_a_failure_is_not_followed(ledger: Ledger) -> None:
    ledger.grant()
    ref = ledger.finish(ONE)
    ledger.groups.fail(ledger.fleet[ONE], GroupFailed(ref.group, ref.attempt, "too late"))
    assert "reissued" not in ledger.kinds()


def test_what_a_lost_collector_held_comes_from_the_rollouts_that_keep_it(ledger: Ledger) -> None:
    ledger.grant()
    held = [(name, ledger.finish(name)) for name in (ONE, TWO)]
    ledger.groups.collector_lost()
    assert isinstance(ledger.groups.choose(0), Waiting)
    assert ledger.grant() == {}, "they are not done again"
    for name, ref in held:
        assert ledger.accept(name, ref)
    assert _train(ledger, 0) == sorted(ref.group for _, ref in held)
    assert ledger.kinds().count("accepted") == 2, "it is known already that they were accepted"
    assert ledger.problems() == []


def test_what_a_lost_collector_and_a_lost_rollout_held_is_done_again(ledger: Ledger) -> None:
    ledger.grant()
    kept, gone = ledger.finish(ONE), ledger.finish(TWO)
    ledger.lose(TWO)
    ledger.join(TWO)  # it is back, and keeps nothing
    ledger.groups.collector_lost()
    again = {(spec.group, spec.attempt) for grant in ledger.grant().values() for spec in grant.groups}
    assert (gone.group, 1) in again
    assert kept.group not in {group for group, _ in again}
    assert not ledger.accept(TWO, gone)
    assert ledger.accept(ONE, kept)
    ledger.refs[ONE], ledger.refs[TWO] = [], []
    assert ledger.accept(TWO, GroupRef(gone.group, 1))
    assert _train(ledger, 0) == sorted((kept.group, gone.group))
    assert ledger.problems() == []


def test_a_rollout_that_dies_before_it_has_sent_its_groups_again_leaves_them_to_others(ledger: Ledger) -> None:
    ledger.grant()
    ref = ledger.finish(ONE)
    ledger.groups.collector_lost()
    ledger.lose(ONE)
    again = {(spec.group, spec.attempt) for grant in ledger.grant().values() for spec in grant.groups}
    assert (ref.group, ref.attempt + 1) in again


def test_a_rollout_that_dies_with_what_the_collector_holds_costs_nothing(ledger: Ledger) -> None:
    ledger.grant()
    first, second = ledger.finish(ONE), ledger.finish(TWO)
    ledger.lose(ONE)
    assert _train(ledger, 0) == sorted((first.group, second.group))
    assert ledger.problems() == []


def test_the_batch_of_a_step_that_came_to_nothing_is_chosen_anew(ledger: Ledger) -> None:
    ledger.grant()
    refs = [ledger.finish(ONE), ledger.finish(TWO)]
    assert ledger.groups.choose(0) == tuple(sorted(refs, key=lambda ref: ref.group))
    ledger.groups.undo(0)
    assert ledger.groups.choose(0) == tuple(sorted(refs, key=lambda ref: ref.group))
    ledger.groups.undo(0)
    ledger.groups.collector_lost()
    assert isinstance(ledger.groups.choose(0), Waiting)
    assert ledger.accept(ONE, refs[0]) and ledger.accept(TWO, refs[1])
    assert _train(ledger, 0) == sorted(ref.group for ref in refs)
    assert ledger.problems() == []
