"""Does pacing keep the staleness bound under any finishing order, loss, and restart, without ever getting stuck?"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.algo.sampler import Cursor
from nereus.algo.staleness import GroupAttempt, Pacer, Waiting


class World:
    """Rollouts that serve old versions for a while and finish in any order, a trainer, and restarts."""

    def __init__(self, rng: random.Random, groups_per_step: int, staleness: int, owners: int, steps: int) -> None:
        self.rng = rng
        self.groups_per_step, self.staleness, self.steps = groups_per_step, staleness, steps
        self.trained: dict[int, int] = {}  # group -> version it was trained on, of committed steps
        self.dropped: set[int] = set()
        self.checkpoint = (0, Cursor())
        self.owners = [f"rollout-{i}" for i in range(owners)]
        self.begin()

    def begin(self) -> None:
        version, cursor = self.checkpoint
        self.pacer = Pacer(
            groups_per_step=self.groups_per_step,
            staleness=self.staleness,
            version=version,
            cursor=cursor,
            final_version=self.steps,
        )
        self.published = version
        self.served = dict.fromkeys(self.owners, version)
        self.running: dict[int, tuple[GroupAttempt, str, int]] = {}
        self.held: dict[int, tuple[GroupAttempt, str, int]] = {}  # with owner and the version of the first token
        self.taken: dict[int, tuple[GroupAttempt, str, int]] = {}
        self.in_step: tuple[GroupAttempt, ...] = ()
        self.kept: dict[int, int] = {}  # group that is on its way once more -> version of its first token
        self.old: list[tuple[GroupAttempt, int]] = []

    def grant(self) -> None:
        owner = self.rng.choice(self.owners)
        for item in self.pacer.issue(owner, self.served[owner], self.rng.randint(1, 5)):
            assert item.group not in self.running and item.group not in self.held and item.group not in self.trained
            self.running[item.group] = (item, owner, self.served[owner])

    def finish(self) -> None:
        if not self.running:
            return
        item, owner, granted = self.running.pop(self.rng.choice(sorted(self.running)))
        first = self.kept.pop(item.group, None)
        if first is None:
            first = self.rng.randint(granted, self.served[owner])
        assert self.pacer.accept(*item, first) == "accepted"
        assert self.pacer.accept(*item, first) == "obsolete"
        self.held[item.group] = (item, owner, first)
        self.old.append((item, first))

    def deliver_an_old_attempt(self) -> None:
        if self.old:
            item, first = self.rng.choice(self.old)
            if self.running.get(item.group, (None,))[0] != item:
                assert self.pacer.accept(*item, first) == "obsolete"

    def switch(self) -> None:
        self.served[self.rng.choice(self.owners)] = self.published

    def lose(self) -> None:
        owner = self.rng.choice(self.owners)
        mine = {group for group, (_, where, _) in self.running.items() if where == owner}
        again = self.pacer.lost(owner)
        assert {item.group for item in again} == mine
        for item in again:
            assert item.attempt == self.running[item.group][0].attempt + 1
            self.old.append((self.running.pop(item.group)[0], self.published))
            self.kept.pop(item.group, None)
        self.served[owner] = self.published

    def fail(self) -> None:
        if self.running:
            item, _, _ = self.running.pop(self.rng.choice(sorted(self.running)))
            self.kept.pop(item.group, None)
            retry = self.rng.random() < 0.5
            self.pacer.fail(*item, retry=retry)
            if not retry:
                self.dropped.add(item.group)

    def choose(self) -> None:
        if self.in_step:
            return
        version = self.pacer.version
        batch = self.pacer.choose_batch(version)
        if isinstance(batch, Waiting):
            assert all(item == self.running[item.group][0] for item in batch.groups)
            return
        assert len(batch) == self.groups_per_step and list(batch) == sorted(batch)
        for item in batch:
            assert version - self.held[item.group][2] <= self.staleness
        self.taken = {item.group: self.held.pop(item.group) for item in batch}
        self.in_step = batch

    def complete(self) -> None:
        if not self.in_step:
            return
        version = self.pacer.version - 1
        for item in self.in_step:
            assert item.group not in self.trained and item.group not in self.dropped
            self.trained[item.group] = version
        self.pacer.trained(version)
        self.in_step = ()
        self.published = self.pacer.version

    def undo(self) -> None:
        """Let a step come to nothing."""
        if self.in_step:
            self.pacer.undo(self.pacer.version - 1)
            self.held |= self.taken
            self.in_step = ()

    def lose_the_collector(self) -> None:
        """Let owners send again what they keep, and do the rest again; a step in flight comes to nothing."""
        self.undo()
        for group in sorted(self.held):
            item, owner, first = self.held.pop(group)
            assert self.pacer.reopen(group, owner) == item
            if self.rng.random() < 0.7:
                self.running[group] = (item, owner, first)
                self.kept[group] = first
            else:
                again = self.pacer.fail(*item, retry=True)
                assert again == GroupAttempt(group, item.attempt + 1)
                self.old.append((item, first))

    def save(self) -> None:
        if not self.in_step:
            self.checkpoint = (self.pacer.version, self.pacer.cursor)

    def restart(self) -> None:
        version, cursor = self.checkpoint
        self.trained = {group: at for group, at in self.trained.items() if at < version}
        self.dropped = {group for group in self.dropped if group in cursor}
        self.begin()

    def settle(self) -> None:
        """Let everything make progress, with no more failures, to the end of the run."""
        for _ in range(4 * self.steps + 20):
            self.complete()
            for _ in range(len(self.owners) * 8):
                self.switch()
                self.grant()
            while self.running:
                self.finish()
            self.choose()
        self.complete()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 4), st.integers(1, 4))
def test_bound_exactly_once_and_progress(seed: int, groups_per_step: int, staleness: int, owners: int) -> None:
    rng = random.Random(seed)
    steps = rng.randint(2, 8)
    world = World(rng, groups_per_step, staleness, owners, steps)
    happenings = [world.grant, world.finish, world.finish, world.switch, world.choose, world.choose, world.complete]
    mishaps = [world.lose, world.fail, world.save, world.restart, world.deliver_an_old_attempt]
    happenings += rng.sample([*mishaps, world.undo, world.lose_the_collector], 4)
    for _ in range(rng.randint(20, 200)):
        rng.choice(happenings)()
    world.settle()
    assert world.pacer.version == steps
    assert len(world.trained) == steps * groups_per_step
    assert world.pacer.running == world.pacer.accepted == world.pacer.waiting == 0
    finished = set(world.trained) | world.dropped
    assert {group for group in range(max(finished) + 2) if group in world.pacer.cursor} == finished


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4))
def test_on_policy_trains_the_sample_order(seed: int, groups_per_step: int, owners: int) -> None:
    rng = random.Random(seed)
    world = World(rng, groups_per_step, 0, owners, steps=6)
    happenings = [world.grant, world.finish, world.switch, world.choose, world.complete, world.lose]
    happenings += [world.save, world.restart, world.undo, world.lose_the_collector]
    for _ in range(rng.randint(0, 150)):
        rng.choice(happenings)()
    world.settle()
    assert world.trained == {group: group // groups_per_step for group in range(6 * groups_per_step)}


def test_capacity_is_that_of_the_formula() -> None:
    pacer = Pacer(groups_per_step=4, staleness=2)
    assert pacer.may_start(0) == 12
    assert len(pacer.issue("r", 0, 100)) == 12
    assert pacer.may_start(0) == 0


def test_bound_holds_at_once_after_resume() -> None:
    """A counter that began at 0 beside version 100 would allow 408 groups to start."""
    pacer = Pacer(groups_per_step=4, staleness=1, version=100, cursor=Cursor(400))
    assert pacer.may_start(100) == 8
    assert pacer.issue("r", 100, 2) == (GroupAttempt(400, 0), GroupAttempt(401, 0))


def test_groups_in_flight_at_a_checkpoint_are_issued_again() -> None:
    """Groups 0 and 3 were trained, 1 and 2 were in flight: the resumed run starts with 1 and 2."""
    pacer = Pacer(groups_per_step=2, staleness=1, version=1, cursor=Cursor(1, (3,)))
    assert [item.group for item in pacer.issue("r", 1, 4)] == [1, 2, 4, 5]


def test_an_owner_that_serves_an_old_version_gets_less() -> None:
    pacer = Pacer(groups_per_step=2, staleness=1)
    for item in pacer.issue("r", 0, 2):
        pacer.accept(*item, 0)
    pacer.choose_batch(0)
    pacer.trained(0)
    assert pacer.may_start(1) == 4
    assert pacer.may_start(0) == 2
    pacer.issue("slow", 0, 2)
    assert pacer.may_start(0) == 0 and pacer.may_start(1) == 2


def test_a_step_waits_for_a_straggler_rather_than_outdate_it() -> None:
    pacer = Pacer(groups_per_step=1, staleness=1)
    (first,) = pacer.issue("slow", 0, 1)
    (second,) = pacer.issue("fast", 0, 1)
    pacer.accept(*second, 0)
    assert pacer.choose_batch(0) == (second,)
    pacer.trained(0)
    (third,) = pacer.issue("fast", 1, 1)
    pacer.accept(*third, 1)
    waiting = pacer.choose_batch(1)
    assert isinstance(waiting, Waiting)
    assert waiting.groups == (first,) and waiting.owners == ("slow",) and "version 1" in waiting.why
    assert pacer.lost("slow") == (GroupAttempt(0, 1),)
    assert pacer.choose_batch(1) == (third,)


def test_tokens_older_than_reported_are_not_trained() -> None:
    pacer = Pacer(groups_per_step=1, staleness=0, version=5)
    (item,) = pacer.issue("r", 5, 1)
    assert pacer.accept(*item, 4) == "stale"
    assert pacer.issue("r", 5, 1) == (GroupAttempt(item.group, 1),)


def test_no_group_starts_that_no_step_is_left_for() -> None:
    pacer = Pacer(groups_per_step=3, staleness=5, version=8, cursor=Cursor(24), final_version=10)
    assert pacer.may_start(8) == 6
    over = Pacer(groups_per_step=3, staleness=5, version=10, cursor=Cursor(30), final_version=10)
    assert over.may_start(10) == 0
    assert over.choose_batch(10) == Waiting("the last step is taken", (), ())


def test_wrong_calls_are_refused() -> None:
    pacer = Pacer(groups_per_step=1, staleness=0)
    with pytest.raises(ValueError, match="not 1"):
        pacer.choose_batch(1)
    with pytest.raises(ValueError, match="cannot be served yet"):
        pacer.may_start(1)
    with pytest.raises(ValueError, match="no batch was chosen"):
        pacer.trained(0)
    with pytest.raises(ValueError, match="is not being trained"):
        pacer.undo(0)
    assert pacer.fail(7, 0, retry=True) is None


def test_a_step_that_was_undone_can_be_undone_but_once() -> None:
    pacer = Pacer(groups_per_step=1, staleness=1)
    first, second = pacer.issue("r", 0, 2)
    for item in (first, second):
        pacer.accept(*item, 0)
    assert pacer.choose_batch(0) == (first,)
    pacer.undo(0)
    assert (pacer.version, pacer.accepted, pacer.cursor) == (0, 2, Cursor())
    with pytest.raises(ValueError, match="version 0 is not being trained"):
        pacer.undo(0)
    assert pacer.choose_batch(0) == (first,)
    pacer.trained(0)
    with pytest.raises(ValueError, match="version 0 is not being trained"):
        pacer.undo(0)


def test_a_group_on_its_way_to_a_new_collector_keeps_its_deadline() -> None:
    """It was drawn from version 0: the step on version 1 is its last, whatever else is accepted first."""
    pacer = Pacer(groups_per_step=1, staleness=1)
    first, second = pacer.issue("r", 0, 2)
    pacer.accept(*first, 0)
    pacer.accept(*second, 0)
    assert pacer.choose_batch(0) == (first,)
    pacer.trained(0)
    assert pacer.reopen(second.group, "r") == second
    (third,) = pacer.issue("r", 1, 1)
    pacer.accept(*third, 1)
    waiting = pacer.choose_batch(1)
    assert isinstance(waiting, Waiting) and waiting.groups == (second,)
    assert pacer.accept(*second, 0) == "accepted"
    assert pacer.choose_batch(1) == (second,)
