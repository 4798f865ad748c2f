"""The measured peak of every rank beside the predicted one."""

import json
from dataclasses import replace

from pipectl.batch import JobState, JobStatus
from pipectl.cli.status_json import status_json
from pipectl.cli.status_view import _details
from pipectl.jobs.measured import Measured
from pipectl.jobs.status import RunStatus
from pipectl.plan import Prediction
from pipectl.runs import RunDirectory

GIB = 1 << 30


def status_of(pipeline, tmp_path, peaks, predicted):
    plan = pipeline(len(peaks), 4)
    if predicted is not None:
        plan = replace(plan, prediction=Prediction(1.0, 0.0, (1.0,) * len(peaks), predicted))
    ranks = [{"rank": rank, "peak_bytes": peak} for rank, peak in enumerate(peaks)]
    return RunStatus(
        RunDirectory(tmp_path), None, JobStatus(JobState.RUNNING, source="test"), "training",
        Measured(step=3), plan, (*ranks, {"rank": 99}), None,
    )  # fmt: skip


def test_both_are_shown_and_in_the_json(pipeline, tmp_path):
    status = status_of(pipeline, tmp_path, [GIB, 2 * GIB], (GIB, 3 * GIB))
    assert dict(_details(status))["peak memory"] == (
        "rank 0 1.00 GiB (predicted 1.00 GiB), rank 1 2.00 GiB (predicted 3.00 GiB)"
    )
    assert json.loads(json.dumps(status_json(status)["peaks"])) == [
        {"rank": 0, "measured_bytes": GIB, "predicted_bytes": GIB},
        {"rank": 1, "measured_bytes": 2 * GIB, "predicted_bytes": 3 * GIB},
    ]


def test_of_many_ranks_those_that_hold_most_are_shown(pipeline, tmp_path):
    status = status_of(pipeline, tmp_path, [rank * GIB for rank in range(1, 8)], None)
    assert dict(_details(status))["peak memory"] == (
        "rank 3 4.00 GiB, rank 4 5.00 GiB, rank 5 6.00 GiB, rank 6 7.00 GiB, 3 ranks less"
    )
