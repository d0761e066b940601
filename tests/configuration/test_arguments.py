"""Are settings told apart from a command's own words?"""

from __future__ import annotations

import pytest

from nereus.configuration.arguments import complete_option, split_overrides
from nereus.errors import ConfigError


def test_all_forms() -> None:
    line = (
        "run a.toml --train.learning-rate 3e-4 --resume 5 --train.layout=d2 --no-track.tensorboard b.toml "
        "--track.report --train.recompute false --train.loss.entropy_coefficient -0.1"
    )
    rest, overrides = split_overrides(line.split())
    assert rest == ["run", "a.toml", "--resume", "5", "b.toml"]
    assert overrides == [
        ("train.learning-rate", "3e-4"),
        ("train.layout", "d2"),
        ("track.tensorboard", "false"),
        ("track.report", "true"),
        ("train.recompute", "false"),
        ("train.loss.entropy_coefficient", "-0.1"),
    ]


def test_a_setting_without_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--run\.steps has no value"):
        split_overrides(["--run.steps", "--dry-run"])


def test_an_unknown_setting_is_kept_for_the_loader_to_refuse() -> None:
    assert split_overrides(["--run.stepz"]) == ([], [("run.stepz", "")])


def test_words_after_the_delimiter_are_left_alone() -> None:
    assert split_overrides(["--", "--run.steps", "3"]) == (["--", "--run.steps", "3"], [])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--resume"], ["--resume=auto"]),
        (["--resume", "job.toml"], ["--resume=auto", "job.toml"]),
        (["--resume", "--dry-run"], ["--resume=auto", "--dry-run"]),
        (["--resume", "7"], ["--resume", "7"]),
        (["--resume=latest", "job.toml"], ["--resume=latest", "job.toml"]),
    ],
)
def test_an_option_may_lack_its_value(words: list[str], expected: list[str]) -> None:
    assert complete_option(words, "--resume", "auto") == expected
