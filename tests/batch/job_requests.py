"""Requests of jobs to render and submit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pipectl.batch import JobRequest
from pipectl.spec.models import Environment, Launch, Pbs, Resources, Slurm

FIELDS = {field.name for field in fields(JobRequest)}


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
        request = request.update(**{section: {k: changes.pop(k) for k in keys & changes.keys()}})
    for section in ("slurm", "pbs"):
        if isinstance(changes.get(section), Mapping):
            request = request.update(**{section: changes.pop(section)})
    return replace(request, **changes)
