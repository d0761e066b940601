"""How does what the supervisor reports reach metrics.jsonl, STATUS and the person at the terminal?"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable

from nereus.bus.messages import StepReport
from nereus.config import JobConfig
from nereus.runtime.display import Display, StepView, WorkerView
from nereus.runtime.fleet import State, Worker
from nereus.runtime.folder import RunFolder
from nereus.runtime.metrics import MetricsWriter, TensorBoard, read_metrics

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
        self._began = asyncio.get_running_loop().time()
        trackers = [lambda: TensorBoard(folder.tensorboard)] if config.track.tensorboard else []
        self._metrics = MetricsWriter(folder.metrics, trackers)

    def step(self, report: StepReport, metrics: dict[str, float]) -> None:
        wall_s = self._wall_before + asyncio.get_running_loop().time() - self._began
        self._metrics.write(report.step + 1, report.version, wall_s, metrics)
        self._folder.write_status("running", step=report.step + 1, version=report.version + 1)
        self._display.status("training")
        get = metrics.get
        nan = math.nan
        self._display.step(
            StepView(
                step=report.step + 1,
                steps=self._config.run.steps,
                version=report.version + 1,
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

    def close(self) -> None:
        self._metrics.close()
