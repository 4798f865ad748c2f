"""`pipectl report`, read as text and opened in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipectl.plan import Prediction
from pipectl.timeline import Event, Timeline

if TYPE_CHECKING:
    from conftest import Command

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def traced(finished: Path, pipeline: Callable[..., Any]) -> Path:
    """A completed run with a plan, both timelines, and what its ranks hold."""
    prediction = Prediction(5.0, 0.2, (0.8, 0.8), (1 << 30, 1 << 30))
    replace(pipeline(2, 4), prediction=prediction).save(finished / "plan.json")
    for name, pace in (("predicted", 1.0), ("step-000010", 1.2)):
        events = tuple(
            Event(rank, (rank + index) * pace, (rank + index + 1) * pace, "forward", rank, index)
            for rank in range(2)
            for index in range(4)
        )
        step = None if name == "predicted" else 10
        Timeline(events, 2, step).save(finished / "trace" / f"{name}.json")
    ranks = [{"rank": rank, "node": HOSTILE, "peak_bytes": 1 << 30} for rank in range(2)]
    beat = {"version": 1, "state": HOSTILE, "step": 10, "steps": 10, "ranks": ranks}
    (finished / "heartbeat.json").write_text(json.dumps(beat))
    return finished


def test_everything_about_a_run(cli: Command, traced: Path) -> None:
    result = cli("report")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("runs/20250101-120000-tiny/report.html (")
    text = (traced / "report.html").read_text()
    for words in ("COMPLETED, step 10 of 10", "measured, step 10", "1.00 GiB measured",
                  "samples a second", "Stage 0 takes longest"):  # fmt: skip
        assert words in text
    assert "<img" not in text
    assert "report.perfetto.json, beside this page" in text
    events = json.loads((traced / "report.perfetto.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 16


def test_of_very_many_ranks_those_are_shown_that_hold_most(cli: Command, traced: Path) -> None:
    ranks = [{"rank": rank, "peak_bytes": (1 + rank) << 20} for rank in range(100)]
    (traced / "heartbeat.json").write_text(json.dumps({"version": 1, "ranks": ranks}))
    assert cli("report").code == 0
    text = (traced / "report.html").read_text()
    assert "64 of 100 ranks: those that hold most." in text
    shown = re.findall(r"\brank (\d+)\b", text.partition(">Memory<")[2])
    assert list(map(int, shown)) == list(range(36, 100))


def test_a_run_that_has_nothing_yet(cli: Command, failed: Path, tmp_path: Path) -> None:
    assert cli("report", "-o", "there/page.html").code == 0
    text = (tmp_path / "there" / "page.html").read_text()
    assert "FAILED" in text
    assert "ValueError: boom 1" in text
    assert not (tmp_path / "there" / "page.perfetto.json").exists()


def test_damaged_files_are_left_out(cli: Command, traced: Path) -> None:
    for name in ("plan.json", "trace/predicted.json", "heartbeat.json", "metrics.jsonl"):
        (traced / name).write_text("{")
        assert cli("report").code == 0, name


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_it_draws_in_a_browser(cli: Command, traced: Path, tmp_path: Path) -> None:
    assert cli("report").code == 0
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--window-size=900,700",
         "--virtual-time-budget=2000", "--dump-dom", f"file://{traced / 'report.html'}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    canvas = re.search(r'<canvas id="timelines" width="(\d+)" height="(\d+)"', done.stdout)
    assert canvas is not None, "its program has not drawn"
    assert int(canvas[1]) > 500
    assert int(canvas[2]) > 150
