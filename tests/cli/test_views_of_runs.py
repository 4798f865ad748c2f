"""Lines about a run: memory of ranks, the rank that others wait for, speed, what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipectl.batch import JobState, JobStatus
from pipectl.cli.views.run import format_long_time, run_json, run_lines
from pipectl.jobs.state import Measured, RunStatus
from pipectl.plan import Prediction
from pipectl.runs import RunDirectory

GIB = 1 << 30


def status_of(folder: Path, ranks: Sequence[dict[str, Any]] = (), **fields: Any) -> RunStatus:
    job = JobStatus(JobState.RUNNING, source="test")
    run, shown = RunDirectory(folder), tuple(ranks)
    status = RunStatus(run, None, job, "training", Measured(step=3), None, shown, None)
    return replace(status, **fields)


def details(status: RunStatus) -> dict[str, str]:
    lines = [line.plain for line in run_lines(status, files=False)][1:]
    return {line[2:16].strip(): line[16:] for line in lines}


@pytest.mark.parametrize(
    ("waiting", "words", "waits_for"),
    [
        pytest.param(
            [0.7, 0.5, 0.05, None],
            "for rank 2 on n2: the others wait 60% of their time, it waits 5%",
            {"rank": 2, "node": "n2", "share": 0.05, "others": 0.6},
            id="one is slow",
        ),
        pytest.param([0.5, 0.4, 0.45], None, None, id="all wait alike"),
        pytest.param([0.1, 0.2, 0.0], None, None, id="little is waited"),
        pytest.param([None, None], None, None, id="no step yet"),
        pytest.param([0.9], None, None, id="one rank"),
    ],
)
def test_the_rank_that_others_wait_for(
    tmp_path: Path, waiting: list[float | None], words: str | None, waits_for: dict[str, Any] | None
) -> None:
    shares = [{} if share is None else {"waiting": share} for share in waiting]
    ranks = [{"rank": r, "node": f"n{r}", **share} for r, share in enumerate(shares)]
    status = status_of(tmp_path, ranks)
    assert details(status).get("waiting") == words
    assert run_json(status)["waits_for"] == waits_for


@pytest.mark.parametrize(
    ("peaks", "predicted", "words"),
    [
        (
            [GIB, 2 * GIB],
            (GIB, 3 * GIB),
            "rank 0 1.00 GiB (predicted 1.00 GiB), rank 1 2.00 GiB (predicted 3.00 GiB)",
        ),
        (
            [rank * GIB for rank in range(1, 8)],
            None,
            "rank 3 4.00 GiB, rank 4 5.00 GiB, rank 5 6.00 GiB, rank 6 7.00 GiB, 3 ranks less",
        ),
    ],
)
def test_the_memory_of_the_ranks_that_hold_most(
    pipeline: Any, tmp_path: Path, peaks: list[int], predicted: Any, words: str
) -> None:
    plan = pipeline(len(peaks), 4)
    if predicted is not None:
        plan = replace(plan, prediction=Prediction(1.0, 0.0, (1.0,) * len(peaks), predicted))
    ranks = [{"rank": rank, "peak_bytes": peak} for rank, peak in enumerate(peaks)]
    status = status_of(tmp_path, [*ranks, {"rank": 99}], plan=plan)
    assert details(status)["peak memory"] == words
    every = predicted or [None] * len(peaks)
    assert run_json(status)["peaks"] == [
        {"rank": rank, "measured_bytes": peak, "predicted_bytes": every[rank]}
        for rank, peak in enumerate(peaks)
    ]


@pytest.mark.parametrize(
    ("step_s", "words"),
    [
        (1.002, "1.00 s per step; the run is as fast"),
        (1.3, "1.00 s per step; the run is 30% slower than that"),
        (0.8, "1.00 s per step; the run is 20% faster than that"),
    ],
)
def test_speed_and_progress(pipeline: Any, tmp_path: Path, step_s: float, words: str) -> None:
    plan = replace(pipeline(2, 4), prediction=Prediction(1.0, 0.0, (1.0, 1.0), ()))
    measured = Measured(step=30, steps=40, step_time_s=step_s)
    found = details(status_of(tmp_path, plan=plan, measured=measured))
    assert found["predicted"] == words
    assert found["progress"].startswith("███████████████░░░░░ step 30 of 40, ")
    assert found["progress"].endswith(" left")


@pytest.mark.parametrize(
    ("time_s", "text"), [(7199, "119 min 59 s"), (7260, "2 h 01 min"), (2e5, "2.3 days")]
)
def test_long_times(time_s: float, text: str) -> None:
    assert format_long_time(time_s) == text
