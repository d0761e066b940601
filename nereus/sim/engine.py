"""What comes out of a generation unit, and when? Continuous batching, sequence by sequence.

Between two events a unit decodes all its live sequences, one token each in every decode step; a step takes a part that
depends on how many are alive and a part for every cached token. Both are known, so the time to the next end of a
sequence has a closed form, and nothing is walked token by token. Owner: the actor of a unit's first slot.

Invariants (tests/sim/test_engine.py): equal to a walk token by token; a sequence is never served beyond the room for
sequences and cached tokens; what is in flight at a switch goes on under the new version; without waits the closed form
of the whole is the same.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from nereus.bus.messages import GroupSpec

Cost = Callable[[int], float]
"""Seconds of a decode step by the number of live sequences."""


class Drawn(Struct):
    """A group on its way: what it will be like is decided by the world when it begins."""

    spec: GroupSpec
    prompt_tokens: int
    lengths: tuple[int, ...]
    began: float = 0.0
    version_first: int = -1
    firsts: list[int] = []
    lasts: list[int] = []
    left: int = 0
    """Sequences that are not finished."""
    waiting: int = 0
    """Sequences that are not started."""


class Lifted(Struct, frozen=True):
    """A sequence on its way from one engine to another."""

    group: Drawn
    index: int
    left_steps: float


class Speed(Struct, frozen=True):
    """What the unit's decoding takes at present."""

    step_s: Cost
    cached_s: float
    """For each cached token, in each decode step."""


def all_at_once(groups: Sequence[tuple[int, tuple[int, ...]]], speed: Speed, prefill_s: Cost) -> float:
    """Return when an engine with room for all of ``groups`` (prompt tokens, response lengths) is through.

    What ``Engine`` comes to if nothing happens on the way: the sequences end in the order of their lengths.
    """
    lengths = sorted(length for _, responses in groups for length in responses)
    seconds, before = 0.0, 0
    for ended, length in enumerate(lengths):
        if length > before:
            seconds += speed.step_s(len(lengths) - ended) * (length - before)
            before = length
    cached = sum(length * (prompt + length / 2) for prompt, responses in groups for length in responses)
    return seconds + speed.cached_s * cached + sum(prefill_s(prompt) for prompt, _ in groups)


class Engine:
    """The sequences of one unit; time is an argument."""

    def __init__(self, most: int, room_tokens: int) -> None:
        """At most ``most`` sequences are alive, with at most ``room_tokens`` cached tokens in sight."""
        self._most = most
        self._room = room_tokens
        self._queue: deque[Drawn] = deque()
        self._ends: list[tuple[float, int, Drawn, int]] = []
        """(decode step of the end, number, group, sequence) of what is alive, as a heap."""
        self._number = 0
        self._position = 0.0
        """Decode steps since the beginning, with the share of the present one."""
        self._cached = 0.0
        """Cached tokens of what is alive, less its number times ``_position``."""
        self._reserved = 0
        self._clock = 0.0
        self._stalled_until = 0.0
        self._speed = Speed(lambda live: math.inf, 0.0)
        self.version = -1
        self.tokens = 0.0
        self.steps = 0.0
        self.read_tokens = 0.0
        """For each token drawn, the cached tokens that it saw."""
        self.busy_s = 0.0

    @property
    def live(self) -> int:
        return len(self._ends)

    @property
    def idle(self) -> bool:
        """Whether nothing is alive and nothing waits."""
        return not self._ends and not self._queue

    @property
    def waiting(self) -> bool:
        """Whether there are sequences for which there was no room."""
        return bool(self._queue)

    @property
    def cached_tokens(self) -> float:
        """Tokens in the cache at the newest event."""
        return self._cached + len(self._ends) * self._position

    def has_room(self, other: Engine) -> bool:
        """Say whether everything that is alive at ``other`` could be taken in as well."""
        return (
            not self._queue
            and self._reserved + other._reserved <= self._room
            and len(self._ends) + len(other._ends) <= self._most
        )

    def restart(self, now: float) -> None:
        """Forget everything, as a unit that is built anew."""
        self._queue.clear()
        self._ends.clear()
        self._cached, self._reserved, self.version = 0.0, 0, -1
        self._clock = self._stalled_until = now

    def add(self, group: Drawn, now: float) -> list[Drawn]:
        """Take a group in; returns what has been finished meanwhile."""
        done = self.advance(now)
        group.waiting = group.left = len(group.lengths)
        group.firsts, group.lasts = [0] * group.left, [0] * group.left
        group.began = now
        self._queue.append(group)
        self._admit()
        return done

    def drop(self, group: int, now: float) -> list[Drawn]:
        """Abort a group; returns what has been finished meanwhile."""
        done = self.advance(now)
        self._queue = deque(one for one in self._queue if one.spec.group != group)
        gone = [entry for entry in self._ends if entry[2].spec.group == group]
        if gone:
            self._ends = [entry for entry in self._ends if entry[2].spec.group != group]
            heapq.heapify(self._ends)
            for end, _, drawn, index in gone:
                self._cached -= drawn.prompt_tokens + drawn.lengths[index] - end
                self._reserved -= drawn.prompt_tokens + drawn.lengths[index]
        self._admit()
        return done

    def lift(self) -> list[Lifted]:
        """Take out all that is alive, as far as it has come; there must be no more that waits."""
        if self._queue:
            raise ValueError("only an engine without a queue can be emptied")
        gone = [Lifted(group, index, end - self._position) for end, _, group, index in sorted(self._ends)]
        self._ends.clear()
        self._cached, self._reserved = 0.0, 0
        return gone

    def lodge(self, lifted: Iterable[Lifted], now: float) -> list[Drawn]:
        """Go on with what another engine has begun; returns what has been finished meanwhile."""
        done = self.advance(now)
        for one in lifted:
            self._enter(one.group, one.index, one.left_steps)
        return done

    def redo(self, now: float) -> None:
        """Lose what is cached: everything that was begun and has not ended begins anew."""
        alive = {id(entry[2]): entry[2] for entry in sorted(self._ends)}
        queued = [group for group in self._queue if id(group) not in alive]
        self._queue.clear()
        self._ends.clear()
        self._cached, self._reserved = 0.0, 0
        for group in (*alive.values(), *queued):
            self.add(group, now)

    def switch(self, version: int, speed: Speed, stall_s: float, now: float) -> list[Drawn]:
        """Serve ``version`` from now on, after a pause; returns what has been finished meanwhile."""
        done = self.advance(now)
        self.stall(stall_s)
        self.version, self._speed = version, speed
        self._admit()
        return done

    def stall(self, seconds: float) -> None:
        """Decode nothing for a while."""
        self._stalled_until = max(self._stalled_until, self._clock) + seconds

    def next_end(self) -> float:
        """Return when the next sequence ends if nothing happens; infinity if none is alive."""
        if not self._ends:
            return math.inf
        return max(self._clock, self._stalled_until) + self._seconds(self._ends[0][0] - self._position)

    def advance(self, now: float) -> list[Drawn]:
        """Decode up to ``now``; return the groups of which the last sequence has ended."""
        done: list[Drawn] = []
        while self._ends:
            at = self.next_end()
            if at > now + 1e-9:
                break
            self._move(self._ends[0][0] - self._position, at)
            self._end_one(done)
        if self._ends and now > max(self._clock, self._stalled_until):
            self._move(self._steps_in(now - max(self._clock, self._stalled_until)), now)
        self._clock = max(self._clock, now)
        return done

    def _end_one(self, done: list[Drawn]) -> None:
        end, _, group, index = heapq.heappop(self._ends)
        whole = group.prompt_tokens + group.lengths[index]
        self._cached -= whole - end
        self._reserved -= whole
        group.lasts[index] = self.version
        group.left -= 1
        if not group.left:
            done.append(group)
        self._admit()

    def _admit(self) -> None:
        """Start sequences, oldest groups first, as far as there is room."""
        while self._queue and self.version >= 0 and len(self._ends) < self._most:
            group = self._queue[0]
            index = len(group.lengths) - group.waiting
            whole = group.prompt_tokens + group.lengths[index]
            if self._ends and self._reserved + whole > self._room:
                return
            if not index:
                group.version_first = self.version
                self.stall(self.prefill_s(group.prompt_tokens))
            group.firsts[index] = self.version
            self._enter(group, index, group.lengths[index])
            group.waiting -= 1
            if not group.waiting:
                self._queue.popleft()

    def _enter(self, group: Drawn, index: int, steps: float) -> None:
        """Let a sequence be alive for ``steps`` more."""
        whole = group.prompt_tokens + group.lengths[index]
        end = self._position + steps
        self._number += 1
        heapq.heappush(self._ends, (end, self._number, group, index))
        self._cached += whole - end
        self._reserved += whole

    prefill_s: Cost = staticmethod(lambda tokens: 0.0)
    """Seconds of computing a prompt; the owner sets it."""

    def _seconds(self, steps: float) -> float:
        """Return what ``steps`` decode steps from here take."""
        live, position = len(self._ends), self._position
        cached = steps * (self._cached + live * (position + steps / 2))
        return self._speed.step_s(live) * steps + self._speed.cached_s * cached

    def _steps_in(self, seconds: float) -> float:
        """Return how many decode steps fit into ``seconds`` from here: the inverse of ``_seconds``."""
        live = len(self._ends)
        square = self._speed.cached_s * live / 2
        linear = self._speed.step_s(live) + self._speed.cached_s * (self._cached + live * self._position)
        if square <= 0 or not math.isfinite(linear):
            return seconds / linear
        return 2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds))

    def _move(self, steps: float, at: float) -> None:
        self.busy_s += at - max(self._clock, self._stalled_until)
        self.tokens += steps * len(self._ends)
        self.read_tokens += steps * (self._cached + len(self._ends) * (self._position + steps / 2))
        self.steps += steps
        self._position += steps
        self._clock = max(self._clock, at)
