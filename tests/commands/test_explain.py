"""Does the story of a run tell every loss, re-issue, checkpoint, drain and end, once and in order?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.bus.messages import GroupRef
from nereus.cli import execute
from nereus.commands.explain import NO_CHANGE, explain, render_story
from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, Emu, Layout, Plan
from nereus.runtime import journal as record
from nereus.runtime.journal import Journal

PLAN = Plan(0, (Emu(POLICY_GENERATION, 0, Layout(), (1,)), Emu(POLICY_TRAINING, 0, Layout(), (0,))))
BEGIN = (
    record.RunStarted(run="r", attempt=1, config="c", data="d", seed=7, wall=0.0),
    record.PlanCommitted(plan=PLAN, why="start"),
)


def trained(step: int) -> record.Trained:
    return record.Trained(step=step, version=step, groups=(GroupRef(group=step, attempt=1),), samples=4)


def gone(worker: str, why: str, *, expected: bool = False) -> record.WorkerGone:
    return record.WorkerGone(worker=worker, incarnation=f"{worker}.1", why=why, expected=expected)


def story(folder: Path, *records: record.Record) -> list[str]:
    path = folder / "journal.jsonl"
    path.unlink(missing_ok=True)
    journal = Journal(path, clock=iter(range(100_000)).__next__)
    for one in records:
        journal.append(one)
    journal.close()
    return [told.says for told in explain(folder)]


def test_a_run_with_a_loss_is_told_in_order(tmp_path: Path) -> None:
    says = story(
        tmp_path,
        *BEGIN,
        record.WorkerJoined(worker="slot-1", incarnation="slot-1.1"),
        trained(0),
        trained(1),
        gone("slot-1", "killed by SIGKILL"),
        record.Reissued(group=2, attempt=2, reason="slot-1 lost"),
        record.Reissued(group=3, attempt=2, reason="slot-1 lost"),
        record.WorkerJoined(worker="slot-1", incarnation="slot-1.2"),
        trained(2),
        record.Dropped(group=3, attempt=2, reason="too old"),
        record.CheckpointBegun(step=3, folder="step_3.tmp"),
        record.CheckpointCommitted(step=3, version=3, cursor=4, folder="step_3"),
        record.Drain(reason="SIGTERM"),
        record.RunEnded(reason="drained", ok=True),
    )
    parts = (
        "Attempt 1 of r began (seed 7)",
        "Plan epoch 0 was taken, because the job's train.layout",
        "Steps 0 to 1 were trained on 2 groups",
        "slot-1 (policy.generation) was lost: killed by SIGKILL",
        "2 groups (2, 3) will be generated again: slot-1 lost",
        "slot-1 was replaced (incarnation slot-1.2) after it was lost: killed by SIGKILL",
        "Step 2 was trained on 1 groups",
        "Group 3 was given up in attempt 2 and will not be trained: too old",
        "checkpoint of step 3 (version 3, 4 groups) is complete",
        "asked to end early (SIGTERM)",
        "The run ended well: drained",
        NO_CHANGE,
    )
    assert len(says) == len(parts)
    for said, part in zip(says, parts, strict=True):
        assert part in said
    assert "policy.training d1t1p1 on slot 0" in says[1]


def test_a_killed_run_and_its_resumption_are_told(tmp_path: Path) -> None:
    second = record.RunStarted(run="r", attempt=2, config="c", data="d", seed=7, wall=0.0, step=3, version=3, cursor=12)
    begun = record.CheckpointBegun(step=6, folder="step_6.tmp")
    says = "\n".join(story(tmp_path, *BEGIN, begun, second, record.PlanCommitted(plan=PLAN, why="start")))
    assert "did not end in good order" in says
    assert "went on from the checkpoint of step 3 (version 3, 12 groups)" in says
    assert "step 6 was begun and never completed" in says
    assert "The journal ends here" in says and NO_CHANGE not in says


def test_a_supervisor_that_was_replaced_is_told(tmp_path: Path) -> None:
    second = record.RunStarted(run="r", attempt=2, config="c", data="d", seed=7, wall=0.0, step=3, version=3, cursor=12)
    readopted = record.Readopted(
        attempt=2, epoch=0, step=3, workers=("slot-0", "weights-0"), lost=("slot-1",), completed=True
    )
    begun = record.StepBegun(step=2, version=2, groups=())
    says = "\n".join(story(tmp_path, *BEGIN, begun, second, readopted))
    assert "did not end in good order. Attempt 2 took the run over before step 3." in says
    assert "went on with the workers of the attempt before (slot-0, weights-0)" in says
    assert "had made step 2 when their supervisor died; it counts. Lost with the supervisor: slot-1." in says
    assert "void and is trained again" not in says


def test_losses_that_end_a_run_say_so(tmp_path: Path) -> None:
    says = story(tmp_path, *BEGIN, gone("slot-0", "hung"), record.RunEnded(reason="slot-0 is lost", ok=False))
    assert "slot-0 (policy.training) was lost: hung." in says
    assert "The run ended in failure: slot-0 is lost." in says
    says = story(tmp_path, *BEGIN, gone("slot-1", "the end", expected=True))
    assert "slot-1 left, as it was asked to (the end)." in says


EVENTS = st.lists(
    st.one_of(
        st.just("step"),
        st.sampled_from(["lost slot-1", "lost reward-0", "lost slot-0"]),
        st.sampled_from(["reissue a", "reissue b"]),
        st.sampled_from(["checkpoint", "drain", "dropped"]),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(events=EVENTS)
def test_everything_is_told_once(events: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    records, steps = list[record.Record](BEGIN), 0
    for number, event in enumerate(events):
        match event.split():
            case ["step"]:
                records.append(trained(steps))
                steps += 1
            case ["lost", worker]:
                records.append(gone(worker, f"reason {number}."))
            case ["reissue", reason]:
                records.append(record.Reissued(group=number, attempt=2, reason=reason))
            case ["checkpoint"]:
                records.append(record.CheckpointCommitted(step=number, version=0, cursor=0, folder=f"folder-{number}."))
            case ["drain"]:
                records.append(record.Drain(reason=f"drain {number}."))
            case ["dropped"]:
                records.append(record.Dropped(group=number, attempt=1, reason=f"drop {number}."))
    text = "\n".join(story(tmp_path_factory.mktemp("run"), *records))
    assert sum(int(words.split()[0]) for words in text.split("trained on ")[1:]) == steps
    again = [line for line in text.splitlines() if "will be generated again" in line]
    assert sum(int(line.split()[0]) for line in again) == sum(event.startswith("reissue") for event in events)
    for number, event in enumerate(events):
        mark = {"lost": f"reason {number}.", "drain": f"drain {number}.", "dropped": f"drop {number}."}
        if event == "checkpoint":
            assert text.count(f"folder-{number}.") == 1
        elif event.split()[0] in mark:
            assert text.count(mark[event.split()[0]]) == 1


def test_the_command_prints_lines_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story(tmp_path, *BEGIN, trained(0))
    assert execute(["explain", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text == render_story(explain(tmp_path)) and "+1 s  Attempt 1" in text
    assert execute(["explain", str(tmp_path / "journal.jsonl"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["says"] for one in told] == [one.says for one in explain(tmp_path)]
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"seq":')
    assert "unfinished record" in explain(tmp_path)[-1].says


@pytest.mark.parametrize("content", [None, b"garbage\n", b'{"seq":5,"t":0,"record":{"kind":"drain","reason":""}}\n'])
def test_what_is_no_run_is_one_line(content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "journal.jsonl").write_bytes(content)
    assert execute(["explain", str(tmp_path)]) == 2
    text, errors = capsys.readouterr()
    assert text == "" and errors.count("\n") == 1 and str(tmp_path) in errors


def test_plan_changes_are_told_with_their_reason_and_their_price(tmp_path: Path) -> None:
    target = Plan(1, (Emu(POLICY_GENERATION, 0, Layout(), (1,)), Emu(POLICY_TRAINING, 1, Layout(2), (0, 2))))
    says = story(
        tmp_path,
        *BEGIN,
        trained(0),
        record.TransitionBegun(plan=target, primitives=("a", "b"), why="adapt.at asks for it after step 1"),
        record.PlanCommitted(plan=target, why="transition"),
        record.TransitionEnded(epoch=1, ok=True, seconds=0.25, moved_bytes=2_000_000),
        trained(1),
        record.TransitionBegun(plan=target, primitives=("c",), why="adapt.at asks for it after step 2"),
        record.TransitionEnded(epoch=2, ok=False, reason="slot-1 refused: damaged"),
        record.RunEnded(reason="done", ok=True),
    )
    assert "change to plan epoch 1 began (2 primitives), because adapt.at asks for it after step 1" in says[3]
    assert says[3].endswith(": policy.training d1t1p1 → d1t2p1 on slot 0+2.")  # what generates stays as it is
    assert says[4].startswith("Plan epoch 1 is in force after 0.25 s; 2.0 MB of state went between slots")
    assert "(1 primitive)" in says[6]
    assert says[7] == "The change to plan epoch 2 was given up, and the plan before it stays: slot-1 refused: damaged."
    assert NO_CHANGE not in says


def test_steps_before_and_after_a_change_are_compared(tmp_path: Path) -> None:
    target = Plan(1, (Emu(POLICY_GENERATION, 1, Layout(), (2,)), Emu(POLICY_TRAINING, 0, Layout(), (0,))))
    says = story(
        tmp_path,
        *BEGIN,
        record.VersionReady(version=0, checksum=""),
        *map(trained, range(3)),
        record.TransitionBegun(plan=target, primitives=("a",), why="slot 1 is taken away"),
        record.PlanCommitted(plan=target, why="transition"),
        record.TransitionEnded(epoch=1, ok=True, seconds=2.0),
        record.VersionReady(version=3, checksum=""),
        trained(3),
    )
    assert "because slot 1 is taken away: policy.generation stays d1t1p1 on slot 2." in says[3]
    assert says[4].endswith("A step took 1 s before and takes 3 s since.")


def test_decisions_and_comparisons_are_told_with_their_numbers(tmp_path: Path) -> None:
    offer = {"latency_now_s": 2.0, "latency_new_s": 1.5, "transition_s": 3.0, "peak_bytes": 5e9, "payback_steps": 6.0}
    urgent = {**offer, "latency_now_s": None, "payback_steps": None}
    decided = [
        record.Decided(decision="trigger", because="length/mean rose by 40 %", numbers={"horizon_steps": 32.0}),
        record.Decided(decision="stay", because="pays back in 6 steps; only 4 are allowed", numbers=offer),
        record.Decided(decision="stay", because="no plan on offer was admitted"),
        record.Decided(decision="opportunistic", because="saves 0.5 s a step", numbers=offer),
        record.Decided(decision="urgent", because="slots 3 were lost", numbers=urgent),
        record.Decided(decision="widen", because="nothing fits"),
        record.Decided(decision="odd", because="nobody knows"),
        record.Compared(epoch=1, what="transition", predicted_s=3.0, measured_s=3.6),
        record.Compared(epoch=1, what="step", predicted_s=1.5, measured_s=1.5),
    ]
    says = story(tmp_path, *BEGIN, *decided)
    predicted = "Predicted: a step of 1.5 s instead of 2 s now, after a change of 3 s; the fullest slot holds 5.0 GB."
    assert says[2:-1] == [
        "Another plan may be called for: length/mean rose by 40 %. The next such event is expected in about 32 steps.",
        f"A plan on offer was refused: pays back in 6 steps; only 4 are allowed. {predicted}",
        "The plan stays: no plan on offer was admitted.",
        f"A better plan was found and is taken: saves 0.5 s a step. {predicted}",
        "Another plan is needed and was found: slots 3 were lost. "
        + predicted.replace("2 s now", "one that the current plan cannot do"),
        "No plan fits yet, and the search is widened: nothing fits.",
        "Odd: nobody knows.",
        "The change to plan epoch 1 took 3.6 s, 20% more; predicted were 3 s.",
        "A step under plan epoch 1 took 1.5 s; predicted were 1.5 s.",
    ]
    assert NO_CHANGE not in says
