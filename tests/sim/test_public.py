from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nereus.errors import ConfigError
from nereus.sim.public import interruptions_per_slot_s, read_lengths, read_requests, read_supply
from nereus.sim.trace import StepLengths, Supply


def table(folder: Path, *lines: str) -> Path:
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_spread_of_a_log_is_that_of_its_longest_response(tmp_path: Path) -> None:
    truth = StepLengths(1000.0, 2000.0)
    drawn = [truth.sample((5, step), 512, 1 << 30) for step in range(40)]
    rows = [f"r,{step},{np.mean(one)},{max(one)}" for step, one in enumerate(drawn)]
    path = table(tmp_path, "run_id,step,resp_len_mean,resp_len_max", *rows, "r,40,,", "other,0,1,1")
    found = read_lengths(path, "r", samples=512, limit=1 << 30)
    assert len(found) == 40
    assert np.mean([one.p95_tokens / one.mean_tokens for one in found]) == pytest.approx(2.0, rel=0.06)


def test_responses_that_were_cut_say_nothing_of_the_spread_while_others_were_not(tmp_path: Path) -> None:
    head = "run_id,step,resp_len_mean,resp_len_max"
    whole = read_lengths(table(tmp_path, head, "r,0,100,400"), "r", samples=64, limit=512)
    mixed = read_lengths(table(tmp_path, head, "r,0,100,400", "r,1,300,512"), "r", samples=64, limit=512)
    assert mixed[0] == whole[0]
    assert mixed[1].p95_tokens == pytest.approx(3 * whole[0].p95_tokens, abs=0.2)
    with pytest.raises(ConfigError, match="no lengths"):
        read_lengths(table(tmp_path, head, "r,0,,"), "r", samples=64, limit=512)


def test_a_pool_is_read_from_any_moment_on(tmp_path: Path) -> None:
    path = table(tmp_path, "trace_id,t_s,available", "p,0,4", "p,10,4", "p,20,0", "p,30,6", "p,40,9", "q,0,1")
    assert read_supply(path, "p") == (Supply(0, 4), Supply(20, 1), Supply(30, 6), Supply(40, 9))
    assert read_supply(path, "p", start_s=25, end_s=40, least=3) == (Supply(0, 3), Supply(5, 6))
    assert read_supply(path, "q", slots_each=8) == (Supply(0, 8),)


def test_requests_above_the_limit_are_cut(tmp_path: Path) -> None:
    path = table(tmp_path, "dataset,order,out_tokens", *(f"d,{index},{index}" for index in range(1, 101)))
    assert read_requests(path, "d", limit=1000) == StepLengths(50.5, 95.0)
    assert read_requests(path, "d", limit=50).p95_tokens == 50


def test_failures_are_counted_for_a_slot_and_a_second(tmp_path: Path) -> None:
    head = "source,gpus,period,category,count"
    path = table(tmp_path, head, "s,100,10 days,GPU,3", "s,100,10 days,Host,2", "s,100,,planned,9", "t,1,x,GPU,")
    assert interruptions_per_slot_s(path, "s") == pytest.approx(5 / (100 * 864_000))
    with pytest.raises(ConfigError, match="no one period"):
        interruptions_per_slot_s(table(tmp_path, head, "t,1,x,GPU,2"), "t")


def test_what_is_not_in_a_table_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path, "trace_id,t_s,available", "p,0,four")
    with pytest.raises(ConfigError, match="it has p"):
        read_supply(path, "x")
    with pytest.raises(ConfigError, match="'four' is no number"):
        read_supply(path, "p")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_supply(tmp_path / "absent.csv", "p")
