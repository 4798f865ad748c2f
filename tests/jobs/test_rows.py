"""Profiles get the times of rows that two ranks of this machine measure, once per directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipectl.jobs import profiles
from pipectl.jobs.profiles import measure_rows
from pipectl.profile import Profile
from pipectl.row_times import RowTimes
from pipectl.spec import JobSpec, load

JOB = """\
name: rows
model: {factory: "m:build"}
loss: {factory: "model"}
data: {factory: "m:data"}
training: {steps: 4, batch_size: 16}
resources: {tasks_per_node: 2}
site_defaults: false
"""


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "job.yaml").write_text(JOB)
    return load(tmp_path / "job.yaml", check_files=False)


@pytest.mark.mpi
@pytest.mark.usefixtures("measured_rows")
def test_two_ranks_of_this_machine_measure_them(spec: JobSpec) -> None:
    rows, assumption = measure_rows(spec, "local")
    assert (rows is not None, assumption) == (True, "")
    assert rows is not None
    assert 0 < rows.compute < 0.1
    assert all(seconds > 0 for _, seconds in rows.send_start)


def test_jobs_of_one_directory_share_them(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def measure(*given: Any) -> tuple[RowTimes, str]:
        asked.append(given)
        return RowTimes(compute=float(len(asked))), ""

    monkeypatch.setattr("pipectl.jobs.profiles.measure_rows", measure)
    profile = Profile("p", "test", 1, (), ())

    def rows_of(job: JobSpec, *, again: bool = False) -> float:
        rows = profiles._with_rows(profile, job, None, tmp_path, again=again).rows
        assert rows is not None
        return rows.compute

    assert [rows_of(spec), rows_of(spec)] == [1.0, 1.0]
    bound = spec.launch.model_copy(update={"bind": "cores"})
    assert rows_of(spec.model_copy(update={"launch": bound})) == 2.0
    assert [rows_of(spec, again=True), rows_of(spec)] == [3.0, 3.0]
