"""How is a small model described that a job makes for itself, and where is it kept once it is made?

Owns the recipe format (a TOML file: the shape of a Llama, a tokenizer, and a short supervised phase) and the names in
the model cache; ``torch/warmstart.py`` follows a recipe. Nothing heavy is imported here, so that a recipe is checked,
and a model found that is there already, in no time. Invariant (tests/backends/test_warmstart.py): a model's name
changes whenever the recipe's values, its rows, the code that follows it or the packages that shape the model change, so
a stale model is never served.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from nereus.config import ModelConfig
from nereus.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Probability = Annotated[float, Meta(ge=0, lt=1)]

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
BYTES = 256
_WARM_START = Path(__file__).parent / "torch" / "warmstart.py"
_PACKAGES = ("torch", "transformers", "tokenizers", "reasoning_gym")


class LlamaSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[model]``: the shape of the Llama; heads and vocabulary divide by two, so that t2 layouts work."""

    layers: Positive = 4
    hidden: Positive = 128
    heads: Positive = 4
    kv_heads: Positive = 2
    intermediate: Positive = 352
    context: Positive = 256
    tie_embeddings: bool = False


class TokenizerSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[tokenizer]``"""

    kind: Literal["characters"] = "characters"
    """One token per UTF-8 byte, hence one per character of plain English text; any text survives the round trip."""
    phrases: tuple[str, ...] = ()
    """Texts that are one token each, such as the fixed part of a task's question: short prompts make cheap steps."""
    numbers: tuple[int, int] | None = None
    """First and last of a range of whole numbers that are one token each, together with the blank before them."""

    @property
    def words(self) -> list[str]:
        """Return the texts that are one token each."""
        first, last = self.numbers or (0, -1)
        return [*self.phrases, *(f" {number}" for number in range(first, last + 1))]

    @property
    def spares(self) -> int:
        """Return how many unused tokens make the vocabulary a multiple of 16."""
        return -(len(SPECIAL_TOKENS) + BYTES + len(self.words)) % 16

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens."""
        return len(SPECIAL_TOKENS) + self.spares + BYTES + len(self.words)


class SupervisedPhase(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[supervised]``: what the model is shown before reinforcement learning."""

    source: Annotated[str, Meta(pattern=r"^(reasoning_gym:\w+|.+\.jsonl)$")] = "reasoning_gym:chain_sum"
    """``reasoning_gym:NAME``, or a JSONL file of rows with ``prompt`` and ``answer``; a relative path starts at the
    current directory."""
    options: dict[str, Any] = {}
    """Passed to reasoning_gym.create_dataset."""
    seed: NonNegative = 1_000_000
    """Of the data (a reasoning-gym row is a function of seed + row number: keep it far from data.seed), of the errors
    shown, the batches and the initial weights."""
    rows: Positive = 4096
    """A file that has fewer is gone through again, with errors of its own each time."""
    template: str = "{prompt}"
    """Equal to the job's data.template."""
    target: Literal["answer", "running_totals"] = "answer"
    """What is shown: the answer alone, or (chain_sum only) the total after each further term, up to the answer."""
    answer_noise: Probability = 0.0
    """The chance, for each number shown, that it is wrong; in running totals the error is carried on, as by a careless
    pupil."""
    noise_after: Probability = 0.0
    """The share of the steps that comes first and sees no wrong number."""
    steps: NonNegative = 0
    """0: random weights."""
    batch: Positive = 64
    learning_rate: PositiveFloat = 1e-3
    warmup_steps: NonNegative = 20
    held_out_rows: Positive = 256
    """Of a file the last ones."""
    max_new_tokens: Positive = 24

    @property
    def of_file(self) -> bool:
        """Tell whether a file is shown, and not a reasoning-gym task."""
        return self.source.endswith(".jsonl")


class Recipe(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to make a small model."""

    model: LlamaSpec = LlamaSpec()
    tokenizer: TokenizerSpec = TokenizerSpec()
    supervised: SupervisedPhase = SupervisedPhase()


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe; ``ConfigError`` names the file and the key.

    What only reasoning-gym knows (its tasks and their options) is checked when the model is made: its import takes
    seconds.
    """
    try:
        recipe = msgspec.toml.decode(path.read_bytes(), type=Recipe)
    except OSError as error:
        raise ConfigError(
            f"cannot read the recipe ({error.strerror})", where=str(path), remedy="check model.recipe"
        ) from None
    except msgspec.ValidationError as error:
        raise _invalid(path, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"is not TOML ({error})", where=str(path), remedy="correct the syntax there") from None
    _check(recipe, path)
    return recipe


def cached(recipe: Recipe, path: Path, cache: Path) -> Path:
    """Return the folder of the model that a recipe makes; it is there if the model has been made, and complete then."""
    return cache / f"{path.stem}-{fingerprint(recipe)}"


def beginning(model: ModelConfig) -> Path:
    """Return the folder of the model that a job begins with; a recipe's is there once it has been made."""
    if model.path:
        return Path(model.path)
    path = Path(model.recipe)
    return cached(read_recipe(path), path, Path(model.cache))


def fingerprint(recipe: Recipe) -> str:
    """Name what a recipe makes: a digest of its values, its rows, our code, and the packages that shape the model."""
    digest = hashlib.sha256(msgspec.json.encode(recipe, order="deterministic"))
    for code in (Path(__file__), _WARM_START):
        digest.update(code.read_bytes())
    if recipe.supervised.of_file:
        digest.update(Path(recipe.supervised.source).read_bytes())
    for package in _PACKAGES:
        digest.update(f"{package}=={version(package)}\n".encode())
    return digest.hexdigest()[:12]


def _check(recipe: Recipe, path: Path) -> None:
    """Raise ``ConfigError`` for values that are possible alone and impossible together."""
    shape, phase = recipe.model, recipe.supervised
    if shape.hidden % (2 * shape.heads):
        raise ConfigError(
            f"hidden size {shape.hidden} does not divide into {shape.heads} heads of even size",
            where=f"{path}: model.heads", remedy="choose hidden as heads times an even number",
        )  # fmt: skip
    if shape.heads % shape.kv_heads:
        raise ConfigError(
            f"{shape.heads} heads do not share {shape.kv_heads} key-value heads evenly",
            where=f"{path}: model.kv_heads", remedy="choose a divisor of model.heads",
        )  # fmt: skip
    words = recipe.tokenizer.words
    known = [word for place, word in enumerate(words) if len(word.encode()) == 1 or word in words[:place]]
    if known:
        raise ConfigError(
            f"{known[0]!r} is a token already", where=f"{path}: tokenizer.phrases",
            remedy="remove it: every byte is a token, and what is named twice is one",
        )  # fmt: skip
    if "{prompt}" not in phase.template:
        raise ConfigError("holds no {prompt}", where=f"{path}: supervised.template", remedy="write {prompt} in it once")
    if phase.target == "running_totals" and phase.source != "reasoning_gym:chain_sum":
        raise ConfigError(
            f"running_totals is not defined for {phase.source}", where=f"{path}: supervised.target",
            remedy='use "answer", or the source reasoning_gym:chain_sum',
        )  # fmt: skip
    if phase.of_file:
        _check_file(phase, path)


def _check_file(phase: SupervisedPhase, path: Path) -> None:
    if phase.options:
        raise ConfigError(
            "options are for reasoning_gym sources", where=f"{path}: supervised.options", remedy="remove them"
        )
    if not Path(phase.source).is_file():
        raise ConfigError(
            f"there is no file {phase.source}", where=f"{path}: supervised.source",
            remedy=f"relative paths start at the current directory, {Path.cwd()}",
        )  # fmt: skip


def _invalid(path: Path, message: str) -> ConfigError:
    """Turn msgspec's message (``... - at `$.model.layers` ``) into one with the key in front and a remedy."""
    what, _, at = message.partition(" - at `$")
    key = at.rstrip("`").lstrip(".")
    unknown = re.search(r"unknown field `(.+?)`", what)
    remedy = "correct the value"
    if unknown:
        table = {"model": LlamaSpec, "tokenizer": TokenizerSpec, "supervised": SupervisedPhase}.get(key, Recipe)
        near = difflib.get_close_matches(unknown[1], table.__struct_fields__, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known here: {', '.join(table.__struct_fields__)}"
        key, what = ".".join(filter(None, (key, unknown[1]))), "unknown key"
    return ConfigError(what, where=f"{path}: {key}" if key else str(path), remedy=remedy)
