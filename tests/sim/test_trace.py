from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from nereus.errors import ConfigError
from nereus.sim.trace import (
    Drift,
    Failure,
    StepLengths,
    StepSupply,
    Supply,
    Trace,
    load_trace,
    read_trace,
    trace_names,
    write_trace,
)

FULL = Trace(
    "full",
    "made up",
    (StepLengths(1147.5, 1339.0), StepLengths(3722.0, 4072.0)),
    (Supply(0.0, 8), Supply(900.0, 32)),
    (Drift(1, "all", 0.5), Drift(2, "gemm", 0.8), Drift(3, "all", 1.0)),
    (Failure(10.0, 3, "kill"), Failure(20.0, None, "reclaim")),
    note="with an umlaut: ü",
)


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    write_trace(FULL, tmp_path / "full.json")
    assert read_trace(tmp_path / "full.json") == FULL


def test_toml_holds_the_same(tmp_path: Path) -> None:
    path = tmp_path / "short.toml"
    path.write_text(
        'name = "s"\nsource = "t"\nsteps = [[100, 200.5]]\nstep_supply = [[0, 4], [2, 8]]\nheld_out = true\n'
    )
    trace = read_trace(path)
    assert trace == Trace(
        "s", "t", (StepLengths(100.0, 200.5),), step_supply=(StepSupply(0, 4), StepSupply(2, 8)), held_out=True
    )


def test_the_newest_value_holds() -> None:
    assert FULL.lengths_at(0) == FULL.steps[0]
    assert FULL.lengths_at(99) == FULL.steps[1]
    assert (FULL.slots_at(0, 899.9), FULL.slots_at(0, 900.0)) == (8, 32)
    assert [FULL.factor_at(step, "gemm") for step in range(4)] == [1.0, 0.5, pytest.approx(0.4), 0.8]
    assert FULL.factor_at(3, "decode") == 1.0
    assert FULL.most_slots == 32


def test_what_a_trace_does_not_say_is_left_to_the_job() -> None:
    silent = Trace("silent", "nowhere")
    assert silent.lengths_at(3) is None
    assert silent.slots_at(3, 1e6) is None
    assert silent.most_slots is None


def test_supply_by_steps_does_not_depend_on_time() -> None:
    trace = Trace("s", "t", step_supply=(StepSupply(0, 4), StepSupply(2, 8)))
    assert [trace.slots_at(step, 1e9) for step in range(4)] == [4, 4, 8, 8]


@given(some.floats(20, 5000), some.floats(1.05, 3.0), some.integers(0, 1000))
def test_drawn_lengths_have_the_mean_and_spread_asked_for(mean: float, ratio: float, seed: int) -> None:
    lengths = StepLengths(mean, mean * ratio)
    drawn = sorted(lengths.sample((seed, 1), 4000, 10**7))
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.15)
    assert drawn[3800] == pytest.approx(mean * ratio, rel=0.15)
    assert drawn == sorted(lengths.sample((seed, 1), 4000, 10**7))


def test_seeds_differ_and_nothing_is_above_the_limit() -> None:
    lengths = StepLengths(1000.0, 2500.0)
    assert lengths.sample((1, 2), 8, 4096) != lengths.sample((1, 3), 8, 4096)
    assert max(lengths.sample(7, 1000, 1500)) == 1500
    assert lengths.lengths(1500).longest == 1500


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"steps": [[100, 50]]}, r"steps\[0\].*95th percentile"),
        ({"steps": [[100, 1000]]}, r"steps\[0\].*no log-normal"),
        ({"steps": [[100]]}, r"\$\.steps\[0\]"),
        ({"supply": [[5, 8], [4, 8]]}, r"supply\[1\]"),
        ({"supply": [[5, 0]]}, r"\$\.supply\[0\]\[1\]"),
        ({"supply": [[0, 1]], "step_supply": [[0, 1]]}, "both given"),
        ({"efficiency": [[0, "gem", 0.5]]}, "no operation class 'gem'"),
        ({"efficiency": [[0, "gemm", 0]]}, r"\$\.efficiency\[0\]\[2\]"),
        ({"failures": [{"at_s": 1, "slot": None, "kind": "melt"}]}, "melt"),
        ({"nmae": "x"}, "nmae"),
        ({"source": ""}, "name and a source"),
    ],
)
def test_a_wrong_trace_is_refused_with_the_place(tmp_path: Path, change: dict[str, object], complaint: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"name": "n", "source": "s", **change}))
    with pytest.raises(ConfigError, match=complaint) as refused:
        read_trace(path)
    assert "wrong.json" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "absent.json")
    (tmp_path / "damaged.toml").write_text("name = ")
    with pytest.raises(ConfigError, match="is no trace"):
        read_trace(tmp_path / "damaged.toml")
    (tmp_path / "trace.csv").write_text("a,b")
    with pytest.raises(ConfigError, match=r"\.toml or \.json"):
        read_trace(tmp_path / "trace.csv")


def test_every_trace_of_the_package_is_whole_and_some_are_held_out() -> None:
    traces = {name: load_trace(name) for name in trace_names()}
    assert all(trace.name == name for name, trace in traces.items())
    assert sum(trace.held_out for trace in traces.values()) >= 3
    first = traces["paper-drift-1"]
    assert first.steps[0] == StepLengths(1147.5, 1339.0)
    assert first.steps[24] == StepLengths(3722.0, 4072.0)
    assert len(first.steps) == 25
    assert (min(one.slots for one in first.step_supply), first.most_slots) == (8, 32)
    growth = traces["paper-growth"]
    assert (len(growth.steps), growth.most_slots) == (1000, 1024)
    assert (growth.steps[0].mean_tokens, growth.steps[-1].mean_tokens) == (500.0, 8000.0)


def test_a_name_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="paper-drift-1"):
        load_trace("paper-drift-9")
