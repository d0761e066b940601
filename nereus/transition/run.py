"""How far has a transition come, and what may start now?

The progress of one transition: driven alike by the live executor and by its price (``cost.makespan``). Owner: whoever
executes. Invariants (tests/transition/test_run.py): each primitive is handed out once, after all it waits for; the
books (``ledger``) balance at every step; finished in any order, the replicas are those of the target plan.
"""

from __future__ import annotations

from nereus.transition.ledger import Ledger
from nereus.transition.primitive import Primitive, PrimitiveId, Replica, TransitionDag


class TransitionRun:
    """The progress of ``dag``. ``ValueError``: a caller's or the graph's mistake, named by primitive and slot."""

    def __init__(self, dag: TransitionDag) -> None:
        self._dag = dag
        self._index = {primitive.id: i for i, primitive in enumerate(dag.primitives)}
        self._waits = [0] * len(dag.primitives)
        self._followers: list[list[int]] = [[] for _ in dag.primitives]
        for i, before in enumerate(zip(dag.local, dag.resource, strict=True)):
            for j in {*before[0], *before[1]}:
                self._waits[i] += 1
                self._followers[j].append(i)
        self._ready = [i for i, waits in enumerate(self._waits) if not waits]
        self._running: set[int] = set()
        self._left = len(dag.primitives)
        needed = dag.target.model_stages()
        self.ledger = Ledger(map(Replica.of, dag.current.emus), needed, dag.groups, dag.memory)

    @property
    def finished(self) -> bool:
        """Whether every primitive is done."""
        return not self._left

    @property
    def running(self) -> tuple[Primitive, ...]:
        """Return what was handed out and is not done, in the order of the graph."""
        return tuple(self._dag.primitives[i] for i in sorted(self._running))

    def ready(self) -> tuple[Primitive, ...]:
        """Hand out the primitives that may start now, each once: the caller must perform them."""
        started, self._ready = self._ready, []
        primitives = tuple(self._dag.primitives[i] for i in started)
        for primitive in primitives:
            self.ledger.start(primitive)
        self._running.update(started)
        return primitives

    def done(self, primitive_id: PrimitiveId) -> None:
        """Record that a primitive that was handed out has been performed."""
        index = self._index.get(primitive_id, -1)
        if index not in self._running:
            raise ValueError(f"{primitive_id!r} is not running; running are {[p.id for p in self.running]}")
        self._running.remove(index)
        self._left -= 1
        self.ledger.done(self._dag.primitives[index])
        for follower in self._followers[index]:
            self._waits[follower] -= 1
            if not self._waits[follower]:
                self._ready.append(follower)
        self._ready.sort()
