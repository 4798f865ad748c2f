"""Pages whose tables and code are held to the program: exit codes, extensions."""

import inspect
import re
import subprocess
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from job_requests import make_request

from pipectl import errors
from pipectl.batch import (
    CHECKPOINTED,
    Array,
    JobState,
    Scheduler,
    Template,
    get_scheduler,
)
from pipectl.cli.app import INTERRUPTED
from pipectl.schedule.listed import Listed

DOCS = Path(__file__).parents[2] / "docs"


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def block(language: str, name: str) -> str:
    """The code in docs/extending.md that is marked so."""
    pattern = rf"^```{language} {name}\n(.*?)^```"
    (found,) = re.findall(pattern, text_of("extending.md"), re.MULTILINE | re.DOTALL)
    return str(found)


def executed(code: str) -> ModuleType:
    module = ModuleType("documented")
    exec(compile(code, "docs/extending.md", "exec"), module.__dict__)
    return module


def test_the_tables_of_exit_codes_are_those_of_the_program(make_job):
    """Of errors, of an interrupt, of ranks that stopped, and of signals to the script."""
    text = text_of("exit-codes.md")
    classes = [
        found
        for _, found in inspect.getmembers(errors, inspect.isclass)
        if issubclass(found, errors.PipectlError)
    ]
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted((str(found.exit_code), found.__name__) for found in classes)
    script = get_scheduler("local").render(make_job())
    signals = re.findall(r"trap 'forward \w+ (\d+)'", script)
    for codes in (INTERRUPTED, CHECKPOINTED, ", ".join(sorted(signals))):
        assert f"\n| {codes} | " in text


def test_the_documented_schedule_is_one():
    module = executed(block("python", "schedule"))
    written = Listed.read(block("csv", "schedule"), "mine.csv")
    for stages, micro_batches in ((2, 3), (4, 2), (3, 9), (1, 1)):
        lists = module.one_f_one_b(stages, stages, micro_batches)
        made = Listed.read("\n".join(map(",".join, lists)), "mine")
        assert (made.stages, made.micro_batches) == (stages, micro_batches)
    assert module.one_f_one_b(2, 2, 3) == [
        line.split(",") for line in block("csv", "schedule").splitlines()[1:]
    ]
    assert (written.stages, written.micro_batches) == (2, 3)
    assert 'entry-points."pipectl.schedules"' in block("toml", "schedule")


@pytest.fixture
def make_job(tmp_path):
    return partial(make_request, tmp_path / "run", tag="20261121-demo 7f3a9c01", nodes=2)


@pytest.fixture
def grid_engine(tmp_path, monkeypatch):
    """The documented batch system, with pretended commands."""
    answers = {
        "qsub": "echo 42",
        "qdel": 'echo "$@" >>"$0.said"',
        "qstat": "{ [[ ${1-} == -r ]] && cat || grep -v jobname; } <<'END'\n"
        "job-ID  prior   name       user         state submit/start at     queue\n"
        "-----------------------------------------------------------------------\n"
        "     41 0.55500 pipectl.12 me           qw    11/21/2026 12:00:00\n"
        "       Full jobname:     pipectl.1234abcd\n"
        "     42 0.55500 pipectl.7f me           r     11/21/2026 12:00:00 all.q@n1\n"
        "       Full jobname:     pipectl.7f3a9c01\nEND",
    }
    for name, line in answers.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return executed(block("python", "scheduler")).GridEngine()


def test_the_documented_batch_system_has_the_methods_of_the_protocol(grid_engine):
    for name, method in inspect.getmembers(Scheduler, inspect.isfunction):
        if not name.startswith("_"):
            found = inspect.signature(getattr(type(grid_engine), name))
            assert list(found.parameters) == list(inspect.signature(method).parameters), name


def test_the_documented_batch_system_works(grid_engine, make_job, tmp_path):
    request = make_job()
    script = tmp_path / "job.sh"
    script.write_text(grid_engine.render(request))
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "#$ -pe mpi 4\n" in script.read_text()
    assert grid_engine.submit(script, request) == "42"
    found = grid_engine.query(["42", "41", "7"])
    assert {job_id: status.state for job_id, status in found.items()} == {
        "42": JobState.RUNNING,
        "41": JobState.QUEUED,
    }
    assert grid_engine.find(request.tag) == "42"
    assert grid_engine.find("other 99") is None
    grid_engine.cancel("42")
    assert (tmp_path / "qdel.said").read_text() == "42\n"


def test_the_documented_batch_system_refuses_and_takes_templates(grid_engine, make_job):
    with pytest.raises(errors.SchedulerError):
        grid_engine.render(make_job(run_directory=Path("/a b")))
    with pytest.raises(errors.SchedulerError):
        grid_engine.render(make_job(array=Array((Path("/a"),))))
    text = "{% extends base %}\n{% block setup %}\ndate\n{% endblock %}\n"
    template = Template("t.sh", text)
    assert "\ndate\n" in grid_engine.render(make_job(template=template))
