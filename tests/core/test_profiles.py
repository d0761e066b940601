"""Are the profiles complete, sourced and forgiving to type?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nereus.core.profiles import PROFILES, load_cluster, load_model, profile_names
from nereus.errors import ConfigError

SIZES = {"llama-3.1-8b": 8_030e6, "qwen3-14b": 14_768e6, "qwen3-32b": 32_762e6, "llama-3.1-70b": 70_554e6}
POOLS = {"mi250x-1024": (1024, 8), "a100-64g-256": (256, 4), "h200-64": (64, 8), "h100-dgx": (256, 8), "cpu": (8, 8)}


def test_models_have_their_published_size() -> None:
    assert set(profile_names("models")) == set(SIZES)
    for name, size in SIZES.items():
        assert load_model(name).parameters == pytest.approx(size, rel=1e-3)


def test_clusters_have_their_slots() -> None:
    assert set(profile_names("clusters")) == set(POOLS)
    for name, pool in POOLS.items():
        cluster = load_cluster(name)
        assert (cluster.size, cluster.slots_per_node) == pool
        assert cluster.in_node.bytes_per_s > cluster.cross_node.bytes_per_s


@pytest.mark.parametrize("path", sorted(PROFILES.rglob("*.toml")), ids=lambda path: str(path.stem))
def test_every_number_of_a_cluster_names_its_source(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    if path.parent.name == "clusters":
        for line in text.splitlines():
            if re.match(r"\w+(_gb|_tflops|_s|_us) =", line):
                assert "#" in line, line


def test_a_name_may_be_cut_short_and_slots_replaced() -> None:
    assert load_cluster("a100-64g", slots=32).size == 32


@pytest.mark.parametrize(
    ("name", "hint"), [("lama-3.1-8b", "did you mean llama-3.1-8b"), ("llama", "llama-3.1-70b or llama-3.1-8b")]
)
def test_a_wrong_name_gets_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(hint)):
        load_model(name)


def test_wrong_files_and_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        load_cluster("cpu", slots=0)
    bad = tmp_path / "bad.toml"
    bad.write_text("slots = 0")
    with pytest.raises(ConfigError, match="no cluster profile"):
        load_cluster(str(bad))
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    with pytest.raises(ConfigError, match="lacks hidden_size"):
        load_model(str(tmp_path))
