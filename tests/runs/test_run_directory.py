"""Directories of runs and sweeps, and finding them by name, path or job id."""

import os
from datetime import datetime
from pathlib import Path

import pytest

from pipectl.errors import UnknownRunError, UsageError
from pipectl.runs import (
    START_VARIABLE,
    Record,
    RunDirectory,
    SweepDirectory,
    SweepPoint,
    find,
    find_run,
    find_runs,
    list_runs,
    list_sweeps,
    name_in_shell,
    read_starts,
    start_of_job,
)
from tests.batch.job_requests import check_table

NOW = datetime(2026, 11, 20, 15, 22, 33).timestamp()
STEM = "20261120-152233-gpt"
RUNS = (
    "20261119-100000-gpt",
    "20261120-152233-gpt",
    "20261120-152233-gpt-2",
    "20261120-152233-gpt-10",
    "20261121-080000-bert",
)
"""Oldest first."""


@pytest.fixture
def base(tmp_path):
    for name in (*RUNS[::-1], "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "20261122-000000-file").write_text("")
    return tmp_path


def record(run, job_id, sweep=""):
    setting = SweepPoint(sweep, {}) if sweep else None
    made = Record("gpt", "slurm", "tag", 0.0, 1, 1, 1, sweep=setting)
    made.with_state(0.0, "submitted", job_id=job_id).save(run / "record.json")


def test_a_run_is_named_by_time_and_job_and_numbered_within_a_second(tmp_path):
    runs = [RunDirectory.create(tmp_path / "runs", "gpt", NOW) for _ in range(3)]
    names = [f"runs/{STEM}{end}" for end in ("", "-2", "-3")]
    assert [str(run.path.relative_to(tmp_path)) for run in runs] == names
    folders = {path.name for path in runs[0].path.iterdir()}
    assert folders == {"logs", "trace", "checkpoints", "starts"}
    assert [*runs[0].start.path.iterdir()] == [runs[0].start.errors]


def test_the_newest_start_counts_and_is_the_next_one_until_a_script_has_begun_in_it(
    tmp_path, monkeypatch
):
    run = RunDirectory.create(tmp_path, "gpt", NOW)
    assert (run.start, run.next_start(), read_starts(run)) == (run.start_of(1),) * 2 + (0,)
    run.start.begun.touch()
    assert (run.start, run.next_start(), read_starts(run)) == (*map(run.start_of, (1, 2)), 1)
    for name in ("2", "9", "10", "010", "0", "-3", "x", "11.tmp", "9999999999", "²"):
        (run.starts / name).mkdir()
    assert [start.number for start in run.every_start()] == [10, 9, 2, 1]
    assert (run.start, run.next_start(), read_starts(run)) == (run.start_of(10),) * 2 + (9,)
    assert run.start.run == run
    old = RunDirectory(tmp_path / "old")
    assert (old.start, old.every_start(), read_starts(old)) == (old.start_of(1), [], 0)
    assert start_of_job(run) == run.start
    for path, own in ((run.start_of(2).path, 2), (old.start.path, 10), (run.path, 10), ("x", 10)):
        monkeypatch.setenv(START_VARIABLE, str(path))
        assert start_of_job(run).number == own


@pytest.mark.parametrize(
    "create",
    [
        lambda base: RunDirectory.create(base, "gpt", NOW),
        lambda base: SweepDirectory.create(base, "gpt", 2, NOW),
    ],
)
def test_directories_that_cannot_be_made_whole_are_not_made(tmp_path, monkeypatch, create):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file") as caught:
        create(tmp_path / "file")
    assert "output.directory" in (caught.value.hint or "")
    mkdir, base = Path.mkdir, tmp_path / "runs"

    def refuse(path, mode=511, **options):
        if path.name == "logs" and path.parent.parent == base:  # of a run, not of the sweep
            raise OSError(28, "No space left on device")
        mkdir(path, mode, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UsageError, match="no run directory can be made: No space left"):
        create(base)
    assert [path.name for path in base.rglob("*")] in ([], ["sweeps"])


def test_runs_are_listed_oldest_first_and_what_cannot_be_looked_at_hides_none(base, monkeypatch):
    assert tuple(run.name for run in list_runs(base)) == RUNS
    assert list_runs(base / "absent") == []
    (base / "20261122-000000-locked").symlink_to(base / "notes")
    (base / "5²").mkdir()
    stat = os.stat

    def refused(path, *args, **options):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refused)
    assert tuple(run.name for run in list_runs(base)) == RUNS


def test_names_and_ids_of_jobs_call_one_run_or_are_refused(base, snapshot):
    ids = ("2", "4711.server", "4712_3", "4713[3].server", "4714.99@node-1")
    for run, job_id in zip(RUNS, ids, strict=True):
        record(base / run, job_id)
    (base / "20261101-000000-damaged").mkdir()
    (base / "20261101-000000-damaged/record.json").write_text("4711 {")

    def called(given):
        directory, _, name = given.partition(" ")
        try:
            return find_run(base / directory, name).name
        except UnknownRunError as error:
            return f"{error.message} ({error.hint})".replace(str(base), "runs")

    check_table(snapshot, Path(__file__).with_name("names.txt"), called)
    record(base / RUNS[0], "20261121")  # also a part of another name
    with pytest.raises(UnknownRunError, match=r"matches 2 runs: 20261121-080000-bert, 20261119"):
        find(base, "20261121")


def test_a_run_is_called_by_what_finds_it(base, monkeypatch):
    """By its name only where commands look for it without being told where."""
    run = RunDirectory(base / RUNS[-1])
    assert find_run(base / "absent", f"{run.path}/") == run
    elsewhere = base.parent / "else where"
    elsewhere.mkdir()
    for directory, called in (
        (elsewhere, str(run.path)),
        (base.parent, f"{base.name}/{run.name}"),
        (base, f"./{run.name}"),
    ):
        monkeypatch.chdir(directory)
        assert name_in_shell(run) == called
        assert find_run(Path("runs"), called) == run
    (elsewhere / "runs").symlink_to(base)
    monkeypatch.chdir(elsewhere)
    assert name_in_shell(run) == run.name
    monkeypatch.chdir(base)
    there = RunDirectory(elsewhere / "runs" / run.name)
    assert name_in_shell(there) == f"'{elsewhere}/runs/{run.name}'"


def test_of_many_matches_sweeps_included_the_newest_are_named(tmp_path):
    SweepDirectory.create(tmp_path, "gpt", 2, NOW)
    runs = [RunDirectory.create(tmp_path, "gpt", NOW + 1 + i) for i in range(7)]
    names = ", ".join(run.name for run in runs[2:])
    with pytest.raises(UnknownRunError, match=f"matches 8 runs: {names} and 3 more"):
        find(tmp_path, "gpt")


def test_runs_have_the_name_of_their_sweep_and_names_that_are_taken_are_left_alone(tmp_path):
    base = tmp_path / "runs"
    sweep, runs = SweepDirectory.create(base, "gpt", 3, NOW)
    assert sweep.path == base / "sweeps" / STEM
    assert [run.name for run in runs] == [f"{STEM}-{index}" for index in range(3)]
    assert list_runs(base) == runs
    assert all(run.logs.is_dir() for run in runs)
    assert [found.name for found in list_sweeps(base)] == [STEM]
    for run in runs:
        record(run.path, "41", sweep.name)
    other = RunDirectory(base / f"{STEM}-7")  # as the seventh of the same second
    other.path.mkdir()
    record(other.path, "42")
    runs[0].record.write_text("{")
    assert sweep.runs() == runs
    runs[1].path.rename(tmp_path / "away")
    assert sweep.runs() == [runs[0], runs[2]]
    for _ in range(3):  # the third is ...-bert-3
        RunDirectory.create(tmp_path, "bert", NOW)
    later, runs = SweepDirectory.create(tmp_path, "bert", 4, NOW)
    assert (later.name[15:], runs[0].name[15:]) == ("-bert-2", "-bert-2-0")
    other, _ = SweepDirectory.create(tmp_path, "bert", 2, NOW)
    assert other.name[15:] == "-bert", "its runs -0 and -1 are free"
    assert len(list_runs(tmp_path)) == 3 + 4 + 2


def test_a_sweep_is_found_by_name_path_and_job_also_where_a_run_is_asked_for(tmp_path, monkeypatch):
    sweep, runs = SweepDirectory.create(tmp_path / "out", "gpt", 2, NOW)
    base = tmp_path / "out"
    for index, run in enumerate(runs):
        record(run.path, f"41_{index}", sweep.name)
    for name in (STEM, "gpt", "20261120", "20261120-15", "41"):
        assert find(base, name).path == sweep.path
        with pytest.raises(UnknownRunError, match="is a sweep of several runs"):
            find_run(base, name)
    names = ((runs[0].name, runs[0]), ("gpt-1", runs[1]), ("last", runs[1]), ("41_1", runs[1]))
    for name, run in names:
        assert find(base, name) == run
    monkeypatch.chdir(tmp_path)
    called = f"out/sweeps/{STEM}"
    assert name_in_shell(sweep) == called
    assert find(Path("runs"), called).path == sweep.path
    assert find_runs(Path("runs"), [called]) == runs
    assert find(Path("runs"), f"out/{STEM}-0") == runs[0]
    with pytest.raises(UnknownRunError, match="is a sweep of several runs") as caught:
        find_run(Path("runs"), called)
    assert caught.value.hint == f"name one of them, such as out/{STEM}-0"
    (tmp_path / "out").rename("runs")
    assert name_in_shell(SweepDirectory(tmp_path / "runs/sweeps" / STEM)) == STEM
