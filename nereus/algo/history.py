"""Did a run train every group exactly once, in time, and with versions in order?

Owner: tests and ``nereus replay``; a pure function of journal records (plain dictionaries with ``kind``, oldest first,
as ``runtime/journal.py: plain`` yields them). Kinds it does not know are passed over.

Checked over all attempts of a run: an attempt that goes on from a checkpoint makes later steps void, so their groups
may be trained again, and must not be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def check_history(
    records: Iterable[Mapping[str, Any]],
    *,
    staleness: int,
    groups_per_step: int | None = None,
    in_order: bool = False,
) -> list[str]:
    """Return what is wrong with the history, one sentence each; an empty list means that every promise was kept.

    ``staleness`` is the bound; ``groups_per_step`` adds a check of the batch size; ``in_order`` demands that step k
    trained exactly the groups ``k * groups_per_step`` onwards (deterministic runs).
    """
    checker = _Checker(staleness, groups_per_step, in_order)
    for record in records:
        check = getattr(checker, f"on_{record['kind']}", None)
        if check is not None:
            check(record)
    return checker.problems


class _Checker:
    """What is known after the records so far."""

    def __init__(self, staleness: int, groups_per_step: int | None, in_order: bool) -> None:
        self.problems: list[str] = []
        self._staleness = staleness
        self._groups_per_step = groups_per_step
        self._in_order = in_order
        self._step = 0
        self._version = 0
        self._trained: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._granted: dict[int, int] = {}
        self._accepted: dict[int, Mapping[str, Any]] = {}
        self._ready: dict[int, str] = {}
        self._live: dict[str, int] = {}

    def on_run_started(self, record: Mapping[str, Any]) -> None:
        self._step, self._version = record["step"], record["version"]
        self._trained = {group: step for group, step in self._trained.items() if step < self._step}
        self._granted, self._accepted, self._live = {}, {}, {}
        # Versions are made anew from here on; the restored one itself is published again.
        self._ready = {version: checksum for version, checksum in self._ready.items() if version < self._version}

    def on_granted(self, record: Mapping[str, Any]) -> None:
        for ref in record["groups"]:
            group, attempt = ref["group"], ref["attempt"]
            if group in self._trained or group in self._dropped:
                self._problem(record, f"group {group} was granted after it was finished")
            if attempt <= self._granted.get(group, -1):
                self._problem(record, f"group {group} was granted as attempt {attempt} again")
            self._granted[group] = attempt

    def on_accepted(self, record: Mapping[str, Any]) -> None:
        group, attempt = record["group"], record["attempt"]
        if self._granted.get(group) != attempt:
            self._problem(record, f"group {group} attempt {attempt} was accepted but not granted")
        if group in self._accepted:
            self._problem(record, f"group {group} was accepted twice")
        if record["version_last"] < record["version_first"]:
            self._problem(record, f"group {group} has versions {record['version_first']}..{record['version_last']}")
        if record["version_last"] > max(self._version, *self._ready, 0):
            self._problem(record, f"group {group} claims version {record['version_last']}, which is not made yet")
        self._accepted[group] = record

    def on_reissued(self, record: Mapping[str, Any]) -> None:
        self._accepted.pop(record["group"], None)

    def on_dropped(self, record: Mapping[str, Any]) -> None:
        if record["group"] in self._trained:
            self._problem(record, f"group {record['group']} was dropped after it was trained")
        self._dropped.add(record["group"])

    def on_trained(self, record: Mapping[str, Any]) -> None:
        step, version = record["step"], record["version"]
        groups = [ref["group"] for ref in record["groups"]]
        if (step, version) != (self._step, self._version):
            self._problem(
                record, f"step {step} on version {version} came where step {self._step} on {self._version} belongs"
            )
        if self._groups_per_step is not None and len(groups) != self._groups_per_step:
            self._problem(record, f"step {step} trained {len(groups)} groups instead of {self._groups_per_step}")
        if self._in_order and groups != list(range(step * len(groups), (step + 1) * len(groups))):
            self._problem(record, f"step {step} trained {groups}, out of the sample order")
        for ref in record["groups"]:
            self._train(record, ref["group"], ref["attempt"])
        self._step, self._version = step + 1, version + 1

    def _train(self, record: Mapping[str, Any], group: int, attempt: int) -> None:
        if group in self._trained:
            self._problem(record, f"group {group} was trained again (first in step {self._trained[group]})")
        if group in self._dropped:
            self._problem(record, f"group {group} was trained after it was dropped")
        self._trained[group] = record["step"]
        held = self._accepted.pop(group, None)
        if held is None:
            self._problem(record, f"group {group} was trained but not accepted")
            return
        if held["attempt"] != attempt:
            self._problem(record, f"group {group} was trained as attempt {attempt}, accepted as {held['attempt']}")
        lag = record["version"] - held["version_first"]
        if not 0 <= lag <= self._staleness:
            self._problem(record, f"group {group} was trained with staleness {lag}, the bound is {self._staleness}")

    def on_version_ready(self, record: Mapping[str, Any]) -> None:
        version = record["version"]
        if version < max(self._ready, default=version) or self._ready.get(version, "") not in ("", record["checksum"]):
            self._problem(record, f"version {version} became ready after version {max(self._ready)}")
        if version > self._version + 1:  # the relay's word may overtake the trainer's by one step
            self._problem(record, f"version {version} became ready, but version {self._version} is still being trained")
        self._ready[version] = record["checksum"]

    def on_weights_live(self, record: Mapping[str, Any]) -> None:
        worker, version = record["worker"], record["version"]
        if version < self._live.get(worker, 0):
            self._problem(record, f"{worker} fell back from version {self._live[worker]} to {version}")
        if version in self._ready and self._ready[version] != record["checksum"]:
            self._problem(record, f"{worker} serves other weights as version {version} than were published")
        self._live[worker] = version

    def on_worker_gone(self, record: Mapping[str, Any]) -> None:
        self._live.pop(record["worker"], None)

    def on_checkpoint_committed(self, record: Mapping[str, Any]) -> None:
        frontier = record["cursor"]
        for group in range(frontier):
            if group not in self._trained and group not in self._dropped:
                self._problem(record, f"group {group} lies before cursor {frontier} but was never trained")

    def on_run_ended(self, record: Mapping[str, Any]) -> None:
        """Nothing may have vanished: below the highest known group, each is trained, dropped or pending."""
        known = self._trained.keys() | self._dropped | self._granted.keys()
        for group in range(max(known, default=-1) + 1):
            if group not in known:
                self._problem(record, f"group {group} was skipped: never granted, trained or dropped")

    def _problem(self, record: Mapping[str, Any], what: str) -> None:
        where = f"record {record['seq']} ({record['kind']})" if "seq" in record else str(record["kind"])
        self.problems.append(f"{where}: {what}")
