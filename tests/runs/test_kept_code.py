"""The code that a run keeps: what is copied, what has changed, and what is refused."""

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl import libraries
from pipectl.batch import process
from pipectl.errors import DataFileError, SchedulerError
from pipectl.jobs.environment import describe_environment, find_repository
from pipectl.profile_parts import LoadedFile
from pipectl.runs import RunDirectory, code, project, sources
from pipectl.runs.code import (
    Code,
    keep,
    keep_loaded,
    loaded_here,
    read_snapshot,
    using_code_of,
)
from pipectl.runs.kept_code import digest_of, read_code, without_copies
from pipectl.runs.project import python_files
from pipectl.spec import load, profile_key, references
from pipectl.spec.code import Snapshot, is_source, read_source, using

JOB = """\
version: 1
model: {factory: "./model.py:build", kwargs: {config: ./net.json, size: 3}}
loss: nets.losses:own
data: {factory: "./data/sets.py:data"}
callbacks: {note: "json:dumps"}
training: {steps: 4, batch_size: 8}
site_defaults: false
"""
FILES = {
    "model.py": "from nets import layers\nimport json, helper\ndef build(config, size): ...\n",
    "helper.py": "A = 1\n",
    "unused.py": "",
    "nets/__init__.py": "",
    "nets/layers.py": "from . import blocks\n",
    "nets/blocks.py": "",
    "nets/losses.py": "def own(x, y): ...\n",
    "data/sets.py": "import helper\ndef data(): ...\n",
    "data/helper.py": "B = 1\n",
    "net.json": "{}",
}
COPIED = {*FILES} - {"unused.py", "net.json"}


@pytest.fixture
def job(tmp_path):
    """A job with code in files, in packages, and with modules of one name."""
    for name, text in FILES.items():
        path = tmp_path / "job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    path = tmp_path / "job/job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def run(tmp_path, job):
    """A run that has kept the code of the job."""
    run = RunDirectory.create(tmp_path / "runs", "tiny", 0.0)
    keep(run, Code.of(load(job)), 1, None)
    return run


def names(files, job):
    return {str(Path(file).relative_to(job.parent)) for file in files}


def test_every_source_is_copied_as_it_was_for_its_owner_alone(run, job):
    copies = {path for path in run.code.rglob("*") if path.is_file()}
    assert {str(path.relative_to(run.code / "1")) for path in copies} == COPIED
    assert {(run.code / "1" / name).read_text() == FILES[name] for name in COPIED} == {True}
    assert {path.stat().st_mode & 0o077 for path in (run.code, *run.code.rglob("*"))} == {0}


def test_a_run_reads_its_copies_whatever_becomes_of_the_files(run, job):
    key = profile_key(load(job))
    (job.parent / "helper.py").write_text("A = 2\n")
    (job.parent / "nets/blocks.py").unlink()
    (job.parent / "data/sets.py").unlink()
    with using_code_of(run):
        assert read_source(job.parent / "helper.py") == b"A = 1\n"
        assert is_source(job.parent / "data/sets.py")
        assert profile_key(load(job)) == key
        assert Code.of(load(job)).sources.contents == read_snapshot(run).contents
    assert read_source(job.parent / "helper.py") == b"A = 2\n"
    (job.parent / "data/sets.py").write_text(FILES["data/sets.py"])
    assert profile_key(load(job)) != key


def test_a_script_beside_the_directory_of_its_job_is_read_back(tmp_path, job):
    """It may find the files that it imports by its own directory, which has no ``..`` then."""
    (tmp_path / "train.py").write_text("import beside\n")
    (tmp_path / "beside.py").write_text("")
    job.write_text(
        "script: {file: ../train.py, directory: ..}\ntraining: {steps: 4, batch_size: 8}\n"
    )
    spec, run = load(job), RunDirectory.create(tmp_path / "runs", "tiny", 0.0)
    (tmp_path / "other.py").write_text("")
    found = LoadedFile(str(tmp_path / "other.py"), digest_of(tmp_path / "other.py"), ("other",))
    keep(run, Code.of(spec).with_loaded([found]), 1, None)
    assert {*read_snapshot(run).contents} == {
        tmp_path / name for name in ("train.py", "beside.py", "other.py")
    }


def test_the_files_that_have_changed_are_named_with_those_of_keyword_arguments(run, job):
    assert read_code(run).changed() == []
    (job.parent / "helper.py").write_text("A = 2\n")
    (job.parent / "nets/blocks.py").unlink()
    (job.parent / "unused.py").write_text("A = 1\n")
    (job.parent / "net.json").write_text("{ }")
    for thorough in (False, True):
        changed = read_code(run).changed(thorough=thorough)
        assert names([file.path for file in changed if file.copy], job) == {
            "helper.py",
            "nets/blocks.py",
        }
        assert names([file.path for file in changed if not file.copy], job) == {"net.json"}


def test_an_edit_before_the_copies_were_written_counts_as_a_change(run, job):
    earlier = Code.of(load(job))
    (job.parent / "helper.py").write_text("A = 2\n")
    other = RunDirectory.create(run.path.parent, "tiny", 0.0)
    keep(other, earlier, 1, None)
    changed = read_code(other).changed(thorough=False)
    assert names([file.path for file in changed], job) == {"helper.py"}


def test_what_was_kept_before_stays_and_new_files_join_it(run, job):
    (job.parent / "helper.py").write_text("A = 2\n")
    with using_code_of(run):
        again = replace(Code.of(load(job)), before=read_code(run))
        keep(run, again, 2, None)
        assert [path.name for path in run.code.iterdir()] == ["1"]
        more = load(job, ["callbacks.mine=./unused.py:tell"])
        keep(run, replace(Code.of(more), before=read_code(run)), 2, None)
    assert (run.code / "2/unused.py").exists()
    snapshot = read_snapshot(run)
    assert snapshot.contents[job.parent / "helper.py"] == b"A = 1\n"
    assert job.parent / "unused.py" in snapshot.contents
    assert names([file.path for file in read_code(run).changed()], job) == {"helper.py"}


@pytest.mark.parametrize(("name", "value"), [("MAX_FILES", 2), ("MAX_BYTES", 100)])
def test_what_is_too_much_to_copy_is_watched(tmp_path, job, monkeypatch, name, value):
    monkeypatch.setattr(code, name, value)
    run = RunDirectory.create(tmp_path / "runs", "tiny", 0.0)
    keep(run, Code.of(load(job)), 1, None)
    files = {file.path: file.copy for file in read_code(run).files}
    assert names(files, job) == {*COPIED, "net.json"}
    assert None in files.values()
    assert 0 < len([copy for copy in files.values() if copy]) < len(COPIED)


def test_a_package_too_large_to_keep_is_compared_and_named_once(tmp_path, job, run, monkeypatch):
    """As a checkout of a large library on PYTHONPATH, of which the job has loaded some files."""
    package = tmp_path / "checkout/vast"
    package.mkdir(parents=True)
    for name in ("__init__", "one", "two", "three"):
        (package / f"{name}.py").write_text("A = 1\n")
    monkeypatch.setattr(libraries, "_MAX_FILES", 2)
    monkeypatch.setattr(sys, "path", [*sys.path, str(package.parent)])
    monkeypatch.setattr(sources, "_began_s", math.inf)
    # Before anything has run, by the times of all of its files.
    (job.parent / "helper.py").write_text("import vast.one\n")
    monkeypatch.setattr(references, "_SEARCH", (str(package.parent),))
    queued = RunDirectory.create(run.path.parent, "tiny", 0.0)
    keep(queued, Code.of(load(job)), 1, None)
    assert read_code(queued).changed() == []
    os.utime(package / "three.py", ns=(1, 1))
    assert without_copies(read_code(queued).changed()) == [str(package)]
    run = RunDirectory.create(run.path.parent, "tiny", 0.0)
    keep(run, Code.of(load(job)), 1, None)
    sources.follow_imports()
    for name in ("one", "two"):
        importlib.import_module(f"vast.{name}")
    loaded = [file for file in loaded_here() if file.package == str(package)]
    assert [Path(file.path).stem for file in loaded] == ["__init__", "one", "two"]
    keep_loaded(run, load(job), loaded)
    assert read_code(run).changed() == []
    os.utime(package / "three.py", ns=(2, 2))
    for name in ("one", "two", "three"):
        (package / f"{name}.py").write_text("A = 2\n")
    changed = read_code(run).changed()
    assert [Path(file.path).stem for file in changed] == ["one", "two"]
    assert without_copies(changed) == [f"{package} (2 files)"]


def test_a_directory_on_pythonpath_of_the_job_has_code_of_it(tmp_path, job):
    more = tmp_path / "more"
    more.mkdir()
    (more / "extra.py").write_text("A = 1\n")
    (job.parent / "helper.py").write_text("import extra\n")
    keys = []
    for directory in (more, tmp_path):
        spec = load(job, [f"environment.variables.PYTHONPATH={directory}:lib"])
        assert (more / "extra.py" in Code.of(spec).sources.contents) is (directory == more)
        keys.append(profile_key(spec))
    assert keys[0] != keys[1]


def test_code_that_an_argument_names_is_copied_if_it_is_loaded(job):
    (job.parent / "helper.py").write_text("import importlib\n")
    file = job.parent / "settings.py"
    file.write_text("A = 1\n")
    code = Code.of(load(job, [f"model.kwargs.config={file}"]))
    assert file in code.others
    assert file not in code.sources.contents
    code = code.with_loaded([LoadedFile(str(file), digest_of(file))])
    assert file not in code.others
    assert code.sources.contents[file] == b"A = 1\n"


def test_a_name_means_a_loaded_file_only_where_its_directory_comes_first(tmp_path):
    """A variable of the environment may choose among directories."""
    files = [tmp_path / name / "layers.py" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text("")
    names = {"layers": (files[0],)}
    with using(Snapshot({files[0]: b""}, names, frozenset({files[0]}))):
        for search, found in (("ab", "a"), ("ba", None), ("b", None), ("ca", "a")):
            places = [str(tmp_path / name) for name in search]
            spec = sources._FINDER.find_spec("layers", places)
            assert (spec and Path(spec.origin).parent.name) == found


def test_the_python_files_of_a_project_are_found_near_ones_first(tmp_path, monkeypatch):
    for name in (
        "setup.py", "jobs/model.py", "lib/deep/a.py", "b.py", ".hidden/c.py", "venv/pyvenv.cfg",
        "venv/d.py", "runs/1/code.json", "runs/1/code/e.py", "data/f.txt",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    (tmp_path / "a_table.py").write_text("A = 1\n")
    monkeypatch.setattr(project, "_MAX_BYTES", 5)

    def found():
        return [str(path.relative_to(tmp_path)) for path in python_files([tmp_path / "jobs"])]

    assert found() == ["b.py", "setup.py", "jobs/model.py", "lib/deep/a.py"]
    monkeypatch.setattr(project, "_MAX_ENTRIES", 9)
    assert found() == ["b.py", "setup.py"]
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert found() == ["jobs/model.py"]


def test_a_directory_in_which_everybody_can_write_is_no_project(tmp_path):
    """As `/tmp`, where somebody may leave a setup.py."""
    for name in ("setup.py", "other.py", "job/model.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    tmp_path.chmod(0o1777)
    assert [*python_files([tmp_path / "job"])] == [tmp_path / "job/model.py"]
    tmp_path.chmod(0o755)
    assert len([*python_files([tmp_path / "job"])]) == 3


def damage(run):
    (run.code / "1/helper.py").write_text("A = 3\n")


def leave_the_directory(run):
    (run.path / "other.py").write_text("")
    document = json.loads(run.code_file.read_text())
    document["files"][0]["copy"] = "../other.py"
    run.code_file.write_text(json.dumps(document))


WRONG = [
    (damage, "has changed since it was kept"),
    (lambda run: (run.code / "1/helper.py").unlink(), "No such file"),
    (lambda run: run.code.chmod(0o777), "can be changed by everybody"),
    (lambda run: run.path.chmod(0o777), "can be changed by everybody"),
    (leave_the_directory, "a path within the directory"),
]


@pytest.mark.parametrize(("spoil", "fault"), WRONG)
def test_code_that_is_not_as_it_was_kept_or_may_be_of_others_is_refused(run, spoil, fault):
    spoil(run)
    with pytest.raises(DataFileError, match=fault) as raised:
        read_snapshot(run)
    assert raised.value.hint


def test_code_in_the_directory_of_another_user_is_refused(run, monkeypatch):
    monkeypatch.setattr(code, "fault_of_owner", lambda *_, **__: "belongs to mallory")
    with pytest.raises(DataFileError, match="belongs to mallory, so the code in it is not used"):
        read_snapshot(run)


def test_a_run_without_code_sees_the_files(run, job):
    run.code_file.unlink()
    with using_code_of(run) as snapshot:
        assert snapshot is None
        assert read_source(job.parent / "helper.py") == b"A = 1\n"


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_environment_names_commit_changed_files_and_packages(job, monkeypatch):
    top = job.parent
    repository, why = find_repository(top)
    assert repository is None
    assert "not a git repository" in describe_environment(repository, why)

    def git(*words):
        own = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(top), *own, *words], check=True, capture_output=True)

    git("init")
    git("add", "model.py", "helper.py", "nets")
    git("commit", "-m", "first")
    (top / "helper.py").write_text("A = 2\n")
    repository, _ = find_repository(top / "nets")
    assert len(repository.commit) == 40
    assert {"helper.py", "data/"} <= {*repository.changed}
    text = describe_environment(repository, "")
    assert f"commit: {repository.commit}\n" in text
    assert "\ntorch==" in text

    def absent(*_, **__):
        raise SchedulerError("git: No such file or directory", hint="")

    monkeypatch.setattr(process, "run", absent)
    assert find_repository(top) == (None, "git: No such file or directory")
