"""Continuous batching in closed form equals a walk decode step by decode step."""

from __future__ import annotations

import math
import random

import pytest

from nereus.bus.messages import GroupSpec
from nereus.sim.engine import Drawn, Engine, Speed

CACHED_S = 1e-6


def _step_s(live: int) -> float:
    return 0.01 + 0.0001 * live


def _group(number: int, lengths: tuple[int, ...], prompt: int = 10) -> Drawn:
    return Drawn(GroupSpec(number, 0, number, b'""', b"{}"), prompt, lengths)


def _engine(most: int = 64, room: int = 1 << 30) -> Engine:
    engine = Engine(most, room)
    engine.restart(0.0)
    engine.switch(0, Speed(_step_s, CACHED_S), 0.0, 0.0)
    return engine


def _run(engine: Engine) -> dict[int, float]:
    """Run to the end; return when each group ended."""
    ended = {}
    while (at := engine.next_end()) < math.inf:
        ended |= {group.spec.group: at for group in engine.advance(at)}
    return ended


def _walk(groups: list[Drawn]) -> dict[int, float]:
    """Decode all at once, token by token."""
    alive = [[group.spec.group, group.prompt_tokens, length] for group in groups for length in group.lengths]
    now, ended = 0.0, {}
    while alive:
        # In the middle of a step a sequence has half a token more than at its beginning.
        now += _step_s(len(alive)) + CACHED_S * sum(tokens + 0.5 for _, tokens, _ in alive)
        alive = [[group, tokens + 1, left - 1] for group, tokens, left in alive]
        ended |= {group: now for group, _, left in alive if not left}
        alive = [one for one in alive if one[2]]
    return ended


def test_it_equals_a_walk_token_by_token() -> None:
    source = random.Random(0)
    groups = [_group(n, tuple(source.randint(1, 300) for _ in range(4))) for n in range(6)]
    engine = _engine()
    for group in groups:
        engine.add(group, 0.0)
    assert _run(engine) == pytest.approx(_walk(groups), rel=1e-9)
    assert engine.tokens == pytest.approx(sum(sum(group.lengths) for group in groups))


def test_being_looked_at_changes_nothing() -> None:
    one, other = _engine(), _engine()
    for engine in (one, other):
        engine.add(_group(0, (50, 80)), 0.0)
        engine.add(_group(1, (20, 200)), 0.0)
    for tenth in range(1, 9):
        assert other.advance(tenth / 10 * 0.5) == []
    assert _run(one) == pytest.approx(_run(other))


def test_no_more_than_the_most_are_alive_and_the_rest_waits() -> None:
    engine = _engine(most=4)
    engine.add(_group(0, (100,) * 4), 0.0)
    engine.add(_group(1, (100,) * 4), 0.0)
    assert engine.live == 4
    ended = _run(engine)
    assert ended[1] == pytest.approx(2 * ended[0], rel=0.01)


def test_a_full_cache_lets_nothing_more_in() -> None:
    engine = _engine(room=250)
    engine.add(_group(0, (100, 100, 100)), 0.0)
    assert engine.live == 2
    assert len(_run(engine)) == 1


def test_what_is_in_flight_goes_on_under_the_new_version_after_the_pause() -> None:
    engine = _engine()
    group = _group(0, (100, 10))
    engine.add(group, 0.0)
    whole = _run(_copy())[0]
    engine.advance(whole / 2)
    engine.switch(1, Speed(_step_s, CACHED_S), 3.0, whole / 2)
    assert _run(engine)[0] == pytest.approx(whole + 3.0)
    assert (group.firsts, group.lasts) == ([0, 0], [1, 0])


def _copy() -> Engine:
    engine = _engine()
    engine.add(_group(0, (100, 10)), 0.0)
    return engine


def test_a_dropped_group_makes_room() -> None:
    engine = _engine(most=2)
    engine.add(_group(0, (1000, 1000)), 0.0)
    engine.add(_group(1, (10, 10)), 0.0)
    engine.drop(0, 1.0)
    assert engine.live == 2
    assert set(_run(engine)) == {1}
