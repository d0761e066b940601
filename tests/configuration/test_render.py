"""Does a written job load to the same job?"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nereus.configuration.load import load_job
from nereus.configuration.render import to_toml, toml_key, toml_value, why

SCALARS = st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(st.text(), VALUES)
def test_values_round_trip(key: str, value: Any) -> None:
    if any(0xD800 <= ord(letter) <= 0xDFFF for letter in repr((key, value))):
        return
    assert tomllib.loads(f"{toml_key(key)} = {toml_value(value)}") == {key: value}


def test_a_written_job_loads_to_the_same_job(tmp_path: Path) -> None:
    overrides = [
        ("model.path", "/m"),
        ("data.options.max_terms", "3"),
        ("data.options.odd key", '"#\\""'),
        ("rollout.stop", '["\\n", "#"]'),
        ("train.loss.correction", "none"),
        ("train.epsilon", "1e-12"),
    ]
    job = load_job([], overrides)
    for provenance in (False, True):
        path = tmp_path / "job.toml"
        path.write_text(to_toml(job, provenance=provenance), encoding="utf-8")
        assert load_job([path]).config == job.config


def test_provenance_is_shown_beside_what_is_not_a_default() -> None:
    job = load_job([], [("model.path", "/m"), ("data.options.a", "1")])
    lines = to_toml(job, provenance=True).splitlines()
    assert 'path = "/m"  # command line' in lines
    assert "options = {a = 1}  # command line" in lines
    assert "steps = 100" in lines
    assert "from:    command line" in why(job, "model.path")
    assert "from:    data.options.a from command line" in why(job, "data.options")
    assert "from:    default" in why(job, "run.steps")
