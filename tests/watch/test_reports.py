"""What is written of a rank that cannot do so itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipectl.watch.board import Sight
from pipectl.watch.head import Death
from pipectl.watch.report import report
from pipectl.watch.verdict import Verdict
from pipectl.watch.words import Names

NAMES = Names(["FORWARD"], ["activation"])


@pytest.mark.parametrize(
    ("sight", "stage", "words"),
    [
        (Sight(7, 0, 2, 4, step=5), 2, "rank 3, stage 2, step 5, "),
        (Sight(7, step=5), None, "rank 3, step 5, "),
    ],
)
def test_a_rank_without_a_stage_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sight: Sight, stage: int | None, words: str
) -> None:
    path = tmp_path / "rank-0003.json"
    report(path, Verdict(3, "it is gone", "go on"), sight, "n1", NAMES)
    found = json.loads(path.read_text())
    assert (found["rank"], found["stage"], found["step"], found["host"]) == (3, stage, 5, "n1")
    assert found["earlier"] is None
    assert capsys.readouterr().err.startswith(f"pipectl: {words}")


def test_an_end_is_told_with_when_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rank-0003.json"
    report(path, Death(3, 12.5, earlier=2).verdict, Sight(), "n1", NAMES)
    found = json.loads(path.read_text())
    assert (found["time"], found["earlier"]) == (12.5, 2)
