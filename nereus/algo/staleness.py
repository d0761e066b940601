"""How many groups may start, and which are trained next, so that no group is ever trained too late?

Owner: the supervisor holds one ``Pacer``. A group goes *waiting* (a lost attempt only) -> *running* (at an owner) ->
*accepted* -> *training* -> finished. Its **deadline** is the last version that may train it: the version of its first
token plus the staleness bound, and never beyond the run's last step. A running group counts from the version its owner
served when it was issued, which is the oldest its first token can have.

The schedule is kept feasible at every moment: for every deadline d, at most ``(d - version + 1) * groups_per_step``
unfinished groups have deadlines up to d, where ``version`` is what the next batch trains on. ``may_start`` never issues
a group that breaks this, ``choose_batch`` never picks a batch that does, and a loss only removes a deadline. By the
earliest-deadline-first argument every issued group can then be trained in time, so nothing is discarded for age; and
with everything accepted a batch can always be chosen, so nothing waits for ever. For owners that serve the newest
version the rule is the familiar ``accepted + running < (staleness + version + 1) * groups_per_step``.

Invariants (tests/algo/test_staleness.py): the bound holds for every trained group, also right after a restart, because
capacity is counted from the restored version and cursor, not from zero; every group is trained exactly once; with bound
0 step k trains exactly the groups ``k * groups_per_step`` onwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from msgspec import Struct

from nereus.algo.sampler import Cursor


class GroupAttempt(NamedTuple):
    """One attempt at one group."""

    group: int
    attempt: int


class Waiting(NamedTuple):
    """No batch yet: ``why``, and which running groups (and their owners) it waits for, the most urgent first."""

    why: str
    groups: tuple[GroupAttempt, ...]
    owners: tuple[str, ...]


class _Running(Struct):
    attempt: int
    owner: str
    version: int


class _Accepted(Struct):
    attempt: int
    version: int


class Pacer:
    """The ledger of all groups that are started and not yet trained."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        staleness: int,
        version: int = 0,
        cursor: Cursor = Cursor(),  # noqa: B008 (frozen)
        final_version: int | None = None,
    ) -> None:
        """Begin, or go on from a checkpoint's ``version`` and ``cursor``, with nothing running.

        ``final_version`` is the version after the run's last step; no group is started that no step is left for.
        """
        if groups_per_step < 1 or staleness < 0 or version < 0:
            raise ValueError(
                f"groups_per_step {groups_per_step}, staleness {staleness} or version {version} is too low"
            )
        self.groups_per_step = groups_per_step
        self.staleness = staleness
        self.version = version
        """The policy version that the next batch trains on."""
        self.cursor = cursor
        self._final_version = final_version
        self._fresh = cursor.unfinished()
        self._waiting: list[GroupAttempt] = []
        self._running: dict[int, _Running] = {}
        self._accepted: dict[int, _Accepted] = {}
        self._training: dict[int, dict[int, _Accepted]] = {}
        self._from: Counter[int] = Counter()
        """Running and accepted groups by the version that they count from."""

    # Looking

    @property
    def running(self) -> int:
        """Groups that an owner works on."""
        return len(self._running)

    @property
    def accepted(self) -> int:
        """Groups that are held and not yet in a batch."""
        return len(self._accepted)

    @property
    def waiting(self) -> int:
        """Lost groups that are to be issued again."""
        return len(self._waiting)

    def running_at(self, owner: str) -> tuple[GroupAttempt, ...]:
        """Return what ``owner`` works on, in order of the groups."""
        mine = (GroupAttempt(group, run.attempt) for group, run in self._running.items() if run.owner == owner)
        return tuple(sorted(mine))

    def may_start(self, version: int) -> int:
        """Return how many groups an owner that serves ``version`` may start now without endangering any deadline."""
        if version > self.version:
            raise ValueError(f"version {version} cannot be served yet: the next batch trains on {self.version}")
        due = self._due()
        first = self._deadline(version)
        spare = [self._capacity(d) - sum(n for e, n in due.items() if e <= d) for d in {first, *due} if d >= first]
        return max(0, min(spare))

    # Happenings

    def issue(self, owner: str, version: int, most: int) -> tuple[GroupAttempt, ...]:
        """Start up to ``most`` groups at ``owner``, which serves ``version`` (what it last reported live, not what it
        may soon switch to); lost groups come first, then the sample order goes on."""
        issued = []
        for _ in range(min(most, self.may_start(version))):
            group, attempt = heappop(self._waiting) if self._waiting else GroupAttempt(next(self._fresh), 0)
            self._run(group, _Running(attempt, owner, version))
            issued.append(GroupAttempt(group, attempt))
        return tuple(issued)

    def accept(self, group: int, attempt: int, version_first: int) -> Literal["accepted", "obsolete", "stale"]:
        """Note that an attempt is complete; its first token was drawn from ``version_first``.

        ``obsolete``: not the attempt that runs now (a duplicate, an older attempt, a finished group); nothing changes.
        ``stale``: older than its owner had reported, which would break the bound; the group will be issued again.
        """
        run = self._running.get(group)
        if run is None or run.attempt != attempt:
            return "obsolete"
        self._stop(group)
        if version_first < run.version:
            heappush(self._waiting, GroupAttempt(group, attempt + 1))
            return "stale"
        self._hold(group, _Accepted(attempt, version_first))
        return "accepted"

    def lost(self, owner: str) -> tuple[GroupAttempt, ...]:
        """Take back what ``owner`` was working on; return the attempts that will be issued in its place."""
        again = tuple(GroupAttempt(group, attempt + 1) for group, attempt in self.running_at(owner))
        for reissue in again:
            self._stop(reissue.group)
            heappush(self._waiting, reissue)
        return again

    def fail(self, group: int, attempt: int, *, retry: bool) -> GroupAttempt | None:
        """Note that an attempt cannot be completed; return the attempt that will be issued in its place.

        Without ``retry`` the group is dropped for good and the cursor passes over it. None as well for an attempt that
        does not run (a late report of an older one).
        """
        run = self._running.get(group)
        if run is None or run.attempt != attempt:
            return None
        self._stop(group)
        if not retry:
            self.cursor = self.cursor.advance([group])
            return None
        again = GroupAttempt(group, attempt + 1)
        heappush(self._waiting, again)
        return again

    def choose_batch(self, version: int) -> tuple[GroupAttempt, ...] | Waiting:
        """Pick the groups that the step on ``version`` trains, in global sample order, or say what it waits for.

        The oldest first versions go first, then the smallest groups. A batch that would leave some running group no
        step within its bound is not taken: the step waits for that group instead.
        """
        batch = self._next_batch(version)
        if isinstance(batch, Waiting):
            return batch
        chosen = self._training[version] = {group: self._take(group) for group in sorted(batch)}
        self.version += 1
        return tuple(GroupAttempt(group, held.attempt) for group, held in chosen.items())

    def waits_for(self, version: int) -> Waiting | None:
        """Return what ``choose_batch`` would wait for; None if it could pick a batch."""
        batch = self._next_batch(version)
        return batch if isinstance(batch, Waiting) else None

    def _next_batch(self, version: int) -> list[int] | Waiting:
        if version != self.version:
            raise ValueError(f"the next batch trains on version {self.version}, not {version}")
        if self._final_version is not None and version >= self._final_version:
            return Waiting("the last step is taken", (), ())
        oldest = sorted(self._accepted, key=lambda group: (self._accepted[group].version, group))
        batch = oldest[: self.groups_per_step]
        if len(batch) < self.groups_per_step:
            return self._waiting_for(self._running, f"{len(batch)} of {self.groups_per_step} groups are accepted")
        due = self._due(without=batch)
        for deadline in sorted(due):
            if sum(n for d, n in due.items() if d <= deadline) > self._capacity(deadline) - self.groups_per_step:
                urgent = [group for group, run in self._running.items() if self._deadline(run.version) <= deadline]
                return self._waiting_for(urgent, f"groups in flight must be trained by version {deadline}")
        return batch

    def trained(self, version: int) -> Cursor:
        """Note that the step on ``version`` is applied; return the cursor, which now covers its groups."""
        if version not in self._training:
            raise ValueError(f"no batch was chosen for version {version}, or it is trained already")
        self.cursor = self.cursor.advance(self._training.pop(version))
        return self.cursor

    def undo(self, version: int) -> None:
        """Take back the batch of ``version``: its step came to nothing and will be chosen anew."""
        if version not in self._training or version + 1 != self.version:
            raise ValueError(f"version {version} is not being trained")
        for group, held in self._training.pop(version).items():
            self._hold(group, held)
        self.version = version

    def reopen(self, group: int, owner: str) -> GroupAttempt:
        """Note that the collector has lost an accepted group, which ``owner`` still keeps: it runs until it is back."""
        held = self._take(group)
        self._run(group, _Running(held.attempt, owner, held.version))
        return GroupAttempt(group, held.attempt)

    # The schedule

    def _deadline(self, version_first: int) -> int:
        """Return the last version that may train a group whose first token came from ``version_first``."""
        deadline = version_first + self.staleness
        return deadline if self._final_version is None else min(deadline, self._final_version - 1)

    def _capacity(self, deadline: int) -> int:
        """Return how many groups can be trained from now up to and with version ``deadline``."""
        return (deadline - self.version + 1) * self.groups_per_step

    def _due(self, without: Iterable[int] = ()) -> Counter[int]:
        """Count the unfinished groups outside a batch by deadline."""
        counted = self._from - Counter(self._accepted[group].version for group in without)
        due: Counter[int] = Counter()
        for version, count in counted.items():
            due[self._deadline(version)] += count
        return due

    # The counts by version follow what runs and what is held

    def _run(self, group: int, run: _Running) -> None:
        self._running[group] = run
        self._from[run.version] += 1

    def _stop(self, group: int) -> None:
        self._uncount(self._running.pop(group).version)

    def _hold(self, group: int, held: _Accepted) -> None:
        self._accepted[group] = held
        self._from[held.version] += 1

    def _take(self, group: int) -> _Accepted:
        held = self._accepted.pop(group)
        self._uncount(held.version)
        return held

    def _uncount(self, version: int) -> None:
        self._from[version] -= 1
        if not self._from[version]:
            del self._from[version]

    def _waiting_for(self, groups: Iterable[int], why: str) -> Waiting:
        urgent = sorted(groups, key=lambda group: (self._running[group].version, group))
        attempts = tuple(GroupAttempt(group, self._running[group].attempt) for group in urgent)
        owners = tuple(dict.fromkeys(self._running[group].owner for group in urgent))
        return Waiting(why, attempts, owners)
