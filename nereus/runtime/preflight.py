"""Can this job start here? Everything that can be known before a process starts or a model is built.

Reads files and imports nothing heavy, so that a mistake costs a second and not a minute.
Invariant (tests/runtime/test_preflight.py): every refusal is a ``ConfigError`` that names the key and where it was set.
"""

from __future__ import annotations

import importlib.util
import json
import pkgutil
from pathlib import Path
from typing import Any

import msgspec

import nereus.backends
from nereus.actors.reasoning_task import PREFIX, is_task
from nereus.backends.recipe import Recipe, read_recipe
from nereus.configuration.job import LoadedJob
from nereus.configuration.rules import replication
from nereus.core.change import parse_changes
from nereus.core.shape import ModelShape
from nereus.errors import ConfigError
from nereus.runtime.dataset import open_dataset

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_SIZES = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}


def preflight(job: LoadedJob, *, quick: bool = False) -> ModelShape:
    """Refuse a job that cannot start; return the model's shape.

    ``quick`` leaves out what needs reasoning-gym's import, which takes seconds: its task names, options and columns.
    """
    _check_backends(job)
    shape = model_shape(job)
    _check_layouts(job, shape)
    _check_lengths(job, shape)
    try:
        columns = _check_data(job, quick)
        _check_reward(job, columns)
    except ConfigError as error:
        if error.where in job.provenance:
            raise job.refuse(error.where, error.what, error.remedy) from None
        raise
    return shape


def model_shape(job: LoadedJob) -> ModelShape:
    """Read the model's sizes from the folder's config.json, or from the recipe."""
    model = job.config.model
    if model.recipe:
        path = _existing(job, "model.recipe", Path(model.recipe))
        return _recipe_shape(read_recipe(path))
    folder = _existing(job, "model.path", Path(model.path))
    if not folder.is_dir():
        raise job.refuse("model.path", f"{folder} is not a folder", "name a Hugging Face model folder")
    for names, purpose in ((("config.json",), "sizes"), (_WEIGHTS, "weights"), (_TOKENIZERS, "tokenizer")):
        if not any((folder / name).is_file() for name in names):
            raise job.refuse(
                "model.path",
                f"{folder} has no {' or '.join(names)} ({purpose})",
                "name a complete Hugging Face model folder with safetensors weights",
            )
    return _shape(_json(folder / "config.json", job), job, "model.path", folder / "config.json")


def _json(path: Path, job: LoadedJob) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise job.refuse("model.path", f"{path} cannot be read: {error}", "restore the file") from None
    if not isinstance(document, dict):
        raise job.refuse("model.path", f"{path} does not hold a JSON object", "restore the file")
    return document


def _recipe_shape(recipe: Recipe) -> ModelShape:
    model = recipe.model
    return ModelShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.hidden // model.heads,
        intermediate=model.intermediate,
        vocab=recipe.tokenizer.vocabulary,
        max_positions=model.context,
        tied=model.tie_embeddings,
    )


def _shape(document: dict[str, Any], job: LoadedJob, key: str, path: Path) -> ModelShape:
    """Translate the field names of Hugging Face configurations."""
    missing = sorted(_SIZES - document.keys())
    if missing:
        raise job.refuse(
            key,
            f"{path} lacks {', '.join(missing)}",
            "use a decoder-only language model of the Llama or Qwen families",
        )
    kind = document.get("model_type", "llama")
    heads = document["num_attention_heads"]
    try:
        return msgspec.convert(
            {
                "layers": document["num_hidden_layers"],
                "hidden": document["hidden_size"],
                "heads": heads,
                "kv_heads": document.get("num_key_value_heads") or heads,
                "head_dim": document.get("head_dim") or document["hidden_size"] // heads,
                "intermediate": document["intermediate_size"],
                "vocab": document["vocab_size"],
                "max_positions": document.get("max_position_embeddings", 2048),
                "tied": document.get("tie_word_embeddings", False),
                "qkv_bias": bool(document.get("attention_bias", kind == "qwen2")),
                "qk_norm": kind.startswith("qwen3"),
            },
            ModelShape,
        )
    except (msgspec.ValidationError, TypeError, ZeroDivisionError) as error:
        raise job.refuse(key, f"{path} holds sizes that make no model: {error}", "correct the file") from None


def _check_backends(job: LoadedJob) -> None:
    for key, name in (("rollout.backend", job.config.rollout.backend), ("train.backend", job.config.train.backend)):
        known = [module.name for module in pkgutil.iter_modules(nereus.backends.__path__) if module.ispkg]
        if name not in known:
            raise job.refuse(key, f"there is no backend {name!r}", f"choose one of {', '.join(known)}")
        if name == "torch" and importlib.util.find_spec("torch") is None:
            raise job.refuse(key, "torch is not installed", "pip install 'nereus[train]'")


def _check_layouts(job: LoadedJob, shape: ModelShape) -> None:
    wanted = [(key, replication(job, key).layout) for key in ("train.layout", "rollout.layout")]
    for change in parse_changes(job.config.adapt.at):
        wanted += [("adapt.at", change.train.layout), ("adapt.at", change.rollout.layout)]
    for key, layout in wanted:
        for misfit in shape.misfits(layout):
            raise job.refuse(key, misfit, "choose smaller degrees, and more replicas to use the slots")


def _check_lengths(job: LoadedJob, shape: ModelShape) -> None:
    rollout = job.config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if longest > shape.max_positions:
        raise job.refuse(
            "rollout.max_new_tokens",
            f"rollout.max_prompt_tokens {rollout.max_prompt_tokens} + rollout.max_new_tokens {rollout.max_new_tokens} "
            f"= {longest} is above the model's {shape.max_positions} positions (max_position_embeddings)",
            "shorten one of the two",
        )


def _check_data(job: LoadedJob, quick: bool) -> tuple[str, ...] | None:
    """Open the data set; return its rows' columns (None: not looked at)."""
    data = job.config.data
    if is_task(data):
        if importlib.util.find_spec("reasoning_gym") is None:
            raise job.refuse("data.source", "reasoning-gym is not installed", "pip install 'nereus[train]'")
        if not data.source.removeprefix(PREFIX):
            raise job.refuse("data.source", "no task is named", "write reasoning_gym:NAME, such as chain_sum")
        if quick:
            return None
    else:
        _existing(job, "data.source", Path(data.source))
    return tuple(open_dataset(data).row(0).columns)


def _check_reward(job: LoadedJob, columns: tuple[str, ...] | None) -> None:
    """Load the operator's function in a process of its own."""
    if job.config.reward.function:
        from nereus.actors.reward import check_reward  # brings asyncio and more, which a quick dry run does not need

        check_reward(job.config.reward, job.config.data, columns=columns)


def _existing(job: LoadedJob, key: str, path: Path) -> Path:
    if not path.exists():
        raise job.refuse(key, f"{path} does not exist", f"relative paths start at the current directory, {Path.cwd()}")
    return path
