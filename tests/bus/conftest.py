"""Every test that asks for a ``world`` runs in each of them."""

from __future__ import annotations

import asyncio

import pytest

from nereus.bus.loop import loop_factory
from tests.bus.worlds import MemoryWorld, World, ZmqWorld


@pytest.fixture(params=["memory", pytest.param("zeromq", marks=pytest.mark.deep), "zeromq-uvloop"])
def world(request: pytest.FixtureRequest) -> World:
    if request.param == "memory":
        return MemoryWorld()
    if request.param == "zeromq":
        return ZmqWorld(asyncio.new_event_loop)
    pytest.importorskip("uvloop")
    return ZmqWorld(loop_factory())


@pytest.fixture
def zmq_world() -> ZmqWorld:
    return ZmqWorld(asyncio.new_event_loop)
