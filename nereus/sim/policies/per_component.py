"""What happens if every model-stage moves by itself, with no order across model-stages?

Elastic RL systems that migrate per component (DynaRL, OSDI 2026, and the dynamic scheduler of RLinf) give each a
procedure of its own. Here each model-stage makes the same local moves as in our graph
(split, destroy what is redundant, extend, destroy the last copy, merge), waits for the slots that others release, and
knows nothing of the others. What the sources leave open is chosen in its favour: redundant copies go at once, memory
is no limit, and a component that cannot make one replica yet may go on with another (``one_by_one=False``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from nereus.core.plan import ModelStage, SlotId
from nereus.sim.scenarios import Scenario
from nereus.transition.diff import StageDiff, diff
from nereus.transition.ledger import groups_of
from nereus.transition.primitive import Replica


class _Component:
    """One model-stage on its own."""

    def __init__(self, change: StageDiff) -> None:
        self.model_stage = change.model_stage
        new = [part for merging in change.mergings for part in merging.extended]
        self.wanted = [*new, *change.extended]
        self.held: set[SlotId] = set()
        """Slots taken for the next replica."""
        lost = [part for splitting in change.splittings for part in splitting.dropped]
        self.redundant = [*lost, *change.dropped]
        self.last: Replica | None = None
        if not (change.stays or change.kept or change.splittings):
            self._keep_one()

    def _keep_one(self) -> None:
        """Keep the first copy that is not in the component's own way; if all are, it finds a way of its own."""
        slots = {slot for replica in self.wanted for slot in replica.slots}
        self.last = next((replica for replica in self.redundant if slots.isdisjoint(replica.slots)), None)
        if self.last:
            self.redundant.remove(self.last)


def deadlocks(case: Scenario, rng: random.Random, *, one_by_one: bool) -> bool:
    """Return whether the components, in a random interleaving, end up waiting for each other for ever.

    ``one_by_one``: a component makes its new replicas in the order of its plan and takes the slots of each as they
    become free, holding them while it waits for the rest.
    """
    components = [_Component(change) for change in diff(case.current, case.target)]
    groups = groups_of([component.model_stage for component in components], case.groups)
    owned = _Owned(case, groups)
    for component in components:
        for replica in component.redundant:
            owned.release(replica)
    while any(component.wanted for component in components):
        moved = False
        for component in rng.sample(components, len(components)):
            moved |= _advance(component, owned, one_by_one)
        if not moved:
            return True
    return False


class _Owned:
    def __init__(self, case: Scenario, groups: dict[ModelStage, tuple[int, ...]]) -> None:
        self._groups = groups
        self._by: dict[tuple[int, SlotId], ModelStage] = {}
        for emu in case.current.emus:
            self.take(emu.model_stage, emu.slots)

    def free(self, model_stage: ModelStage, slot: SlotId) -> bool:
        return not any((group, slot) in self._by for group in self._groups[model_stage])

    def take(self, model_stage: ModelStage, slots: Sequence[SlotId]) -> None:
        self._by.update({(group, slot): model_stage for group in self._groups[model_stage] for slot in slots})

    def release(self, replica: Replica) -> None:
        for group in self._groups[replica.model_stage]:
            for slot in replica.slots:
                del self._by[group, slot]


def _advance(component: _Component, owned: _Owned, one_by_one: bool) -> bool:
    """Take a step; return whether there was one to take."""
    wanted = component.wanted
    if not wanted:
        return False
    if one_by_one:
        made = wanted[0]
        free = [s for s in made.slots if s not in component.held and owned.free(component.model_stage, s)]
        owned.take(component.model_stage, free)
        component.held.update(free)
        if len(component.held) < len(made.slots):
            return bool(free)
        component.held.clear()
    else:
        found = next((one for one in wanted if all(owned.free(one.model_stage, s) for s in one.slots)), None)
        if found is None:
            return False
        made = found
        owned.take(component.model_stage, made.slots)
    wanted.remove(made)
    if component.last:
        owned.release(component.last)
        component.last = None
    return True
