"""Which groups may start, which are out, and which are in?

Owner: the supervisor. Joins the pacer's rule with the fleet's state and the journal: every decision about a group is
recorded where it is made. No messages are sent from here.

Invariants (tests/virtual): a group is trained exactly once; staleness never exceeds the bound; a lost worker costs only
what was running there and what nobody else keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec
import structlog

from nereus.algo.sampler import Cursor, SampleOrder
from nereus.algo.staleness import GroupAttempt, Pacer, Waiting
from nereus.bus.messages import Grant, GroupAccepted, GroupFailed, GroupRef, GroupSpec
from nereus.config import JobConfig
from nereus.core.plan import POLICY_GENERATION, PolicyVersion
from nereus.runtime import journal as record
from nereus.runtime.dataset import Dataset
from nereus.runtime.fleet import Fleet, State, Worker
from nereus.runtime.journal import Journal
from nereus.runtime.surroundings import Origin, RunFailed

MAX_ATTEMPTS = 4
"""How often one group may fail before that ends the run."""

log = structlog.get_logger()


def _ref(attempt: GroupAttempt) -> GroupRef:
    return GroupRef(attempt.group, attempt.attempt)


class Groups:
    """The ledger of groups, from the sample order to the optimizer step."""

    def __init__(
        self,
        config: JobConfig,
        dataset: Dataset,
        origin: Origin,
        fleet: Fleet,
        journal: Journal,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._dataset = dataset
        self._fleet = fleet
        self._journal = journal
        self._order = SampleOrder(len(dataset), seed=config.run.seed, shuffle=config.data.shuffle)
        self._pacer = Pacer(
            groups_per_step=config.train.groups_per_step,
            staleness=config.async_.staleness,
            version=origin.version,
            cursor=origin.cursor,
            final_version=origin.version + config.run.steps - origin.step,
        )
        self._accepted: dict[int, GroupAccepted] = {}
        """What the collector holds and no applied step has consumed."""
        self._kept_by: dict[int, str] = {}
        """The incarnation that drew each of them, and keeps it until it is released."""
        self._expected: dict[int, int] = {}
        """Attempts that a lost collector had accepted: a new one is to get them from the rollout that keeps them."""
        self._failures: dict[int, int] = {}
        self._clock = clock
        self._busy_since: dict[str, float] = {}
        self._busy_s = 0.0
        self._finished = 0

    @property
    def cursor(self) -> Cursor:
        return self._pacer.cursor

    def grants(self) -> dict[str, Grant]:
        """Give the least busy live rollout units what the staleness bound allows, lost groups first."""
        capacity = math.ceil(self._config.rollout.max_live / self._config.rollout.group_size) + 1
        granted: dict[str, list[GroupRef]] = {}
        while True:
            able = [
                rollout
                for rollout in self._fleet.of(POLICY_GENERATION)
                if rollout.state is State.LIVE and len(rollout.running) < capacity
            ]
            rollout = min(able, key=lambda rollout: (len(rollout.running), rollout.name), default=None)
            if rollout is None or rollout.version is None:
                break
            issued = self._pacer.issue(rollout.name, rollout.version, 1)
            if not issued:
                break
            ref = _ref(issued[0])
            rollout.running.add(ref.group)
            granted.setdefault(rollout.name, []).append(ref)
        self._watch_busy()
        for name, refs in granted.items():
            version = self._fleet[name].version or 0
            self._journal.append(record.Granted(groups=tuple(refs), owner=name, version=version))
        return {name: Grant(tuple(map(self._spec, refs))) for name, refs in granted.items()}

    def _spec(self, ref: GroupRef) -> GroupSpec:
        index = self._order.row(ref.group)
        row = self._dataset.row(index)
        return GroupSpec(
            ref.group,
            ref.attempt,
            index,
            msgspec.json.encode(row.prompt),
            msgspec.json.encode(row.columns),
        )

    def accept(self, accepted: GroupAccepted) -> bool:
        """Note what the collector holds now; return whether it is to be kept there."""
        for rollout in self._fleet.of(POLICY_GENERATION):
            rollout.running.discard(accepted.group)
        self._watch_busy()
        verdict = self._pacer.accept(accepted.group, accepted.attempt, accepted.version_first)
        if verdict == "stale":
            log.warning("group is older than its rollout said", group=accepted.group, version=accepted.version_first)
        if verdict != "accepted":
            return accepted.group in self._accepted
        self._accepted[accepted.group] = accepted
        self._finished += 1
        if self._expected.pop(accepted.group, None) != accepted.attempt:
            self._kept_by[accepted.group] = self._fleet[accepted.rollout].incarnation
            self._journal.append(
                record.Accepted(
                    group=accepted.group,
                    attempt=accepted.attempt,
                    row=accepted.row,
                    rollout=accepted.rollout,
                    version_first=accepted.version_first,
                    version_last=accepted.version_last,
                    rewards=tuple(sample.reward for sample in accepted.samples),
                )
            )
        return True

    def _watch_busy(self) -> None:
        """Keep the time for which each rollout has had something to do."""
        now = self._clock()
        for rollout in self._fleet.of(POLICY_GENERATION):
            if rollout.running and rollout.alive:
                self._busy_since.setdefault(rollout.name, now)
        for name in tuple(self._busy_since):
            if not self._fleet[name].running or not self._fleet[name].alive:
                self._busy_s += now - self._busy_since.pop(name)

    def generation_s(self) -> float:
        """Return how long all rollouts together take for one step's groups, as measured since the last call; 0: not
        measured."""
        now, rollouts = self._clock(), len(self._fleet.of(POLICY_GENERATION))
        busy = self._busy_s + sum(now - since for since in self._busy_since.values())
        self._busy_s, finished, self._finished = 0.0, self._finished, 0
        self._busy_since = dict.fromkeys(self._busy_since, now)
        if not finished or not rollouts:
            return 0.0
        return busy / rollouts * self._config.train.groups_per_step / finished

    def held(self, refs: Iterable[GroupRef]) -> list[GroupAccepted]:
        """Return what a batch consists of."""
        return [self._accepted[ref.group] for ref in refs]

    def fail(self, worker: Worker, failed: GroupFailed) -> None:
        """Have a group that could not be completed done again; ``RunFailed`` when that has happened too often."""
        worker.running.discard(failed.group)
        log.warning("group failed", worker=worker.name, group=failed.group, reason=failed.reason)
        self._failures[failed.group] = count = self._failures.get(failed.group, 0) + 1
        if count >= MAX_ATTEMPTS:
            raise RunFailed(f"group {failed.group} failed {count} times, last: {failed.reason}")
        self._issue_again(failed.group, failed.attempt, failed.reason)

    def lost(self, rollout: Worker, why: str) -> None:
        """Let others do what a rollout was doing; what it kept of finished groups is gone."""
        for group, held in self._accepted.items():
            if held.rollout == rollout.name:
                self._kept_by.pop(group, None)
        for ref in map(_ref, self._pacer.lost(rollout.name)):
            self._journal.append(record.Reissued(group=ref.group, attempt=ref.attempt, reason=f"{rollout.name} {why}"))

    def _issue_again(self, group: int, attempt: int, reason: str) -> None:
        again = self._pacer.fail(group, attempt, retry=True)
        if again is not None:
            self._journal.append(record.Reissued(group=again.group, attempt=again.attempt, reason=reason))

    def choose(self, version: PolicyVersion) -> tuple[GroupRef, ...] | Waiting:
        """Return what the step on ``version`` trains, or what it waits for."""
        batch = self._pacer.choose_batch(version)
        return batch if isinstance(batch, Waiting) else tuple(map(_ref, batch))

    def waits_for(self, version: PolicyVersion) -> Waiting | None:
        """Return what the next batch waits for; None if it could be chosen."""
        return self._pacer.waits_for(version)

    def undo(self, version: PolicyVersion) -> None:
        """Take back the batch of a step that came to nothing."""
        self._pacer.undo(version)

    def trained(self, version: PolicyVersion, refs: Iterable[GroupRef]) -> list[GroupAccepted]:
        """Note that the step on ``version`` is applied; return what it has consumed."""
        self._pacer.trained(version)
        groups = [ref.group for ref in refs]
        for group in groups:
            self._kept_by.pop(group, None)
            self._failures.pop(group, None)
        return [self._accepted.pop(group) for group in groups]

    def collector_lost(self) -> None:
        """Expect what the collector held from the rollouts that keep it; have the rest done again."""
        for group, held in sorted(self._accepted.items()):
            self._pacer.reopen(group, held.rollout)
            keeper = self._fleet[held.rollout]
            if keeper.alive and keeper.incarnation == self._kept_by.get(group):
                self._expected[group] = held.attempt
                continue
            self._kept_by.pop(group, None)
            self._issue_again(group, held.attempt, "the collector and the rollout that kept it are lost")
        self._accepted.clear()
