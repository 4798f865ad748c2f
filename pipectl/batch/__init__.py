"""Batch systems behind one protocol: render a script, submit, query, cancel, estimate."""

from pipectl.batch.container import Container
from pipectl.batch.launchers import dialect_of, find_mpiexec, mpiexec_command
from pipectl.batch.protocol import (
    Array,
    JobRequest,
    JobState,
    JobStatus,
    MoreNodes,
    PbsOptions,
    Scheduler,
    SlurmOptions,
    Stop,
)
from pipectl.batch.registry import NAMES, get
from pipectl.batch.resolve import Evidence, resolve
from pipectl.batch.script import CHECKPOINTED, render_variables
from pipectl.batch.template import Template
from pipectl.batch.template import check as check_template

__all__ = [
    "CHECKPOINTED",
    "NAMES",
    "Array",
    "Container",
    "Evidence",
    "JobRequest",
    "JobState",
    "JobStatus",
    "MoreNodes",
    "PbsOptions",
    "Scheduler",
    "SlurmOptions",
    "Stop",
    "Template",
    "check_template",
    "dialect_of",
    "find_mpiexec",
    "get",
    "mpiexec_command",
    "render_variables",
    "resolve",
]
