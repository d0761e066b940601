"""How does what the supervisor reports reach metrics.jsonl, STATUS and the person at the terminal?"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable

from nereus.bus.messages import StepReport
from nereus.config import JobConfig
from nereus.core.plan import Plan
from nereus.runtime.display import Display, StepView, TransitionView, WorkerView
from nereus.runtime.fleet import State, Worker
from nereus.runtime.folder import RunFolder
from nereus.runtime.logs import bind
from nereus.runtime.metrics import MetricsWriter, TensorBoard, read_metrics
from nereus.runtime.surroundings import TransitionProgress
from nereus.runtime.timeline import summarized

STATES = {
    State.STARTING: "starting",
    State.JOINED: "starting",
    State.BUILDING: "loading",
    State.READY: "ready",
    State.LIVE: "generating",
    State.GONE: "lost",
}


class RunObserver:
    """Passes what the supervisor reports on to metrics.jsonl, STATUS and the display."""

    def __init__(self, config: JobConfig, folder: RunFolder, display: Display) -> None:
        self._config = config
        self._folder = folder
        self._display = display
        before = read_metrics(folder.metrics)
        self._wall_before = before[-1]["wall_s"] if before else 0.0
        self._last_written = int(before[-1]["step"]) if before else 0
        self._began = self._now()
        self._plan: Plan | None = None
        self._transitions = int(before[-1].get("plan/transitions", 0)) if before else 0
        self._transition_s = 0.0
        """Seconds of plan changes since the last step."""
        self._moving_since = 0.0
        trackers = [lambda: TensorBoard(folder.tensorboard)] if config.track.tensorboard else []
        self._metrics = MetricsWriter(folder.metrics, trackers)

    def taken_over(self, step: int, version: int) -> None:
        """Note that ``step`` steps are done, after which there is ``version``.

        The supervisor before may have been killed before it wrote the last one's figures: a step has a line anyway.
        """
        bind(step=step, version=version)
        if step > self._last_written:
            self._metrics.write(step, version - 1, self._wall_before, {"plan/transitions": self._transitions})

    def step(self, report: StepReport, metrics: dict[str, float]) -> None:
        wall_s = self._wall_before + self._now() - self._began
        metrics = {**metrics, **self._plan_figures()}
        self._metrics.write(report.step + 1, report.version, wall_s, metrics)
        self._folder.write_status("running", step=report.step + 1, version=report.version + 1)
        bind(step=report.step + 1, version=report.version + 1)
        self._display.status("training")
        get = metrics.get
        nan = math.nan
        self._display.step(
            StepView(
                step=report.step + 1,
                steps=self._config.run.steps,
                version=report.version + 1,
                epoch=self._plan.epoch if self._plan else 0,
                reward=get("reward/mean", nan),
                reward_std=get("reward/std", nan),
                response_length=get("response_length/mean", nan),
                staleness_mean=get("staleness/mean", nan),
                staleness_max=get("staleness/max", nan),
                tokens_per_s=get("perf/tokens_per_s", nan),
                grad_norm=get("optim/grad_norm", nan),
                step_s=get("timing_s/step", nan),
                wait_s=get("timing_s/wait_for_batch", nan),
            )
        )
        if get("mismatch/first_step_ratio_error", 0.0) > 1e-3:
            rounded = self._config.model.dtype == "bfloat16"
            self._display.event(
                "the trainer and the sampler disagree on the first, on-policy step (ratio off by "
                f"{metrics['mismatch/first_step_ratio_error']:.2g}): check temperature, dropout, masks, stale weights"
                + ("; bfloat16 alone rounds single tokens this far apart" if rounded else ""),
                "warning",
            )
        if report.skipped:
            self._display.event(f"step {report.step + 1}: a gradient was not finite; no rank updated", "warning")

    def fleet(self, workers: Iterable[Worker]) -> None:
        self._display.workers(
            [
                WorkerView(
                    worker=worker.name,
                    role=worker.emu.id if worker.emu else "reward service",
                    state=STATES[worker.state],
                    version=worker.version,
                    detail=f"{len(worker.running)} groups" if worker.running else "",
                )
                for worker in workers
            ]
        )

    def note(self, text: str) -> None:
        self._display.event(text)

    def plan(self, plan: Plan) -> None:
        self._transitions += self._plan is not None and plan.epoch != self._plan.epoch
        self._transition_s += self._now() - self._moving_since if self._moving_since else 0.0
        self._plan, self._moving_since = plan, 0.0
        bind(epoch=plan.epoch)
        self._display.plan(plan.epoch, summarized(plan))

    def transition(self, progress: TransitionProgress) -> None:
        if progress.total and not self._moving_since:
            self._moving_since = self._now()
        self._display.transition(
            TransitionView(target=progress.target, total=progress.total, done=progress.done, running=progress.running)
        )

    def _plan_figures(self) -> dict[str, float]:
        """Return the figures of the plan in force; what a change took is counted with the step that follows it."""
        if self._plan is None:
            return {}
        taken_s, self._transition_s = self._transition_s, 0.0
        return {
            "plan/epoch": self._plan.epoch,
            "plan/transitions": self._transitions,
            "plan/transition_s": taken_s,
        }

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def close(self) -> None:
        self._metrics.close()
