"""Directories of sweeps and their runs, and finding them by name."""

from datetime import datetime
from pathlib import Path

import pytest

from pipectl.errors import DataFileError, UnknownRunError, UsageError
from pipectl.runs import (
    Members,
    RunDirectory,
    SweepDirectory,
    as_typed,
    find,
    find_run,
    find_runs,
    list_runs,
    list_sweeps,
)

NOW = datetime(2026, 11, 20, 15, 22, 33).timestamp()
STEM = "20261120-152233-gpt"


def test_runs_have_the_name_of_their_sweep(tmp_path: Path) -> None:
    sweep, runs = SweepDirectory.create(tmp_path / "runs", "gpt", 3, NOW)
    assert sweep.path == tmp_path / "runs/sweeps" / STEM
    assert [run.name for run in runs] == [f"{STEM}-{index}" for index in range(3)]
    assert list_runs(tmp_path / "runs") == runs
    assert all(run.logs.is_dir() for run in runs)
    assert [found.name for found in list_sweeps(tmp_path / "runs")] == [STEM]
    sweep.save(Members("tag", tuple(run.name for run in runs), 2))
    assert sweep.load() == Members("tag", tuple(run.name for run in runs), 2)
    runs[1].path.rename(tmp_path / "away")
    assert sweep.runs() == [runs[0], runs[2]]


def test_names_that_are_taken_are_left_alone(tmp_path: Path) -> None:
    for _ in range(3):  # the third is ...-gpt-3
        RunDirectory.create(tmp_path, "gpt", NOW)
    sweep, runs = SweepDirectory.create(tmp_path, "gpt", 4, NOW)
    assert (sweep.name, runs[0].name) == (f"{STEM}-2", f"{STEM}-2-0")
    other, _ = SweepDirectory.create(tmp_path, "gpt", 2, NOW)
    assert other.name == STEM, "its runs -0 and -1 are free"
    assert len(list_runs(tmp_path)) == 3 + 4 + 2


def test_a_base_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        SweepDirectory.create(tmp_path / "file", "gpt", 2, NOW)


def test_a_sweep_is_found_by_a_part_of_its_name(tmp_path: Path) -> None:
    sweep, runs = SweepDirectory.create(tmp_path, "gpt", 2, NOW)
    for name in (STEM, "gpt", "20261120", "20261120-15"):
        assert find(tmp_path, name).path == sweep.path
    for name, run in ((runs[0].name, runs[0]), ("gpt-1", runs[1]), ("last", runs[1])):
        assert find(tmp_path, name) == run


def test_a_sweep_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run is asked for, which is not the directory of the sweep."""
    sweep, runs = SweepDirectory.create(tmp_path / "out", "gpt", 2, NOW)
    sweep.save(Members("tag", tuple(run.name for run in runs), None))
    monkeypatch.chdir(tmp_path)
    called = f"out/sweeps/{STEM}"
    assert as_typed(sweep) == called
    assert find(Path("runs"), called).path == sweep.path
    assert find_runs(Path("runs"), [called]) == runs
    assert find(Path("runs"), f"out/{STEM}-0") == runs[0]
    with pytest.raises(UnknownRunError, match="is a sweep of several runs") as caught:
        find_run(Path("runs"), called)
    assert caught.value.cure == f"name one of them: out/{STEM}-0, say"
    (tmp_path / "out").rename("runs")
    assert as_typed(SweepDirectory(tmp_path / "runs/sweeps" / STEM)) == STEM


def test_where_a_run_is_meant_a_sweep_is_none(tmp_path: Path) -> None:
    SweepDirectory.create(tmp_path, "gpt", 2, NOW)
    for name in ("gpt", STEM):
        with pytest.raises(UnknownRunError, match="is a sweep of several runs") as caught:
            find_run(tmp_path, name)
        assert f"{STEM}-0" in (caught.value.cure or "")


def test_a_part_of_several_names_is_refused(tmp_path: Path) -> None:
    SweepDirectory.create(tmp_path, "gpt", 2, NOW)
    RunDirectory.create(tmp_path, "gpt", NOW + 1)
    with pytest.raises(UnknownRunError, match="matches 2 runs: 20261120-152233-gpt, 2"):
        find(tmp_path, "gpt")
    assert find(tmp_path, "20261120-152234-gpt").name == "20261120-152234-gpt"


def test_a_damaged_list_of_runs_leads_nowhere_else(tmp_path: Path) -> None:
    sweep, _ = SweepDirectory.create(tmp_path, "gpt", 2, NOW)
    for names in ('["../x"]', f'["{STEM}-0/../.."]', "[1]", "null"):
        sweep.members.write_text(f'{{"version": 1, "tag": "t", "runs": {names}}}')
        with pytest.raises(DataFileError, match=r"sweep\.json"):
            sweep.runs()
