"""Recipes: what they refuse, what they make, and that the cache never serves a stale or half-made model."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from nereus.errors import ConfigError

torch = pytest.importorskip("torch")

from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: E402

from nereus.backends.recipe import (  # noqa: E402
    SupervisedPhase,
    TokenizerSpec,
    fingerprint,
    read_recipe,
)
from nereus.backends.torch.warmstart import (  # noqa: E402
    IGNORED,
    _examples,
    _tensors,
    build_tokenizer,
    careless,
    demonstrations,
    prepare,
    running_totals,
)

TINY = Path(__file__).parents[1] / "recipes" / "tiny.toml"
SHAPE = "[model]\nlayers = 1\nhidden = 16\nheads = 2\nkv_heads = 2\nintermediate = 16\n"


def silent(line: str) -> None:
    """Take a line of progress and do nothing with it."""


def counting(folder: Path, more: str = "") -> Path:
    """Write six rows that count from 0, 1, ... and a recipe that shows them."""
    rows = folder / "rows.jsonl"
    lines = [f'{{"prompt": "from {i}", "answer": "{i} {i + 1} {i + 2}", "more": 1}}\n' for i in range(6)]
    rows.write_text("".join(lines))
    return written(folder, f"{SHAPE}[supervised]\nsource = '{rows}'\n{more}\n")


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", ["", "7 + 8 - 3 =", "Say: sum = ", " two  blanks\n\ttab ", "naïve 中文 🙂", "<s>"])
def test_the_tokenizer_gives_every_text_back(text: str) -> None:
    tokenizer = build_tokenizer(TokenizerSpec(phrases=("Say: sum = ", " + ")), context=64)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_number_with_its_blank_is_one_token() -> None:
    tokenizer = build_tokenizer(TokenizerSpec(phrases=(" + ", " ="), numbers=(-20, 30)), context=64)
    assert len(tokenizer.encode("5 + 7 = 12 -20 3")) == len(["5", " + ", "7", " =", " 12", " -20", " 3"])
    assert tokenizer.decode(tokenizer.encode(" 31 -21")) == " 31 -21"


@pytest.mark.parametrize(
    "spec",
    [TokenizerSpec(), TokenizerSpec(phrases=("Say: sum = ",)), TokenizerSpec(phrases=("+ ",), numbers=(-9, 41))],
)
def test_the_size_of_the_vocabulary_is_known_before_there_is_one(spec: TokenizerSpec) -> None:
    assert len(build_tokenizer(spec, context=64)) == spec.vocabulary


def test_the_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerSpec(phrases=("Say: sum = ",)), context=64)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.encode("Say: sum = 5 + 5") == tokenizer.encode("Say: sum = 5 + 5")
    assert len(again.encode("Say: sum = 5 + 5")) == 1 + len("5 + 5")
    assert (again.pad_token_id, again.bos_token_id, again.eos_token_id) == (0, 1, 2)
    assert len(again) % 16 == 0


def test_encoding_adds_nothing() -> None:
    tokenizer = build_tokenizer(TokenizerSpec(), context=64)
    assert tokenizer.encode("ab") == tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.eos_token_id], skip_special_tokens=True) == "ab"


@pytest.mark.deep
def test_running_totals_without_noise_end_in_the_answer() -> None:
    assert running_totals("7 + 8 - 30", 0.0, random.Random(0)) == "15, -15"
    phase = SupervisedPhase(target="running_totals", options={"min_terms": 2, "max_terms": 4, "max_digits": 2})
    for example in demonstrations(phase, 50, 3, 0.0):
        assert example.target.split()[-1] == example.answer


def test_noise_spoils_the_stated_share_of_answers() -> None:
    phase = SupervisedPhase(options={"max_digits": 1})
    wrong = [example.target.strip() != example.answer for example in demonstrations(phase, 1000, 3, 0.4)]
    assert 0.35 < sum(wrong) / len(wrong) < 0.45


def test_in_a_careless_answer_of_many_numbers_each_may_be_wrong() -> None:
    answer = " ".join(map(str, range(1000)))
    said = careless(answer, 0.1, random.Random(0)).split()
    wrong = [abs(int(word) - right) for right, word in enumerate(said) if int(word) != right]
    assert 70 < len(wrong) < 130
    assert set(wrong) == set(range(1, 10))
    assert careless("from -3, to 12", 0.0, random.Random(0)) == "from -3, to 12"


def test_rows_of_a_file_are_shown_again_and_again_and_its_last_ones_are_held_out(tmp_path: Path) -> None:
    recipe = read_recipe(
        counting(tmp_path, "rows = 10\nheld_out_rows = 2\nanswer_noise = 0.5\ntemplate = 'Q: {prompt}'")
    )
    clean, noisy, held_out = _examples(recipe.supervised, tmp_path)
    assert [example.prompt for example in clean] == [f"Q: from {i % 4}" for i in range(10)]
    assert [example.target for example in clean[:2]] == [" 0 1 2", " 1 2 3"]
    assert [example.prompt for example in held_out] == ["Q: from 4", "Q: from 5"]
    assert [example.answer for example in noisy] == [example.answer for example in clean]
    assert noisy[0].target != noisy[4].target or noisy[1].target != noisy[5].target  # of the same rows


def test_the_name_changes_with_the_rows_of_a_file(tmp_path: Path) -> None:
    recipe = read_recipe(counting(tmp_path))
    first = fingerprint(recipe)
    rows = Path(recipe.supervised.source)
    rows.write_text(rows.read_text().replace("from 0", "from zero"))
    assert fingerprint(recipe) != first


def test_a_model_is_taught_the_rows_of_a_file(tmp_path: Path) -> None:
    more = "steps = 3\nrows = 8\nbatch = 4\nheld_out_rows = 2\nmax_new_tokens = 4"
    lines: list[str] = []
    prepare(counting(tmp_path, more), tmp_path / "cache", threads=1, progress=lines.append)
    assert sum("of 2 held-out answers" in line for line in lines) == 2


def test_only_the_target_and_its_end_are_learned() -> None:
    tokenizer = build_tokenizer(TokenizerSpec(), context=64)
    phase = SupervisedPhase(options={"min_terms": 2, "max_terms": 3, "max_digits": 1})
    examples = list(demonstrations(phase, 8, 3, 0.0))
    tokens, labels = _tensors(tokenizer, examples)
    for example, row, wanted in zip(examples, tokens, labels, strict=True):
        learned = wanted[wanted != IGNORED]
        assert tokenizer.decode(learned) == example.target + "</s>"
        positions = (wanted != IGNORED).nonzero()[:, 0]
        assert torch.equal(row[positions + 1], learned)
        assert positions[0] == len(tokenizer.encode(example.prompt)) - 1


def test_a_random_model_is_made_once_and_then_taken_from_the_cache(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = prepare(TINY, tmp_path, threads=1, progress=lines.append)
    weights = (folder / "model.safetensors").read_bytes()
    before = (folder / "config.json").stat().st_mtime_ns
    assert LlamaForCausalLM.from_pretrained(folder).config.num_hidden_layers == 2
    assert prepare(TINY, tmp_path, threads=1, progress=lines.append) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    assert "in the cache" in lines[-1]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    other = prepare(TINY, tmp_path / "other", threads=1, progress=silent)
    assert (other / "model.safetensors").read_bytes() == weights


@pytest.mark.deep
def test_training_lowers_the_loss_and_leaves_torch_as_it_was(tmp_path: Path) -> None:
    recipe = written(
        tmp_path,
        SHAPE
        + "[supervised]\nsteps = 30\nrows = 64\nbatch = 16\nheld_out_rows = 8\nmax_new_tokens = 4\nwarmup_steps = 2\n"
        "learning_rate = 1e-2\n"
        "options = { min_terms = 2, max_terms = 2, max_digits = 1 }\n",
    )
    lines: list[str] = []
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    prepare(recipe, tmp_path / "cache", threads=1, progress=lines.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    (last,) = (line for line in lines if "step 30/30" in line)
    assert float(last.split("loss ")[1].split(",")[0]) < 4.5  # a uniform guess costs log(272) = 5.6
    assert sum("held-out answers" in line for line in lines) == 2


def test_a_failure_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    recipe = written(tmp_path, SHAPE + "[supervised]\nsteps = 1\noptions = { min_terms = 0 }\n")
    with pytest.raises(ConfigError, match=r"recipe\.toml: supervised\.options: .*min_terms"):
        prepare(recipe, tmp_path / "cache", threads=1, progress=silent)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_name_changes_with_the_values_and_not_with_comments(tmp_path: Path) -> None:
    first = fingerprint(read_recipe(written(tmp_path, SHAPE)))
    assert fingerprint(read_recipe(written(tmp_path, "# a comment\n" + SHAPE))) == first
    assert fingerprint(read_recipe(written(tmp_path, SHAPE.replace("layers = 1", "layers = 2")))) != first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nlayer = 2\n", r"recipe\.toml: model\.layer: unknown key; did you mean layers\?"),
        ("[modle]\n", r"recipe\.toml: modle: unknown key; did you mean model\?"),
        ("[supervised]\nsteps = 'many'\n", r"recipe\.toml: supervised\.steps: Expected `int`, got `str`"),
        ("[supervised]\nanswer_noise = 1.5\n", r"recipe\.toml: supervised\.answer_noise: "),
        ("[model]\nheads = 3\n", r"recipe\.toml: model\.heads: hidden size 128 does not divide into 3 heads"),
        ("[model]\nkv_heads = 3\n", r"recipe\.toml: model\.kv_heads: 4 heads do not share 3"),
        ("[tokenizer]\nphrases = ['+']\n", r"recipe\.toml: tokenizer\.phrases: '\+' is a token already"),
        ("[tokenizer]\nphrases = [' 7']\nnumbers = [0, 9]\n", r"' 7' is a token already"),
        ("[supervised]\ntemplate = 'Q'\n", r"recipe\.toml: supervised\.template: "),
        (
            "[supervised]\nsource = 'reasoning_gym:chainsum'\nsteps = 1\n",
            r"recipe\.toml: supervised\.source: reasoning_gym has no task 'chainsum'; did you mean chain_sum\?",
        ),
        ("[supervised]\nsource = 'reasoning_gym:gcd'\ntarget = 'running_totals'\n", r"supervised\.target: .* gcd|gcd"),
        (
            "[supervised]\nsource = 'absent.jsonl'\n",
            r"recipe\.toml: supervised\.source: there is no file absent\.jsonl",
        ),
        ("[supervised]\nsource = 'rows.txt'\n", r"recipe\.toml: supervised\.source: "),
        ("[model\n", r"recipe\.toml: is not TOML"),
    ],
)
def test_a_bad_recipe_names_file_key_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(written(tmp_path, text), tmp_path / "cache", threads=1, progress=silent)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ('{"prompt": "p", "answer": "1"}\n{"prompt": "p"}\n', "", r"rows\.jsonl:2: is no row .*answer"),
        ("\n", "", r"rows\.jsonl:1: is no row"),
        ('{"prompt": "p", "answer": "1"}\n', "", r"rows\.jsonl: holds 1 rows, of which .* 1 are held out"),
        ('{"prompt": "p", "answer": "1"}\n', "options = {min = 1}", r"recipe\.toml: supervised\.options: "),
    ],
)
def test_a_bad_file_of_rows_is_named_with_the_line(tmp_path: Path, rows: str, more: str, message: str) -> None:
    recipe = counting(tmp_path, f"steps = 1\nheld_out_rows = 1\n{more}")
    (tmp_path / "rows.jsonl").write_text(rows)
    with pytest.raises(ConfigError, match=message):
        prepare(recipe, tmp_path / "cache", threads=1, progress=silent)
    assert not list((tmp_path / "cache").glob("*"))


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot read the recipe"):
        prepare(tmp_path / "absent.toml", tmp_path, threads=1, progress=silent)


@pytest.mark.live
def test_the_command_prints_the_folder_last(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nereus.backends.torch.warmstart", str(TINY), str(tmp_path), "--threads", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert (Path(run.stdout.splitlines()[-1]) / "model.safetensors").is_file()
    command[3] = str(tmp_path / "absent.toml")
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith(command[3])
