"""Do figures always reach the file, whatever a tracker does?"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from nereus.runtime.metrics import MetricsWriter, TensorBoard, Tracker, read_metrics


class Recorder:
    """A tracker that keeps what it gets, and fails from step ``fails_at`` on."""

    name = "recorder"

    def __init__(self, fails_at: int = 1 << 30) -> None:
        self.fails_at = fails_at
        self.seen: list[int] = []
        self.calls = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        if step >= self.fails_at:
            raise ConnectionError("tracker is away")
        self.seen.append(step)

    def close(self) -> None:
        if self.fails_at < 1 << 30:
            raise ConnectionError("still away")


def test_a_line_holds_step_version_time_and_figures(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(1, 1, 2.5, {"reward/mean": 0.25, "optim/grad_norm": math.nan})
    writer.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row == {"step": 1, "version": 1, "wall_s": 2.5, "reward/mean": 0.25, "optim/grad_norm": None}
    (read,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(read["optim/grad_norm"]) and read["reward/mean"] == 0.25


def test_a_line_is_readable_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m")
    for step in range(1, 4):
        writer.write(step, step, 0.0, {})
        assert len(read_metrics(tmp_path / "m")) == step
    writer.close()


def test_a_failing_tracker_is_switched_off_and_said_once(tmp_path: Path) -> None:
    good, bad = Recorder(), Recorder(fails_at=2)
    with capture_logs() as lines:
        writer = MetricsWriter(tmp_path / "m", [lambda: bad, lambda: good])
        for step in range(1, 6):
            writer.write(step, step, 0.0, {"x": 1.0})
        writer.close()
    assert bad.calls == 2 and good.seen == [1, 2, 3, 4, 5]
    assert len(read_metrics(tmp_path / "m")) == 5
    assert [line["event"] for line in lines] == ["tracker failed and is switched off"]


def test_a_tracker_that_cannot_start_is_said_and_left_out(tmp_path: Path) -> None:
    def missing() -> Tracker:
        raise ImportError("no module named tensorboard")

    with capture_logs() as lines:
        writer = MetricsWriter(tmp_path / "m", [missing])
        writer.write(1, 1, 0.0, {"x": 1.0})
        writer.close()
    assert len(read_metrics(tmp_path / "m")) == 1
    assert len(lines) == 1 and "no module named tensorboard" in lines[0]["error"]


def test_a_tracker_that_fails_on_closing_harms_nothing(tmp_path: Path) -> None:
    with capture_logs() as lines:
        writer = MetricsWriter(tmp_path / "m", [lambda: Recorder(fails_at=9)])
        writer.close()
        writer.close()
    assert [line["event"] for line in lines] == ["tracker failed on closing"]


def test_steps_trained_again_after_a_resume_replace_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for steps, reward in (((1, 2, 3), 0.1), ((2, 3), 0.9)):
        writer = MetricsWriter(path)
        for step in steps:
            writer.write(step, step, 0.0, {"reward/mean": reward})
        writer.close()
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(path)] == [(1, 0.1), (2, 0.9), (3, 0.9)]


def test_a_torn_last_line_is_left_out_and_then_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"step": 1, "version": 1, "wall_s": 0}\n{"step": 2, "ver')
    assert len(read_metrics(path)) == 1
    writer = MetricsWriter(path)
    writer.write(2, 2, 1.0, {})
    writer.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("line", ["[]", '{"version": 1}', '{"step": null}', '{"step": "x"}', "garbage"])
def test_damage_names_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_no_file_means_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "absent") == []


@pytest.mark.deep
def test_tensorboard_reads_what_was_written_and_no_torch_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from nereus.runtime.metrics import MetricsWriter, TensorBoard\n"
        "root = Path(sys.argv[1])\n"
        "writer = MetricsWriter(root / 'm', [lambda: TensorBoard(root / 'tb')])\n"
        "for step in range(1, 4):\n"
        "    writer.write(step, step, 0.0, {'reward/mean': step / 4})\n"
        "writer.close()\n"
        "assert 'torch' not in sys.modules and 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    (file,) = (tmp_path / "tb").iterdir()
    assert b"reward/mean" in file.read_bytes()
    assert TensorBoard.name == "tensorboard"
