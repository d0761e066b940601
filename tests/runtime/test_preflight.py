"""Is every job that cannot start refused before a process starts, naming the key and where it was set?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nereus.configuration.job import LoadedJob
from nereus.configuration.load import load_job
from nereus.errors import ConfigError
from nereus.runtime.preflight import preflight

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def model(folder: Path, **changes: Any) -> Path:
    """Make a folder that looks like a model from outside."""
    path = folder / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**SIZES, **changes}))
    for name in ("model.safetensors", "tokenizer.json"):
        (path / name).write_bytes(b"{}")
    return path


def load(path: Path, *overrides: tuple[str, str]) -> LoadedJob:
    return load_job([], [("cluster.slots", "64"), ("model.path", str(path)), *overrides])


def refusal(path: Path, *overrides: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(load(path, *overrides))
    assert "(command line)" in caught.value.where
    return str(caught.value)


def test_a_sound_job_passes_and_yields_the_shape(tmp_path: Path) -> None:
    shape = preflight(load(model(tmp_path)))
    assert (shape.layers, shape.head_dim, shape.tied, shape.qkv_bias) == (4, 8, True, False)


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ("t4", ("train.layout", "tensor degree 4", "2 key-value heads")),
        ("t3", ("tensor degree 3 is above the model's 2 key-value heads",)),
        ("p5", ("pipeline degree 5", "4 layers")),
    ],
)
def test_impossible_layouts_are_refused(tmp_path: Path, layout: str, parts: tuple[str, ...]) -> None:
    message = refusal(model(tmp_path), ("train.layout", layout))
    for part in parts:
        assert part in message


def test_layouts_that_a_plan_change_asks_for_must_fit_the_model_too(tmp_path: Path) -> None:
    start = (("train.layout", "d4t1p1"), ("adapt.at", "3 d2t2p1 d2t1p1; 6 d1t4p1 d2t1p1"))
    message = refusal(model(tmp_path), *start)
    assert "adapt.at" in message
    assert "tensor degree 4" in message


def test_channels_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    assert "161 feed-forward" in refusal(model(tmp_path, intermediate_size=161), ("train.layout", "t2"))


def test_samples_longer_than_the_model_are_refused(tmp_path: Path) -> None:
    message = refusal(model(tmp_path), ("rollout.max_new_tokens", "300"))
    assert "256" in message
    assert "300 = 556" in message
    assert "512 positions" in message


def test_incomplete_models_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    path = model(tmp_path)
    assert "is not a folder" in refusal(path / "config.json")
    (path / "tokenizer.json").unlink()
    assert "tokenizer" in refusal(path)
    (path / "model.safetensors").unlink()
    assert "weights" in refusal(path)
    (path / "config.json").unlink()
    assert "config.json" in refusal(path)


@pytest.mark.parametrize("text", ["{", "[]", '{"vocab_size": 3}', json.dumps({**SIZES, "num_hidden_layers": "four"})])
def test_damaged_model_configurations_are_refused(tmp_path: Path, text: str) -> None:
    path = model(tmp_path)
    (path / "config.json").write_text(text)
    assert "model.path" in refusal(path)


def test_missing_data_is_refused(tmp_path: Path) -> None:
    reward = ("reward.function", "math:gcd")
    path = model(tmp_path)
    assert "rows.jsonl does not exist" in refusal(path, ("data.source", str(tmp_path / "rows.jsonl")), reward)
    (tmp_path / "empty.jsonl").touch()
    assert "holds no rows" in refusal(path, ("data.source", str(tmp_path / "empty.jsonl")), reward)
    assert "no task is named" in refusal(path, ("data.source", "reasoning_gym:"))


def test_unknown_backends_are_refused(tmp_path: Path) -> None:
    message = refusal(model(tmp_path), ("train.backend", "jax"))
    assert "no backend 'jax'" in message
    assert "torch" in message


def test_recipes_are_looked_up(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    overrides = [("model.recipe", str(recipe)), ("train.layout", "t2"), ("rollout.layout", "d1")]
    with pytest.raises(ConfigError, match="does not exist"):
        preflight(load_job([], overrides))
    recipe.write_text("[model]\nlayers = 2\nhidden = 96\nheads = 4\ncontext = 512\n")
    shape = preflight(load_job([], overrides), quick=True)
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (2, 2, 24)
    with pytest.raises(ConfigError, match="pipeline degree 3 is above the model's 2 layers"):
        preflight(load_job([], [*overrides, ("train.layout", "p3")]))
    recipe.write_text("[model]\nheads = 0\n")
    with pytest.raises(ConfigError, match=r"model\.heads"):
        preflight(load_job([], overrides))


@pytest.mark.deep
def test_rewards_are_loaded_and_checked_against_the_columns(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2", "level": 3}\n')
    code = tmp_path / "score.py"
    code.write_text(
        "def good(completions, level, **kwargs):\n    return [0.0] * len(completions)\n\n"
        "def needs_more(completions, levels):\n    return []\n"
    )
    path = model(tmp_path)

    def job(function: str) -> tuple[tuple[str, str], ...]:
        return ("data.source", str(rows)), ("reward.function", f"{tmp_path}/{function}")

    preflight(load(path, *job("score.py:good")))
    assert "did you mean good?" in refusal(path, *job("score.py:goood"))
    assert "did you mean score.py?" in refusal(path, *job("scores.py:good"))
    assert "did you mean level?" in refusal(path, *job("score.py:needs_more"))
    code.write_text("import no_such_module\n")
    assert "no_such_module" in refusal(path, *job("score.py:good"))
    rows.write_text("{")
    with pytest.raises(ConfigError) as caught:
        preflight(load(path, *job("score.py:good")))
    assert f"{rows}:1" in caught.value.where


def test_unknown_tasks_are_refused_unless_quick(tmp_path: Path) -> None:
    path = model(tmp_path)
    assert "chain_sum" in refusal(path, ("data.source", "reasoning_gym:chain_sun"))
    assert "max_terms" in refusal(path, ("data.options.max_termz", "3"))
    preflight(load(path, ("data.source", "reasoning_gym:chain_sun")), quick=True)


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from nereus.configuration.load import load_job;"
        "from nereus.runtime.preflight import preflight;"
        f"preflight(load_job([], [('model.path', {str(model(tmp_path))!r})]), quick=True);"
        "print({'torch', 'zmq', 'transformers', 'reasoning_gym', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
