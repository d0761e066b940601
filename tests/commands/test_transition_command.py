"""Does ``nereus plan --from --to`` show one graph in every form, priced, and nothing where nothing changes?"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from nereus.cli import execute
from nereus.commands.planfile import PlanReport, to_json
from nereus.commands.transition import transition


def test_a_plan_becomes_itself_for_nothing(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["plan", "--from", str(files[0]), "--to", str(files[0])]) == 0
    text = capsys.readouterr().out
    assert "nothing to do" in text and "price: 0 s, 0.00 GiB" in text
    assert execute(["plan", "--from", str(files[0]), "--to", str(files[0]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["seconds"], found["bytes"], found["primitives"]) == (0.0, 0, [])


@pytest.mark.parametrize("back", [False, True])
def test_table_diagrams_and_json_show_the_same_graph(
    back: bool, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = files[::-1] if back else files
    words = ["plan", "--from", str(source), "--to", str(target)]
    shown = {}
    for form in ("table", "mermaid", "dot"):
        assert execute([*words, "--diagram", form]) == 0
        shown[form] = capsys.readouterr().out
    assert execute([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] > 0 and found["bytes"] > 0 and not found["stuck"]
    for primitive in found["primitives"]:
        for text in shown.values():
            assert primitive["id"] in text
    edges = sum(len(one["after"]) + len(one["waits_for_room_from"]) for one in found["primitives"])
    assert shown["dot"].count(" -> ") == edges
    assert shown["mermaid"].startswith("flowchart") and shown["dot"].startswith("digraph")
    seen: set[str] = set()
    for primitive in found["primitives"]:
        assert seen >= {*primitive["after"], *primitive["waits_for_room_from"]}
        seen.add(primitive["id"])


def test_the_way_leads_to_the_target_within_memory(ppo32: PlanReport, ppo64: PlanReport) -> None:
    pricing, found = transition(ppo32, ppo64)
    assert found.dag is not None and found.dag.target.emus == ppo64.plan.emus
    assert found.peak_bytes <= ppo64.memory.usable_bytes
    assert pricing.cluster.size == 64


def test_plans_that_cannot_be_compared_are_refused(
    files: tuple[Path, Path], ppo32: PlanReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = msgspec.structs.replace(ppo32.basis.shapes["policy"], layers=16)
    device = msgspec.structs.replace(ppo32.basis.cluster.device, name="other")
    cluster = msgspec.structs.replace(ppo32.basis.cluster, device=device)
    for changes, part in (({"shapes": {"policy": shape}}, "different models"), ({"cluster": cluster}, "clusters")):
        other = tmp_path / "other.json"
        basis = msgspec.structs.replace(ppo32.basis, **changes)
        other.write_bytes(to_json(msgspec.structs.replace(ppo32, basis=basis)))
        assert execute(["plan", "--from", str(files[0]), "--to", str(other)]) == 2
        assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--from", "FILE"], "--to is missing"),
        (["--to", "FILE"], "--from is missing"),
        (["--from", "/nowhere.json", "--to", "FILE"], "/nowhere.json cannot be read"),
        (["--from", "FILE", "--to", "FILE", "--diagram", "svg"], "table, mermaid, dot"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], part: str, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["plan", *(str(files[0]) if word == "FILE" else word for word in words)]) == 2
    text, errors = capsys.readouterr()
    assert text == "" and errors.count("\n") == 1 and part in errors
