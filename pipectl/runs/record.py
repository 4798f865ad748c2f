"""``record.json``: the submission of a run and its history."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar

from pipectl.fields import VERSION, Count, DataFile, Rule

STATES = ("submitting", "unconfirmed", "submitted", "cancelled")
TRAINING, PROFILING, REHEARSAL = "training", "profile", "rehearsal"
MAX_BYTES = 2**20


def is_job_id(text: str) -> bool:
    """Return whether a text can be a job id, which is passed to commands."""
    return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@;+\[\]-]{0,299}", text))


_STATE = Rule(STATES.__contains__, f"one of {', '.join(STATES)}")
_JOB_ID = Rule(is_job_id, "the id of a job")
_SWEEP_NAME = Rule(lambda name: "/" not in name and not name.startswith("."), "the name of a sweep")
_BEFORE_10000 = Rule(lambda time: time < 2.5e11, "in seconds since the epoch")
"""Python's dates end with the year 9999."""


@dataclass(frozen=True)
class Event:
    """One entry of the history, e.g. ``submitted`` or ``cancelled``."""

    time: float
    what: str
    detail: str = ""


@dataclass(frozen=True)
class SweepPoint:
    """A run's place in a sweep.

    Args:
        name: name of the sweep.
        values: values of this run by dotted key of the spec.
    """

    name: Annotated[str, _SWEEP_NAME]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Record(DataFile):
    """The submission of one run.

    It is written with the state ``submitting`` before the scheduler is called. If the submission is
    interrupted, the job can be found by its ``tag`` and is not submitted twice.

    Args:
        name: name of the job.
        scheduler: name of the batch system, such as ``slurm``; ``local`` is this machine.
        tag: unique text that the scheduler stores with the job.
        submitted_at: seconds since the epoch.
        job_id: id given by the scheduler; with Slurm's cluster if one was named (``7;b``), and
            PBS's server (``7.b``); for local jobs host, pid and process start.
        clusters: clusters or server that the submission named, where a job with the tag may be.
        state: what pipectl did with the job: ``submitting``, ``unconfirmed`` if the scheduler did
            not say whether it has the job, ``submitted`` or ``cancelled``.
        kind: ``training``, ``profile`` for a run that only measures, or ``rehearsal``.
        hash_seed: ``PYTHONHASHSEED`` of all its processes; None if each had its own.
        sweep: None for a run outside a sweep.
        task: index in the job array with this tag; None for a single job.
        after: names of the runs and sweeps that must complete before it starts.
        walltime_s: time limit of the job; None if the site sets it.
        lead_time_s: how long before the end of the walltime it stops at a checkpoint; None if it
            does not.
        earlier_starts: how often its job script had begun before this submission.
        max_starts: how often it starts at most by itself; None if only once.
        min_nodes: fewest nodes that it takes, of a range of which ``nodes`` and ``ranks`` are the
            most; None if their number is fixed.
    """

    hint: ClassVar[str] = "restore it from a backup, or submit the job again"
    max_bytes: ClassVar[int] = MAX_BYTES
    name: str
    scheduler: str
    tag: str
    submitted_at: Annotated[float, _BEFORE_10000]
    ranks: Count
    nodes: Count
    steps: int
    state: Annotated[str, _STATE] = "submitting"
    job_id: Annotated[str, _JOB_ID] | None = None
    clusters: str = ""
    history: tuple[Event, ...] = ()
    kind: str = TRAINING
    hash_seed: int | None = None
    sweep: SweepPoint | None = None
    task: int | None = None
    after: tuple[str, ...] = ()
    walltime_s: Count | None = None
    lead_time_s: int | None = None
    earlier_starts: int = 0
    max_starts: Count | None = None
    min_nodes: Count | None = None

    @property
    def is_unsure(self) -> bool:
        """Whether the scheduler may have a job whose id is not known."""
        return self.job_id is None and self.state in ("submitting", "unconfirmed")

    def with_state(
        self, time: float, state: str, *, job_id: str | None = None, detail: str = ""
    ) -> Record:
        """Return the record after a change of state, with an entry in the history."""
        return replace(
            self,
            state=state,
            job_id=job_id or self.job_id,
            history=(*self.history, Event(time, state, detail or job_id or "")),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON object."""
        return {"version": VERSION, **asdict(self)}
