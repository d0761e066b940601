"""How does a job get a small model to start from when nobody has one at hand? It makes one, from a recipe.

Follows a recipe (``backends/recipe.py``): builds the model and the tokenizer, and trains the one in a short supervised
phase on a reasoning-gym task or on the rows of a JSONL file. Owns what is in the model cache. Invariants
(tests/backends/test_warmstart.py): a folder in the cache is complete, or is not there; the same recipe gives the same
weights on the same machine; the tokenizer gives every text back unchanged.

Run by hand: ``python -m nereus.backends.torch.warmstart RECIPE CACHE [--threads N]``.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import math
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from nereus.backends.recipe import (
    SPECIAL_TOKENS,
    LlamaSpec,
    Recipe,
    SupervisedPhase,
    TokenizerSpec,
    cached,
    read_recipe,
)
from nereus.errors import ConfigError

Progress = Callable[[str], None]

REPORT_EVERY_S = 3.0
NUMBER = re.compile(r"-?\d+")
IGNORED = -100
"""The label of positions that are not learned: prompts and padding."""


class Demonstration(Struct, frozen=True):
    """One supervised example: a prompt, what is shown to follow it (a blank first), and the true answer."""

    prompt: str
    target: str
    answer: str


class FileRow(Struct, frozen=True):
    """One line of a JSONL source; other columns are left alone."""

    prompt: str
    answer: str


def prepare(path: Path, cache: Path, *, threads: int, progress: Progress) -> Path:
    """Return the folder of the recipe's model, making it first if the cache does not hold it.

    The folder is in Hugging Face format (config.json, model.safetensors, tokenizer). ``threads`` is torch's thread
    count while training; the caller's is restored. Raises ``ConfigError`` for a recipe that cannot be followed.
    """
    recipe = read_recipe(path)
    folder = cached(recipe, path, cache)
    if folder.is_dir():
        progress(f"warm start: {folder} is in the cache")
        return folder
    if recipe.supervised.steps and not recipe.supervised.of_file:
        _check_task(recipe.supervised, path)
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=cache))
    try:
        with _torch_threads(threads):
            _make(recipe, path, partial, progress)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"warm start: model written to {folder}")
    return folder


def build_tokenizer(spec: TokenizerSpec, context: int) -> PreTrainedTokenizerFast:
    """Make the tokenizer: pad, bos, eos, 256 bytes, phrases and numbers, and spare tokens up to a multiple of 16.

    Nothing is added to a text when it is encoded, neither bos nor eos.
    """
    special = [*SPECIAL_TOKENS, *(f"<spare{i}>" for i in range(spec.spares))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate([*special, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in spec.words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left",
        model_max_length=context, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def demonstrations(phase: SupervisedPhase, rows: int, first_seed: int, noise: float) -> Iterator[Demonstration]:
    """Yield ``rows`` examples of the task; each number shown is wrong with probability ``noise``."""
    from reasoning_gym import create_dataset  # takes seconds to import, and a random model needs none of it

    errors = random.Random(first_seed)
    data = create_dataset(phase.source.removeprefix("reasoning_gym:"), size=rows, seed=first_seed, **phase.options)
    for i in range(rows):
        row = data[i]
        if phase.target == "running_totals":
            target = running_totals(row["metadata"]["expression"], noise, errors)
        else:
            target = careless(row["answer"], noise, errors)
        yield Demonstration(phase.template.replace("{prompt}", row["question"]), f" {target}", row["answer"])


def read_rows(path: Path) -> list[FileRow]:
    """Read a JSONL source; ``ConfigError`` names the file and the line."""
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the rows ({error})", where=str(path), remedy="check the recipe's supervised.source"
        ) from None
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(msgspec.json.decode(line, type=FileRow))
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"is no row ({error})", where=f"{path}:{number}", remedy='write {"prompt": TEXT, "answer": TEXT}'
            ) from None
    return rows


def shown(phase: SupervisedPhase, rows: Sequence[FileRow], noise: float) -> list[Demonstration]:
    """Return one example of each row; each number shown is wrong with probability ``noise``."""
    errors = random.Random(phase.seed)
    return [
        Demonstration(
            phase.template.replace("{prompt}", row.prompt), f" {careless(row.answer, noise, errors)}", row.answer
        )
        for row in rows
    ]


def careless(answer: str, noise: float, errors: random.Random) -> str:
    """Return ``answer``, in which each whole number is wrong with probability ``noise``."""
    return NUMBER.sub(lambda number: _slip(number[0], noise, errors), answer) if noise else answer


def running_totals(expression: str, noise: float, errors: random.Random) -> str:
    """Return the total after each further term: ``7 + 8 - 3`` gives ``15, 12``; an error is carried on to the end.

    With the comma a total is two tokens, as a term is: the term that comes next is always equally far back, which
    one attention head can learn in a few hundred steps.
    """
    total, *rest = expression.split()
    totals: list[str] = []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        exact = int(total) + int(term) if operator == "+" else int(total) - int(term)
        total = _slip(str(exact), noise, errors)
        totals.append(total)
    return ", ".join(totals) or total


def _slip(number: str, noise: float, errors: random.Random) -> str:
    """Return ``number``, or with probability ``noise`` one that is 1 to 9 too large or too small."""
    if errors.random() >= noise:
        return number
    return str(int(number) + errors.choice((-1, 1)) * errors.randint(1, 9))


def _make(recipe: Recipe, path: Path, folder: Path, progress: Progress) -> None:
    """Build, train, measure and save the recipe's model."""
    phase = recipe.supervised
    tokenizer = build_tokenizer(recipe.tokenizer, recipe.model.context)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(phase.seed)
        model = LlamaForCausalLM(_llama(recipe.model, tokenizer)).float()
        size = sum(parameter.numel() for parameter in model.parameters())
        progress(f"warm start: a Llama of {size / 1e6:.2f} million parameters from {path}")
        if phase.steps:
            clean, noisy, held_out = _examples(phase, path)
            _train(model, tokenizer, phase, clean, noisy, progress)
            for name, greedy in (("greedy", True), ("sampled at temperature 1", False)):
                accuracy = _accuracy(model, tokenizer, held_out, phase.max_new_tokens, greedy=greedy)
                progress(f"warm start: {accuracy:.0%} of {len(held_out)} held-out answers are right, {name}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _examples(phase: SupervisedPhase, path: Path) -> tuple[list[Demonstration], ...]:
    """Return the training rows without and with noise, and the held-out ones."""
    if phase.of_file:
        return _examples_of_file(phase)
    try:
        return (
            list(demonstrations(phase, phase.rows, phase.seed, 0.0)),
            list(demonstrations(phase, phase.rows, phase.seed, phase.answer_noise)),
            list(demonstrations(phase, phase.held_out_rows, phase.seed + phase.rows, 0.0)),
        )
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{phase.source} cannot be made: {error}",
            where=f"{path}: supervised.options",
            remedy="see the task's own configuration class in reasoning_gym",
        ) from error


def _examples_of_file(phase: SupervisedPhase) -> tuple[list[Demonstration], ...]:
    rows = read_rows(Path(phase.source))
    if len(rows) <= phase.held_out_rows:
        raise ConfigError(
            f"holds {len(rows)} rows, of which supervised.held_out_rows {phase.held_out_rows} are held out",
            where=phase.source, remedy="hold out fewer, or write more rows",
        )  # fmt: skip
    taught, held_out = rows[: -phase.held_out_rows], rows[-phase.held_out_rows :]
    repeated = list(itertools.islice(itertools.cycle(taught), phase.rows))
    return shown(phase, repeated, 0.0), shown(phase, repeated, phase.answer_noise), shown(phase, held_out, 0.0)


def _llama(shape: LlamaSpec, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context, tie_word_embeddings=shape.tie_embeddings, initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip


def _train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, phase: SupervisedPhase,
    clean: Sequence[Demonstration], noisy: Sequence[Demonstration], progress: Progress,
) -> None:  # fmt: skip
    """Take ``phase.steps`` AdamW steps on the targets' cross-entropy; warm-up, then cosine decay to a tenth."""
    tokens, labels = _tensors(tokenizer, [*clean, *noisy])
    first_noisy = 1 + int(phase.noise_after * phase.steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, phase))
    draws = torch.Generator().manual_seed(phase.seed)
    started = reported = time.monotonic()
    model.train()
    for step in range(1, phase.steps + 1):
        low, high = (0, len(clean)) if step < first_noisy else (len(clean), len(tokens))
        rows = torch.randint(low, high, (phase.batch,), generator=draws)
        # Causal attention never looks right, so padding on the right needs no mask.
        hidden = model.model(input_ids=tokens[rows], use_cache=False).last_hidden_state
        wanted = labels[rows]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted != IGNORED]), wanted[wanted != IGNORED])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        now = time.monotonic()
        if now - reported >= REPORT_EVERY_S or step == phase.steps:
            reported, left_s = now, (now - started) / step * (phase.steps - step)
            progress(f"warm start: step {step}/{phase.steps}, loss {loss.item():.3f}, {left_s:.0f} s left")
    model.eval()


def _rate(step: int, phase: SupervisedPhase) -> float:
    """Return the factor on the learning rate at ``step`` (from 0)."""
    if step < phase.warmup_steps:
        return (step + 1) / phase.warmup_steps
    done = (step - phase.warmup_steps) / max(1, phase.steps - phase.warmup_steps)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def _tensors(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[Demonstration]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels int64 [N, T]: a position's label is the token after it, if that is to be learned."""
    prompts = [tokenizer.encode(example.prompt) for example in examples]
    targets = [[*tokenizer.encode(example.target), tokenizer.eos_token_id] for example in examples]
    width = max(len(prompt) + len(target) for prompt, target in zip(prompts, targets, strict=True))
    tokens = torch.full((len(examples), width), tokenizer.pad_token_id)
    labels = torch.full((len(examples), width), IGNORED)
    for i, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
        tokens[i, : len(prompt) + len(target)] = torch.tensor([*prompt, *target])
        labels[i, len(prompt) - 1 : len(prompt) - 1 + len(target)] = torch.tensor(target)
    return tokens, labels


@torch.no_grad()
def _accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Demonstration],
    max_new_tokens: int, *, greedy: bool,
) -> float:  # fmt: skip
    """Return the share of examples whose completion ends in the true answer, all words of it."""
    inputs = tokenizer([example.prompt for example in examples], return_tensors="pt", padding=True)
    output = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id, **({"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}),
    )  # fmt: skip
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    wanted = [example.answer.split() for example in examples]
    right = [text.split()[-len(words) :] == words for text, words in zip(texts, wanted, strict=True)]
    return sum(right) / len(right)


class _torch_threads:
    """Run torch with this many threads, then with as many as before."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._threads)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


def _publish(partial: Path, folder: Path) -> None:
    """Give the finished folder its name in one step; one that another process made meanwhile is as good."""
    partial.chmod(0o755)
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _check_task(phase: SupervisedPhase, path: Path) -> None:
    from reasoning_gym.factory import DATASETS  # takes seconds to import

    name = phase.source.removeprefix("reasoning_gym:")
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        raise ConfigError(
            f"reasoning_gym has no task {name!r}", where=f"{path}: supervised.source",
            remedy=f"did you mean {near[0]}?" if near else "see reasoning_gym.factory.DATASETS",
        )  # fmt: skip


def main() -> int:
    """Make the model of one recipe, from the command line; the last line printed is its folder."""
    parser = argparse.ArgumentParser(prog="python -m nereus.backends.torch.warmstart", description=prepare.__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    disable_progress_bar()  # the caller shows our lines, not those of transformers
    try:
        folder = prepare(given.recipe, given.cache, threads=given.threads, progress=_say)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    _say(str(folder))
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
