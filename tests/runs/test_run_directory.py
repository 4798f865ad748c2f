"""Directories of runs and sweeps, and finding them by name, path or job id."""

import os
from datetime import datetime
from pathlib import Path

import pytest

from pipectl.errors import UnknownRunError, UsageError
from pipectl.runs import (
    Record,
    RunDirectory,
    Setting,
    SweepDirectory,
    find,
    find_run,
    find_runs,
    list_runs,
    list_sweeps,
    name_in_shell,
)

NOW = datetime(2026, 11, 20, 15, 22, 33).timestamp()
STEM = "20261120-152233-gpt"


def test_a_run_is_named_by_time_and_job_and_numbered_within_a_second(tmp_path):
    runs = [RunDirectory.create(tmp_path / "runs", "gpt", NOW) for _ in range(3)]
    assert [run.path for run in runs] == [
        tmp_path / "runs" / f"{STEM}{end}" for end in ("", "-2", "-3")
    ]
    folders = {path.name for path in runs[0].path.iterdir()}
    assert folders == {"errors", "logs", "trace", "checkpoints"}


CREATE = [
    lambda base: RunDirectory.create(base, "gpt", NOW),
    lambda base: SweepDirectory.create(base, "gpt", 2, NOW),
]


@pytest.mark.parametrize("create", CREATE)
def test_a_base_that_cannot_be_written_is_named(tmp_path, create):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file") as caught:
        create(tmp_path / "file")
    assert "output.directory" in (caught.value.cure or "")


@pytest.mark.parametrize("create", CREATE)
@pytest.mark.parametrize("folder", ["logs", "checkpoints"])
def test_directories_whose_folders_cannot_be_made_are_removed(
    tmp_path, monkeypatch, create, folder
):
    mkdir = Path.mkdir

    def refuse(path, mode=511, **options):
        if path.name == folder:
            raise OSError(28, "No space left on device")
        mkdir(path, mode, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UsageError, match="no run directory can be made: No space left"):
        create(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] in ([], ["sweeps"])


@pytest.fixture
def base(tmp_path):
    for name in (
        "20261120-152233-gpt",
        "20261120-152233-gpt-2",
        "20261120-152233-gpt-10",
        "20261121-080000-bert",
        "20261119-100000-gpt",
        "notes",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "20261122-000000-file").write_text("")
    return tmp_path


def test_runs_are_listed_oldest_first(base):
    assert [run.name for run in list_runs(base)] == [
        "20261119-100000-gpt",
        "20261120-152233-gpt",
        "20261120-152233-gpt-2",
        "20261120-152233-gpt-10",
        "20261121-080000-bert",
    ]
    assert list_runs(base / "absent") == []


def test_what_cannot_be_looked_at_hides_no_run(base, monkeypatch):
    before = list_runs(base)
    (base / "20261122-000000-locked").symlink_to(base / "notes")
    (base / "5²").mkdir()
    stat = os.stat

    def refused(path, *args, **options):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refused)
    assert list_runs(base) == before


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("20261120-152233-gpt", "20261120-152233-gpt"),
        ("last", "20261121-080000-bert"),
        ("bert", "20261121-080000-bert"),
        ("20261121", "20261121-080000-bert"),
        ("gpt-2", "20261120-152233-gpt-2"),
        ("20261119", "20261119-100000-gpt"),
    ],
)
def test_runs_are_found(base, name, found):
    assert find_run(base, name).name == found


def test_a_run_is_found_by_its_path(base, monkeypatch):
    path = base / "20261121-080000-bert"
    assert find_run(base / "elsewhere", str(path)).path == path
    monkeypatch.chdir(base.parent)
    assert find_run(base, f"{base.name}/{path.name}").path == path
    assert find_run(base, f"{path}/").path == path


def test_a_run_is_called_by_what_finds_it(base, monkeypatch):
    """By its name only where commands look for it without being told where."""
    run = RunDirectory(base / "20261121-080000-bert")
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
    assert (
        name_in_shell(RunDirectory(elsewhere / "runs" / run.name))
        == f"'{elsewhere}/runs/{run.name}'"
    )


def record(run: Path, job_id: str, sweep: str = "") -> None:
    setting = Setting(sweep, {}) if sweep else None
    made = Record("gpt", "slurm", "tag", 0.0, 1, 1, 1, sweep=setting)
    made.with_state(0.0, "submitted", job_id=job_id).save(run / "record.json")


@pytest.mark.parametrize(
    ("job_id", "name"),
    [
        ("4711", "4711"),
        ("4711.server", "4711"),
        ("4711.server", "4711.server"),
        ("4711_3", "4711"),
        ("4711[3].server", "4711[3]"),
        ("4711.99@node-1", "4711"),
    ],
)
def test_a_run_is_found_by_the_id_of_its_job(base, job_id, name):
    run = base / "20261120-152233-gpt"
    record(base / "20261119-100000-gpt", "47110")
    record(run, job_id)
    (base / "20261121-080000-bert" / "record.json").write_text("4711 {")
    assert find_run(base, name).path == run
    with pytest.raises(UnknownRunError, match="no run"):
        find_run(base, "471")


def test_what_is_the_id_of_one_job_and_a_part_of_another_name_is_ambiguous(base):
    record(base / "20261119-100000-gpt", "20261121")
    with pytest.raises(UnknownRunError, match=r"matches 2 runs: 20261121-080000-bert, 20261119"):
        find(base, "20261121")
    record(base / "20261121-080000-bert", "20261121")
    record(base / "20261119-100000-gpt", "2")
    assert find(base, "20261121").name == "20261121-080000-bert"
    assert find(base, "2").name == "20261119-100000-gpt", "though dates begin with it"


def test_the_id_of_a_job_array_is_that_of_its_sweep(base):
    sweep, runs = SweepDirectory.create(base, "rates", 2, NOW)
    for index, run in enumerate(runs):
        record(run.path, f"41_{index}", sweep.name)
    assert find(base, "41").path == sweep.path
    assert find(base, "41_1") == runs[1]
    with pytest.raises(UnknownRunError, match="is a sweep of several runs"):
        find_run(base, "41")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt", r"'gpt' matches 2 runs: 20261119-100000-gpt, 20261120-152233-gpt"),
        ("bret", "no run 'bret'; did you mean 'bert'"),
        *((name, "no run") for name in ("", "notes", "../", "20261122-000000-file")),
    ],
)
def test_names_that_call_no_run_or_several(base, name, words):
    with pytest.raises(UnknownRunError, match=words):
        find_run(base, name)
    with pytest.raises(UnknownRunError, match="no runs here"):
        find_run(base / "notes", "last")


def test_of_many_matches_sweeps_included_the_newest_are_named(tmp_path):
    SweepDirectory.create(tmp_path, "gpt", 2, NOW)
    runs = [RunDirectory.create(tmp_path, "gpt", NOW + 1 + i) for i in range(7)]
    names = ", ".join(run.name for run in runs[2:])
    with pytest.raises(UnknownRunError, match=f"matches 8 runs: {names} and 3 more"):
        find(tmp_path, "gpt")


def test_runs_have_the_name_of_their_sweep(tmp_path):
    sweep, runs = SweepDirectory.create(tmp_path / "runs", "gpt", 3, NOW)
    assert sweep.path == tmp_path / "runs/sweeps" / STEM
    assert [run.name for run in runs] == [f"{STEM}-{index}" for index in range(3)]
    assert list_runs(tmp_path / "runs") == runs
    assert all(run.logs.is_dir() for run in runs)
    assert [found.name for found in list_sweeps(tmp_path / "runs")] == [STEM]
    for run in runs:
        record(run.path, "41", sweep.name)
    other = RunDirectory(tmp_path / "runs" / f"{STEM}-7")  # as the seventh of the same second
    other.path.mkdir()
    record(other.path, "42")
    runs[0].record.write_text("{")
    assert sweep.runs() == runs
    runs[1].path.rename(tmp_path / "away")
    assert sweep.runs() == [runs[0], runs[2]]


def test_names_that_are_taken_are_left_alone(tmp_path):
    for _ in range(3):  # the third is ...-gpt-3
        RunDirectory.create(tmp_path, "gpt", NOW)
    sweep, runs = SweepDirectory.create(tmp_path, "gpt", 4, NOW)
    assert (sweep.name, runs[0].name) == (f"{STEM}-2", f"{STEM}-2-0")
    other, _ = SweepDirectory.create(tmp_path, "gpt", 2, NOW)
    assert other.name == STEM, "its runs -0 and -1 are free"
    assert len(list_runs(tmp_path)) == 3 + 4 + 2


def test_a_sweep_is_found_by_a_part_of_its_name(tmp_path):
    sweep, runs = SweepDirectory.create(tmp_path, "gpt", 2, NOW)
    for name in (STEM, "gpt", "20261120", "20261120-15"):
        assert find(tmp_path, name).path == sweep.path
    for name, run in ((runs[0].name, runs[0]), ("gpt-1", runs[1]), ("last", runs[1])):
        assert find(tmp_path, name) == run


def test_a_sweep_is_found_by_its_path(tmp_path, monkeypatch):
    """Also where a run is asked for, which is not the directory of the sweep."""
    sweep, runs = SweepDirectory.create(tmp_path / "out", "gpt", 2, NOW)
    monkeypatch.chdir(tmp_path)
    called = f"out/sweeps/{STEM}"
    assert name_in_shell(sweep) == called
    assert find(Path("runs"), called).path == sweep.path
    assert find_runs(Path("runs"), [called]) == runs
    assert find(Path("runs"), f"out/{STEM}-0") == runs[0]
    with pytest.raises(UnknownRunError, match="is a sweep of several runs") as caught:
        find_run(Path("runs"), called)
    assert caught.value.cure == f"name one of them, such as out/{STEM}-0"
    (tmp_path / "out").rename("runs")
    assert name_in_shell(SweepDirectory(tmp_path / "runs/sweeps" / STEM)) == STEM
