"""Journals of runs that never were: entries made by hand, for what reads journals."""

from __future__ import annotations

from collections.abc import Sequence

from nereus.bus.messages import GroupRef
from nereus.core.plan import POLICY_GENERATION, POLICY_WEIGHTS, Emu, Layout, Plan, Replication
from nereus.runtime import journal as record
from nereus.runtime.journal import Entry
from nereus.runtime.placement import FIRST_VIRTUAL_SLOT, next_plan


class Story:
    """Writes entries; ``after`` lets time pass."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.t = 0.0
        self.step = 0
        self.plan = Plan(-1, (Emu(POLICY_WEIGHTS, 0, Layout(), (FIRST_VIRTUAL_SLOT,)),))

    def after(self, seconds: float, *records: record.Record) -> Story:
        self.t += seconds
        self.entries += [Entry(len(self.entries) + index, self.t, one) for index, one in enumerate(records)]
        return self

    def starts(self, train: str, rollout: str, slots: Sequence[int], *, attempt: int = 1, step: int = 0) -> Story:
        """Begin an attempt that is ready ten seconds later."""
        self.step = step
        self.plan = Plan(-1, self.plan.of(POLICY_WEIGHTS))
        self.after(
            0.0, record.RunStarted(run="demo", attempt=attempt, config="c", data="d", seed=0, wall=0.0, step=step)
        )
        self.plan = self.next(train, rollout, slots)
        self.after(1.0, record.PlanCommitted(plan=self.plan, why="start"))
        joined = (record.WorkerJoined(worker=f"slot-{slot}", incarnation=f"{attempt}.{slot}") for slot in slots)
        self.after(2.0, *joined)
        return self.after(7.0, record.VersionReady(version=step, checksum="")).lives()

    def next(self, train: str, rollout: str, slots: Sequence[int]) -> Plan:
        return next_plan(self.plan, Replication.parse(train), Replication.parse(rollout), slots)

    def lives(self) -> Story:
        """Let all that generates have its weights."""
        slots = [emu.slots[0] for emu in self.plan.of(POLICY_GENERATION)]
        return self.after(
            0.5, *(record.WeightsLive(worker=f"slot-{slot}", version=self.step, checksum="") for slot in slots)
        )

    def trains(self, *seconds: float) -> Story:
        for one in seconds:
            groups = (GroupRef(self.step, 0),)
            self.after(one, record.Trained(step=self.step, version=self.step, groups=groups, samples=4))
            self.step += 1
        return self

    def changes(
        self,
        train: str,
        rollout: str,
        slots: Sequence[int],
        seconds: float,
        *,
        why: str = "asked for",
        failure: str = "",
    ) -> Story:
        """Move to these layouts, or try to."""
        target = self.next(train, rollout, slots)
        primitives = ("policy.training/split-0", "policy.training/extend-1", "policy.generation/destroy-2")
        self.after(0.0, record.TransitionBegun(plan=target, primitives=primitives, why=why))
        self.after(seconds)
        if not failure:
            self.plan = target
            self.after(0.0, record.PlanCommitted(plan=target, why="transition"))
        return self.after(
            0.0,
            record.TransitionEnded(
                epoch=target.epoch, ok=not failure, reason=failure, seconds=seconds, moved_bytes=3_000_000
            ),
        )

    def loses(self, worker: str, why: str = "exit code -9") -> Story:
        return self.after(0.0, record.WorkerGone(worker=worker, incarnation="x", why=why))
