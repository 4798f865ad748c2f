"""Requests of jobs to render, submit and run."""

import dataclasses
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pipectl.batch import Array, JobRequest, get_scheduler
from pipectl.batch.script import render_variables
from pipectl.runs import RunDirectory
from pipectl.spec.launch import Container, Environment, Launch, Pbs, Resources, Slurm
from pipectl.spec.models import Checkpoint

T = TypeVar("T")
FIELDS = {field.name for field in dataclasses.fields(JobRequest)}


def make_request(directory: Path, **changes: Any) -> JobRequest:
    """Two ranks on one node, with changes as for :func:`change`."""
    request = JobRequest(
        name="demo",
        tag="tag-1",
        run_directory=directory,
        python="/opt/env/bin/python",
        command=("true",),
        resources=Resources(tasks_per_node=2, walltime=600),
        launch=Launch(),
        environment=Environment(),
        slurm=Slurm(),
        pbs=Pbs(),
        mpiexec="/opt/env/bin/mpiexec",
    )
    return change(request, **changes)


def change(request: JobRequest, **changes: Any) -> JobRequest:
    """The request with other fields; keys of its sections are given by their names alone, and
    sections of a batch system as mappings. Nothing is validated."""
    for section in ("resources", "launch", "environment"):
        keys = type(getattr(request, section)).model_fields.keys() - FIELDS
        if values := {key: changes.pop(key) for key in keys & changes.keys()}:
            changes[section] = getattr(request, section).model_copy(update=values)
    for section in ("slurm", "pbs"):
        if isinstance(changes.get(section), Mapping):
            values = dict(changes[section])
            changes[section] = getattr(request, section).model_copy(update=values)
    return replace(request, **changes)


def fields(document):
    """Fields of a request as they are written in golden.yaml, changes.txt and ends.yaml."""
    made = {
        "run_directory": Path,
        "binds": lambda paths: tuple(map(Path, paths)),
        "array": lambda paths: paths and Array(tuple(map(Path, paths)), 2),
        "checkpoint": lambda values: Checkpoint(**values),
        "container": lambda values: Container(**values),
        "nodes": lambda nodes: Resources(nodes=nodes).nodes,
    }
    return {
        name: made.get(name, lambda value: value)(lists_as_tuples(value))
        for name, value in document.items()
    }


def lists_as_tuples(value):
    if isinstance(value, dict):
        return {name: lists_as_tuples(each) for name, each in value.items()}
    return tuple(value) if isinstance(value, list) else value


def write_script(request: JobRequest, *command: str, scheduler: str = "local") -> Path:
    """The script of a job; with a command, its launcher starts that once, without MPI."""
    run = RunDirectory(request.run_directory)
    for folder in (run.logs, run.start.errors):
        folder.mkdir(parents=True, exist_ok=True)
    if command:
        launcher = run.path / "mpiexec"
        launcher.write_text('#!/bin/bash\nshift 2\nexec "$@"\n')
        launcher.chmod(0o755)
        request = change(request, command=command, mpiexec=str(launcher))
    run.script.write_text(get_scheduler(scheduler).render(request))
    run.variables.write_text(render_variables(request))
    return run.script


def start(request: JobRequest, *command: str, scheduler: str = "local") -> subprocess.Popen[str]:
    """A job that runs a command, as a process of this one."""
    script = ["bash", str(write_script(request, *command, scheduler=scheduler))]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(script, text=True, **streams)


def end(process: subprocess.Popen[str], request: JobRequest) -> tuple[int, str]:
    """The exit code and the output of a job."""
    output, _ = process.communicate(timeout=300)
    exit_code = RunDirectory(request.run_directory).start.exit_code.read_text()
    assert exit_code == f"{process.returncode}\n"
    return process.returncode, output


def run(request: JobRequest, *command: str, scheduler: str = "local") -> tuple[int, str]:
    """The exit code and the output of a job that runs a command."""
    return end(start(request, *command, scheduler=scheduler), request)


def wait_until(condition: Callable[[], T], timeout_s: float = 300.0, pause_s: float = 0.02) -> T:
    """Return what a condition gives as soon as that is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"it never happened: {found}"
        time.sleep(pause_s)
    return found


def check_table(snapshot, file, meaning):
    """Compare a file of lines ``given -> meaning``, and of comments, with what ``meaning`` returns
    for what is given; ``make golden`` accepts changes."""
    text = ""
    for line in file.read_text("utf-8").splitlines():
        given = line.partition(" ->")[0]
        text += line if line.startswith("#") else f"{given} -> {meaning(given)}".rstrip()
        text += "\n"
    snapshot(file, text)
