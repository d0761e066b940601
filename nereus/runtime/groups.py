"""Which groups may start, which are out, and which are in?

Owner: the supervisor. Joins the pacer's rule with the fleet's state and the journal: every decision about a group is
recorded where it is made. No messages are sent from here.

Invariants (tests/virtual): a group is trained exactly once; staleness never exceeds the bound; a lost worker costs only
what was running there and what nobody else keeps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

import msgspec
import structlog

from nereus.algo.sampler import Cursor, SampleOrder
from nereus.algo.staleness import GroupAttempt, Pacer, Waiting
from nereus.bus.messages import Generated, Grant, GroupAccepted, GroupFailed, GroupRef, GroupSpec
from nereus.config import JobConfig
from nereus.control.estimate import Decoded
from nereus.core.plan import PolicyVersion
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
        self._granted_to: dict[int, list[str]] = {}
        """Which workers were told to do a group, until it is accepted."""
        self._busy_since: dict[str, float] = {}
        self._busy_s = 0.0
        self._finished = 0
        self._generated: list[Generated] = []

    @property
    def cursor(self) -> Cursor:
        return self._pacer.cursor

    @property
    def complete(self) -> bool:
        """Whether there are groups enough for a batch; some may still have to wait for others (``choose``)."""
        return self._pacer.accepted >= self._config.train.groups_per_step

    def grants(self) -> dict[str, Grant]:
        """Give the least busy live rollout units what the staleness bound allows, lost groups first."""
        if not self._pacer.may_start(self._pacer.version):
            return {}
        capacity = math.ceil(self._config.rollout.max_live / self._config.rollout.group_size) + 1
        granted: dict[str, list[GroupRef]] = {}
        able = [
            (len(rollout.running), rollout.name)
            for rollout in self._fleet.rollouts()
            if rollout.state is State.LIVE and len(rollout.running) < capacity
        ]
        heapq.heapify(able)
        while able:
            rollout = self._fleet[able[0][1]]
            issued = self._pacer.issue(rollout.name, rollout.version, 1) if rollout.version is not None else ()
            if not issued:
                break
            ref = _ref(issued[0])
            rollout.running.add(ref.group)
            self._granted_to.setdefault(ref.group, []).append(rollout.name)
            granted.setdefault(rollout.name, []).append(ref)
            if len(rollout.running) < capacity:
                heapq.heapreplace(able, (len(rollout.running), rollout.name))
            else:
                heapq.heappop(able)
        self._watch_busy(granted)
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
        owners = self._granted_to.pop(accepted.group, [])
        for name in owners:
            self._fleet[name].running.discard(accepted.group)
        self._watch_busy(owners)
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

    def _watch_busy(self, names: Iterable[str]) -> None:
        """Keep the time for which each rollout has had something to do; ``names``: those for which it may change."""
        now = self._clock()
        for name in names:
            rollout = self._fleet[name]
            if rollout.running and rollout.alive:
                self._busy_since.setdefault(name, now)
            elif name in self._busy_since:
                self._busy_s += now - self._busy_since.pop(name)

    def generation_s(self) -> float:
        """Return how long all rollouts together take for one step's groups, as measured since the last call; 0: not
        measured."""
        self._watch_busy(tuple(self._busy_since))
        now, rollouts = self._clock(), len(self._fleet.rollouts())
        busy = self._busy_s + sum(now - since for since in self._busy_since.values())
        self._busy_s, finished, self._finished = 0.0, self._finished, 0
        self._busy_since = dict.fromkeys(self._busy_since, now)
        if not finished or not rollouts:
            return 0.0
        return busy / rollouts * self._config.train.groups_per_step / finished

    def generated(self, told: Generated) -> None:
        """Note what a unit's engine says that it has done."""
        if told.decode_steps:
            self._generated.append(told)

    def decoded(self) -> Decoded | None:
        """Return what all engines together have done since the last call; None: none has told of anything."""
        told, self._generated = self._generated, []
        if not told:
            return None
        return Decoded(
            math.fsum(one.decode_s for one in told),
            sum(one.decode_steps for one in told),
            sum(one.tokens for one in told),
            sum(one.cached_tokens for one in told),
        )

    def forget_decoded(self) -> None:
        """Drop what units of another plan have told."""
        self._generated.clear()

    def held(self, refs: Iterable[GroupRef]) -> list[GroupAccepted]:
        """Return what a batch consists of."""
        return [self._accepted[ref.group] for ref in refs]

    def fail(self, worker: Worker, failed: GroupFailed) -> None:
        """Have a group that could not be completed done again; ``RunFailed`` when that has happened too often."""
        worker.running.discard(failed.group)
        self._watch_busy([worker.name])
        log.warning("group failed", worker=worker.name, group=failed.group, reason=failed.reason)
        self._failures[failed.group] = count = self._failures.get(failed.group, 0) + 1
        if count >= MAX_ATTEMPTS:
            raise RunFailed(f"group {failed.group} failed {count} times, last: {failed.reason}")
        self._issue_again(failed.group, failed.attempt, failed.reason)

    def lost(self, rollout: Worker, why: str) -> None:
        """Let others do what a rollout was doing; what it kept of finished groups is gone."""
        self._watch_busy([rollout.name])
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
