"""The rank that all others wait for, where there is one."""

import json
from collections.abc import Sequence

import pytest

from pipectl.batch import JobState, JobStatus
from pipectl.cli.status_json import status_json
from pipectl.cli.status_view import _details
from pipectl.jobs.measured import Measured
from pipectl.jobs.status import RunStatus
from pipectl.runs import RunDirectory


def status_of(tmp_path, waiting: Sequence[float | None]) -> RunStatus:
    shares = [{} if share is None else {"waiting": share} for share in waiting]
    ranks = tuple({"rank": r, "node": f"n{r}", **share} for r, share in enumerate(shares))
    job = JobStatus(JobState.RUNNING, source="test")
    return RunStatus(
        RunDirectory(tmp_path), None, job, "training", Measured(step=3), None, ranks, None
    )


def test_it_is_named_with_its_node(tmp_path) -> None:
    status = status_of(tmp_path, [0.7, 0.5, 0.05, None])
    assert dict(_details(status))["waiting"] == (
        "for rank 2 on n2: the others wait 60% of their time, it waits 5%"
    )
    found = json.loads(json.dumps(status_json(status)["waits_for"]))
    assert found == {"rank": 2, "node": "n2", "share": 0.05, "others": 0.6}


@pytest.mark.parametrize(
    "waiting",
    [
        pytest.param([0.5, 0.4, 0.45], id="all wait alike"),
        pytest.param([0.1, 0.2, 0.0], id="little is waited"),
        pytest.param([None, None], id="no step yet"),
        pytest.param([0.9], id="one rank"),
    ],
)
def test_otherwise_nobody_is(tmp_path, waiting) -> None:
    status = status_of(tmp_path, waiting)
    assert "waiting" not in dict(_details(status))
    assert status_json(status)["waits_for"] is None
