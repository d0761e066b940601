"""Does a search in another process come back, whatever happens to that process?"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import struct

import msgspec
import pytest

from nereus.config import AdaptConfig, ClusterConfig, EmulateConfig, JobConfig, RolloutConfig, TrainConfig
from nereus.control.controller import Widening
from nereus.core.plan import POLICY_TRAINING
from nereus.core.shape import ModelShape
from nereus.runtime.placement import initial_plan
from nereus.runtime.pool import cluster_of, starting_estimate
from nereus.runtime.searching import Answered, Asked, ProcessSearcher, serve, solve

SHAPE = ModelShape(4, 128, 4, 4, 32, 256, 512, 1024)


def _asked(search: int = 1) -> Asked:
    job = JobConfig(
        cluster=ClusterConfig(slots=6),
        rollout=RolloutConfig(layout="d3t1p1", max_prompt_tokens=32, max_new_tokens=32),
        train=TrainConfig(layout="d1t2p1"),
        adapt=AdaptConfig(mode="on"),
        emulate=EmulateConfig(gflops=2.0, memory_gb_s=2.0, link_gb_s=0.5),
    )
    cluster = cluster_of(job)
    question = starting_estimate(job, SHAPE, cluster).question(cluster, initial_plan(job), {})
    return Asked(search, Widening.PLANS, question)


def test_a_question_survives_the_way_there_and_back() -> None:
    asked = _asked(7)
    body = msgspec.msgpack.encode(asked)
    answers = io.BytesIO()
    serve(io.BytesIO(struct.pack("<I", len(body)) + body), answers)
    (size,) = struct.unpack("<I", answers.getvalue()[:4])
    answered = msgspec.msgpack.decode(answers.getvalue()[4 : 4 + size], type=Answered)
    assert answered == solve(asked)
    assert answered.found.search == 7
    assert answered.found.proposals[0].plan.of(POLICY_TRAINING)


@pytest.mark.live
def test_a_search_process_that_dies_costs_one_answer() -> None:
    async def main() -> tuple[Answered, Answered, Answered]:
        searcher = ProcessSearcher(timeout_s=60.0)
        try:
            await searcher.prepare()
            first = await searcher.search(_asked(1))
            assert searcher._process is not None
            os.kill(searcher._process.pid, signal.SIGSTOP)
            searcher._timeout_s = 0.5
            second = await searcher.search(_asked(2))
            searcher._timeout_s = 60.0
            return first, second, await searcher.search(_asked(3))
        finally:
            await searcher.close()

    first, second, third = asyncio.run(main())
    assert first.found.proposals and third.found.proposals
    assert not second.found.proposals
    assert "came to nothing" in second.found.because
    assert third.found.search == 3
