"""Do PLAN files come back as they were written, and are damaged ones refused with their place?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nereus.cli import execute
from nereus.commands.planfile import PlanReport, read_plan
from nereus.errors import ConfigError

Damage = Callable[[dict[str, Any]], object]


def test_reading_gives_back_what_was_written(files: tuple[Path, Path], ppo32: PlanReport) -> None:
    assert read_plan(files[0], where="--from") == ppo32


def stranger(plan: dict[str, Any]) -> None:
    plan["plan"]["emus"][0]["slots"][0] = 4000


def twice(plan: dict[str, Any]) -> None:
    emus = [emu for emu in plan["plan"]["emus"] if emu["model_stage"] == {"stage": 0, "model": "policy"}]
    emus[0]["slots"] = emus[1]["slots"]


DAMAGES: list[tuple[Damage, str]] = [
    (lambda plan: plan.pop("plan"), "missing required field `plan`"),
    (lambda plan: plan.update(format="nereus-plan-9"), "$.format"),
    (lambda plan: plan.update(extra=1), "unknown field `extra`"),
    (lambda plan: plan["plan"].update(epoch="one"), "$.plan.epoch"),
    (lambda plan: plan["plan"]["emus"][0]["slots"].append(1), "needs 4 distinct slots"),
    (lambda plan: plan["basis"]["shapes"].clear(), "no sizes of the policy"),
    (lambda plan: plan["plan"]["emus"].pop(0), "candidates are not those of its plan"),
    (stranger, "slot 4000 is not in the cluster"),
    (twice, "belongs to two units"),
]


@pytest.mark.parametrize(("damage", "part"), DAMAGES, ids=[part for _, part in DAMAGES])
def test_a_damaged_file_is_refused(damage: Damage, part: str, files: tuple[Path, Path], tmp_path: Path) -> None:
    plan = json.loads(files[0].read_text())
    damage(plan)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(plan))
    with pytest.raises(ConfigError) as caught:
        read_plan(path, where="--from")
    assert part in str(caught.value) and str(path) in str(caught.value) and caught.value.where == "--from"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b"{}"])
def test_what_is_no_plan_is_one_line(
    content: bytes, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nonsense.json"
    path.write_bytes(content)
    assert execute(["plan", "--from", str(path), "--to", str(files[0])]) == 2
    text, errors = capsys.readouterr()
    assert text == "" and errors.count("\n") == 1 and "is no plan" in errors
