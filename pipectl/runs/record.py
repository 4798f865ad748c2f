"""``record.json``: what was submitted, and what happened to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar

from pipectl.fields import VERSION, Count, DataFile, Rule

STATES = ("submitting", "submitted", "cancelled")
TRAINING, PROFILING, REHEARSAL = "training", "profile", "rehearsal"
MAX_BYTES = 2**20


def is_job_id(text: str) -> bool:
    """Whether a text can be the id of a job, which commands take as an argument."""
    return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@+\[\]-]{0,299}", text))


_STATE = Rule(STATES.__contains__, f"one of {', '.join(STATES)}")
_JOB_ID = Rule(is_job_id, "the id of a job")
_SWEEP_NAME = Rule(lambda name: "/" not in name and not name.startswith("."), "the name of a sweep")
_BEFORE_10000 = Rule(lambda time: time < 2.5e11, "in seconds since the epoch")
"""Calendars end with the year 9999."""


@dataclass(frozen=True)
class Event:
    """One entry of the history, e.g. ``submitted`` or ``cancelled``."""

    time: float
    what: str
    detail: str = ""


@dataclass(frozen=True)
class Setting:
    """What makes a run one of a sweep.

    Args:
        name: of the sweep.
        values: that the sweep gives to this run, by dotted key of the spec.
    """

    name: Annotated[str, _SWEEP_NAME]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Record(DataFile):
    """The submission of one run.

    It is written with the state ``submitting`` before the scheduler is called, so that a job
    whose submission was interrupted can be found by its ``tag`` instead of being submitted twice.

    Args:
        name: of the job.
        scheduler: ``local``, ``slurm``…
        tag: unique text that the scheduler keeps with the job.
        submitted_at: seconds since the epoch.
        job_id: as the scheduler gave it; for local jobs it names host, pid and process start.
        state: ``submitting``, ``submitted`` or ``cancelled`` - what *we* did, not the job's state.
        kind: ``training``, ``profile`` for a run that only measures and makes no steps, or
            ``rehearsal``.
        sweep: None for a run that is of none.
        task: the run's place in the job array that has its tag; None for a job of its own.
    """

    cure: ClassVar[str] = "restore it from a backup, or submit the job again"
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
    history: tuple[Event, ...] = ()
    kind: str = TRAINING
    sweep: Setting | None = None
    task: int | None = None

    def after(
        self, time: float, state: str, *, job_id: str | None = None, detail: str = ""
    ) -> Record:
        """The record after the change to ``state``, with an entry in the history."""
        return replace(
            self,
            state=state,
            job_id=job_id or self.job_id,
            history=(*self.history, Event(time, state, detail or job_id or "")),
        )

    def to_json(self) -> dict[str, Any]:
        """The documented JSON object."""
        return {"version": VERSION, **asdict(self)}
