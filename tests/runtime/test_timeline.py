"""Does the timeline say which unit was where, and what each plan change did?"""

from __future__ import annotations

import itertools
import math
import random

import pytest
from stories import Story

from nereus.core.plan import POLICY_GENERATION, POLICY_TRAINING, POLICY_WEIGHTS, Emu, Layout, ModelStage, Plan, Stage
from nereus.runtime import journal as record
from nereus.runtime.timeline import Timeline, layouts, stage_name, summarized, timeline


def test_layouts_are_told_training_first_and_without_what_uses_no_device() -> None:
    critic = ModelStage(Stage.TRAINING, "critic")
    plan = Plan(
        3,
        (
            Emu(POLICY_GENERATION, 0, Layout(), (4,)),
            Emu(POLICY_GENERATION, 1, Layout(), (5,)),
            Emu(critic, 0, Layout(1, 2), (2, 3)),
            Emu(POLICY_TRAINING, 0, Layout(2), (0, 1)),
            Emu(POLICY_WEIGHTS, 0, Layout(), (4000,)),
        ),
    )
    assert list(layouts(plan)) == [POLICY_TRAINING, POLICY_GENERATION, critic]
    assert summarized(plan) == "train d1t2p1 · generate d2t1p1 · critic train d1t1p2"
    assert stage_name(ModelStage(Stage.INFERENCE, "reference")) == "reference infer"


def test_units_are_where_the_plans_put_them_and_starting_until_they_have_weights() -> None:
    line = timeline(Story().starts("d1t2p1", "d1t1p1", range(3)).trains(1.0, 1.0).entries)
    told = [(span.slot, span.emu.id, span.state, span.begin_s, span.end_s) for span in line.spans]
    assert told == [
        (0, "policy.training/0", "starting", 1.0, 10.0),
        (1, "policy.training/0", "starting", 1.0, 10.0),
        (2, "policy.generation/0", "starting", 1.0, 10.5),
        (0, "policy.training/0", "working", 10.0, 12.5),
        (1, "policy.training/0", "working", 10.0, 12.5),
        (2, "policy.generation/0", "working", 10.5, 12.5),
    ]
    assert line.slots == (0, 1, 2) and line.end_s == 12.5 and not line.changes
    assert [(step.step, step.seconds) for step in line.steps] == [(1, 1.5), (2, 1.0)]


def test_a_change_compares_the_steps_around_it_without_its_own_seconds() -> None:
    story = Story().starts("d2t1p1", "d1t1p1", range(3)).trains(5.0, 1.0, 1.0, 1.2)
    story.changes("d1t1p1", "d1t1p1", range(3), 3.0, why="a trigger").trains(2.0, 2.0, 2.2)
    story.after(0, record.Compared(epoch=1, what="transition", predicted_s=2.5, measured_s=3.0))
    story.after(0, record.Compared(epoch=1, what="step", predicted_s=1.9, measured_s=2.0))
    (change,) = timeline(story.entries).changes
    assert (change.step, change.ok, change.why, change.seconds) == (4, True, "a trigger", 3.0)
    assert (change.before.epoch, change.after.epoch, change.moved_bytes) == (0, 1, 3_000_000)
    assert (change.predicted_s, change.step_predicted_s) == (2.5, 1.9)
    assert change.step_before_s == pytest.approx(1.1)  # the median of 5.5, 1, 1, 1.2
    assert change.step_after_s == pytest.approx(2.0)
    assert change.touched == {1} and len(change.primitives) == 3


def test_what_a_change_does_not_touch_goes_on_through_it() -> None:
    story = Story().starts("d2t1p1", "d1t1p1", range(3)).trains(1.0)
    story.changes("d1t2p1", "d1t1p1", range(3), 3.0).trains(1.0)
    line = timeline(story.entries)
    assert [span.state for span in line.spans if span.slot == 2] == ["starting", "working"]
    assert [span.state for span in line.spans if span.slot == 0] == ["starting", "working", "moving", "working"]


def test_a_change_that_was_given_up_leaves_the_plan() -> None:
    story = Story().starts("d2t1p1", "d1t1p1", range(3)).trains(1.0)
    story.changes("d1t2p1", "d1t1p1", range(3), 3.0, failure="slot-1 refused").trains(1.0)
    line = timeline(story.entries)
    (change,) = line.changes
    assert not change.ok and change.reason == "slot-1 refused" and math.isnan(change.step_after_s)
    assert [era.plan.epoch for era in line.eras] == [0]
    assert [span.state for span in line.spans if span.slot == 0] == ["starting", "working", "moving", "working"]
    assert line.steps[-1].seconds == pytest.approx(1.0)


def test_a_loss_ends_the_unit_on_its_slot_until_another_joins() -> None:
    story = Story().starts("d1t1p1", "d2t1p1", range(3)).trains(1.0)
    story.loses("slot-2").loses("slot-2", "what is left of it").loses("reward-0").trains(1.0)
    story.after(0, record.WorkerGone(worker="slot-1", incarnation="x", why="asked to", expected=True))
    story.after(1, record.WorkerJoined(worker="slot-2", incarnation="y"))
    story.after(1, record.WeightsLive(worker="slot-2", version=1, checksum="")).trains(1.0)
    line = timeline(story.entries)
    assert [(loss.worker, loss.slot) for loss in line.losses] == [("slot-2", 2), ("reward-0", None)]
    own = [(span.state, span.begin_s, span.end_s) for span in line.spans if span.slot == 2]
    assert own[1:] == [("working", 10.5, 11.5), ("starting", 13.5, 14.5), ("working", 14.5, 15.5)]
    assert [span.end_s for span in line.spans if span.slot == 1][-1] == 12.5


def test_an_attempt_that_ends_in_a_change_says_so() -> None:
    story = Story().starts("d2t1p1", "d1t1p1", range(3)).trains(1.0)
    target = story.next("d1t2p1", "d1t1p1", range(3))
    story.after(0, record.TransitionBegun(plan=target, primitives=("x",), why="asked for")).after(2)
    story.loses("slot-0").starts("d1t1p1", "d2t1p1", range(3), attempt=2).trains(1.0)
    line = timeline(story.entries)
    (change,) = line.changes
    assert (change.ok, change.seconds) == (False, 2.0) and "attempt ended" in change.reason
    assert len(line.attempts) == 2
    assert [(era.attempt, era.plan.epoch) for era in line.eras] == [(1, 0), (2, 0)]


def test_a_plan_that_only_gives_slots_up_is_a_change_too() -> None:
    story = Story().starts("d1t1p1", "d2t1p1", range(3)).trains(1.0).loses("slot-2")
    story.after(0.5, record.PlanCommitted(plan=story.next("d1t1p1", "d1t1p1", range(2)), why="slot 2 was lost"))
    (change,) = timeline(story.entries).changes
    assert (change.ok, change.why, change.seconds, change.primitives) == (True, "slot 2 was lost", 0.0, ())
    assert change.touched == {2}


def test_an_empty_journal_is_an_empty_timeline() -> None:
    assert timeline(()) == Timeline()


@pytest.mark.parametrize("seed", range(40))
def test_spans_and_eras_never_overlap(seed: int) -> None:
    draw = random.Random(seed)
    story, begun = Story(), 0
    slots = range(6)
    for attempt in range(1, draw.randint(2, 4)):
        story.starts("d2t1p1", "d2t1p1", slots, attempt=attempt)
        for _ in range(draw.randint(0, 12)):
            train, rollout = draw.choice(["d1t1p1", "d2t1p1", "d1t2p1", "d2t2p1"]), draw.choice(["d1t1p1", "d2t1p1"])
            match draw.choice(["train", "change", "fail", "break", "lose", "join", "live", "take"]):
                case "train":
                    story.trains(draw.random())
                case "change":
                    story.changes(train, rollout, slots, draw.random())
                    begun += 1
                case "fail":
                    story.changes(train, rollout, slots, draw.random(), failure="broken")
                    begun += 1
                case "break":
                    plan = story.next(train, rollout, slots)
                    story.after(draw.random(), record.TransitionBegun(plan=plan, primitives=(), why="asked for"))
                    begun += 1
                case "lose":
                    story.loses(f"slot-{draw.choice(slots)}").after(draw.random())
                case "join":
                    story.after(draw.random(), record.WorkerJoined(worker=f"slot-{draw.choice(slots)}", incarnation=""))
                case "live":
                    story.lives()
    line = timeline(story.entries)
    for slot in line.slots:
        own = sorted((span.begin_s, span.end_s) for span in line.spans if span.slot == slot)
        assert all(begin < end <= line.end_s for begin, end in own)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))
    assert all(before.end_s <= after.begin_s for before, after in itertools.pairwise(line.eras))
    assert len(line.changes) == begun
    assert all(step.seconds >= 0 for step in line.steps)
    assert [step.step for step in line.steps] == [
        entry.record.step + 1 for entry in story.entries if isinstance(entry.record, record.Trained)
    ]
