"""How short could a transition be? The same moves, scheduled to proven optimality by SCIP.

The problem that the compiler solves greedily, as a mixed-integer program: which replicas send to each new replica, in
which order, and when each copy that goes is dropped. Given: a replica sends to one other at a time; a new replica needs
its slots free; a copy goes after it has sent; some copy of every model-stage exists at any moment; parts merge after
they have sent. Durations are those of our own price, which on one kind of link depends on how many slots send in all.
The answer is a lower bound on what anybody can reach with these moves, so the gap is never flattered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from pyscipopt import Model, quicksum

from nereus.core.plan import SlotId
from nereus.sim.scenarios import Scenario
from nereus.transition.compile import MAX_STRIPES
from nereus.transition.diff import StageDiff, diff
from nereus.transition.ledger import groups_of
from nereus.transition.primitive import Destroy, Extend, Merge, Primitive, Replica, Split

Seconds = Callable[[Primitive], float]


def optimum(case: Scenario, seconds: Seconds, *, horizon_s: float, limit_s: float) -> float | None:
    """Return the shortest makespan, or None if SCIP does not close the problem in ``limit_s``.

    ``horizon_s`` is the makespan of a known schedule.
    """
    model = Model()
    model.hideOutput()
    model.setParam("limits/time", limit_s)
    model.setParam("parallel/maxnthreads", 1)
    end = model.addVar("end", lb=0.0, ub=horizon_s)
    model.setObjective(end, "minimize")
    changes = diff(case.current, case.target)
    groups = groups_of([change.model_stage for change in changes], case.groups)
    stages = [_Stage(model, change, seconds, horizon_s, end) for change in changes]
    holders: dict[tuple[int, SlotId], Any] = {}
    for stage in stages:
        for replica, drop in stage.drops:
            ends = drop + seconds(Destroy("", replica))
            holders.update({(group, s): ends for group in groups[replica.model_stage] for s in replica.slots})
    for stage in stages:
        for target, start in zip(stage.targets, stage.starts, strict=True):
            blockers = {
                id(holders[key]): holders[key]
                for key in itertools.product(groups[target.model_stage], target.slots)
                if key in holders
            }
            for ends in blockers.values():
                model.addCons(start >= ends)
    model.optimize()
    return float(model.getObjVal()) if model.getStatus() == "optimal" else None


class _Stage:
    """The variables of one model-stage."""

    def __init__(self, model: Model, change: StageDiff, seconds: Seconds, horizon_s: float, end: Any) -> None:
        self._model, self._seconds, self._horizon_s = model, seconds, horizon_s
        split_s = {
            part: seconds(Split("", splitting.source, splitting.kept + splitting.dropped))
            for splitting in change.splittings
            for part in splitting.kept + splitting.dropped
        }
        resident = [*change.stays, *change.kept, *change.dropped, *split_s]
        merged = [part for merging in change.mergings for part in merging.extended]
        self.targets = [*merged, *change.extended]
        self.starts = [model.addVar(lb=0.0, ub=horizon_s) for _ in self.targets]
        self.drops = [
            (replica, model.addVar(lb=split_s.get(replica, 0.0), ub=horizon_s))
            for replica in [*change.dropped, *(part for s in change.splittings for part in s.dropped)]
        ]
        self._senders: dict[Replica, Any] = {}
        """How many slots at least send to each new replica."""
        durations = [self._duration(target, resident) for target in self.targets]
        self._ends = [start + duration for start, duration in zip(self.starts, durations, strict=True)]
        for finish in self._ends:
            model.addCons(end >= finish)
        for replica, drop in self.drops:
            model.addCons(end >= drop + seconds(Destroy("", replica)))
        for value in split_s.values():
            model.addCons(end >= value)
        self._sending = self._sources(resident, split_s)
        self._keep_a_copy(change)
        self._merge(change, split_s, end)

    def _duration(self, target: Replica, resident: list[Replica]) -> Any:
        """Return the duration of making ``target``: one binary variable for each number of slots that send to it."""
        model = self._model
        candidates = [*resident, *(other for other in self.targets if other is not target)]
        most = min(len(target.slots), MAX_STRIPES * max(len(replica.slots) for replica in candidates))
        chosen = {count: model.addVar(vtype="B") for count in range(1, most + 1)}
        model.addCons(quicksum(chosen.values()) == 1)
        self._senders[target] = quicksum(n * var for n, var in chosen.items())
        return quicksum(self._sent_by(n, target) * var for n, var in chosen.items())

    def _sent_by(self, count: int, target: Replica) -> float:
        """Return the seconds of a copy from ``count`` slots, whichever they are."""
        sender = Replica(target.model_stage, target.layout, tuple(range(count)))
        return self._seconds(Extend("", (sender,), target))

    def _sources(self, resident: list[Replica], split_s: dict[Replica, float]) -> dict[tuple[Replica, int], Any]:
        """Choose who sends to whom; return a binary variable for each (source, number of the new replica)."""
        model, horizon_s = self._model, self._horizon_s
        sending: dict[tuple[Replica, int], Any] = {}
        for number, target in enumerate(self.targets):
            options = [*resident, *(other for other in self.targets if other is not target)]
            for source in options:
                sending[source, number] = model.addVar(vtype="B")
            senders = quicksum(sending[source, number] * len(source.slots) for source in options)
            model.addCons(senders >= self._senders[target])
            model.addCons(quicksum(sending[source, number] for source in options) <= MAX_STRIPES)
            for other, finish in zip(self.targets, self._ends, strict=True):
                if other is not target:
                    sends = sending[other, number]
                    model.addCons(self.starts[number] >= finish - horizon_s * (1 - sends))
            for source in options:
                if source in split_s:
                    model.addCons(self.starts[number] >= split_s[source] * sending[source, number])
        for replica, drop in self.drops:
            for number, finish in enumerate(self._ends):
                model.addCons(drop >= finish - horizon_s * (1 - sending[replica, number]))
        for one, other in itertools.combinations(range(len(self.targets)), 2):
            first = model.addVar(vtype="B")
            for source in [*resident, *self.targets]:
                if (source, one) in sending and (source, other) in sending:
                    both = 2 - sending[source, one] - sending[source, other]
                    model.addCons(self.starts[other] >= self._ends[one] - horizon_s * (1 - first + both))
                    model.addCons(self.starts[one] >= self._ends[other] - horizon_s * (first + both))
        return sending

    def _keep_a_copy(self, change: StageDiff) -> None:
        """If the target keeps no copy, one that goes stays until a new one is there."""
        if change.stays or change.kept or change.splittings or not self.targets:
            return
        model, horizon_s = self._model, self._horizon_s
        keeps = [model.addVar(vtype="B") for _ in self.drops]
        first = [model.addVar(vtype="B") for _ in self.targets]
        model.addCons(quicksum(keeps) == 1)
        model.addCons(quicksum(first) == 1)
        for (_, drop), keep in zip(self.drops, keeps, strict=True):
            for finish, is_first in zip(self._ends, first, strict=True):
                model.addCons(drop >= finish - horizon_s * (2 - keep - is_first))

    def _merge(self, change: StageDiff, split_s: dict[Replica, float], end: Any) -> None:
        model, horizon_s = self._model, self._horizon_s
        ends = dict(zip(self.targets, self._ends, strict=True))
        for merging in change.mergings:
            parts = merging.resident + merging.extended
            begin = model.addVar(lb=max(split_s.get(part, 0.0) for part in parts), ub=horizon_s)
            model.addCons(end >= begin + self._seconds(Merge("", parts, merging.target, merging.aligned)))
            for part in merging.extended:
                model.addCons(begin >= ends[part])
            for (source, number), sends in self._sending.items():
                if source in parts:
                    model.addCons(begin >= self._ends[number] - horizon_s * (1 - sends))
