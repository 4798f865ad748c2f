from __future__ import annotations

from pathlib import Path

import pytest

from pipectl.cli.progress import Lines, progress_bar


def test_a_line_every_ten_seconds_with_the_time_left(capfd: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = Lines("profiling", lambda: now)
    for second, done in [(0, 50), (5, 60), (11, 72), (15, 80), (22, 94), (40, 100)]:
        now = float(second)
        lines.report(done, 100, "op")
    assert capfd.readouterr().err.splitlines() == [
        "profiling: 72%, about 14.0 s left",
        "profiling: 94%, about 3.00 s left",
    ]


def test_work_that_does_not_move_has_no_end(capfd: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = Lines("profiling", lambda: now)
    lines.report(0, 0, "op")
    lines.report(5, 100, "op")
    now = 20.0
    lines.report(0, 100, "op")
    assert capfd.readouterr().err.splitlines() == ["profiling: 0%"]


def test_short_work_is_not_told_without_a_terminal(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("profiling") as report:
        for done in range(5):
            report(done, 4, "op")
    assert capfd.readouterr().err == ""
