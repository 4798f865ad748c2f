"""``record.json``: what was submitted, and what happened to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipectl.fields import Reader
from pipectl.files import read_json, write_json

VERSION = 1
STATES = ("submitting", "submitted", "cancelled")
TRAINING, PROFILING, REHEARSAL = "training", "profile", "rehearsal"
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+\[\]-]{0,299}")
_LATEST = 2.5e11
"""Before the year 10000, where calendars end."""
MAX_BYTES = 2**20
_CURE = "restore it from a backup, or submit the job again"


def is_job_id(text: str) -> bool:
    """Whether a text can be the id of a job, which commands take as an argument."""
    return bool(_JOB_ID.fullmatch(text))


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

    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
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

    name: str
    scheduler: str
    tag: str
    submitted_at: float
    ranks: int
    nodes: int
    steps: int
    state: str = "submitting"
    job_id: str | None = None
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

    def save(self, path: Path) -> None:
        """Write ``record.json`` whole."""
        write_json(path, {"version": VERSION, **asdict(self)})

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read ``record.json``.

        Raises:
            DataFileError: missing, damaged, or of another version.
        """
        return cls.from_json(read_json(path, cure=_CURE, limit=MAX_BYTES), file=str(path))

    @classmethod
    def from_json(cls, document: dict[str, Any], *, file: str) -> Record:
        """A record from its JSON object; see :meth:`load`."""
        reader = Reader(document, file=file, cure=_CURE)
        reader.check_version(VERSION)
        state = reader.text("state")
        if state not in STATES:
            raise reader.error("state", f"must be one of {', '.join(STATES)}, not {state!r}")
        job_id = reader.optional_text("job_id")
        if job_id is not None and not is_job_id(job_id):
            raise reader.error("job_id", f"{job_id[:80]!r} is no id of a job")
        submitted_at = reader.number("submitted_at")
        if submitted_at > _LATEST:
            raise reader.error("submitted_at", "must be in seconds since the epoch")
        return cls(
            name=reader.text("name"),
            scheduler=reader.text("scheduler"),
            tag=reader.text("tag"),
            submitted_at=submitted_at,
            ranks=reader.integer("ranks", minimum=1),
            nodes=reader.integer("nodes", minimum=1),
            steps=reader.integer("steps"),
            state=state,
            job_id=job_id,
            history=tuple(_event(item) for item in reader.items("history", [])),
            kind=reader.text("kind", TRAINING),
            sweep=_setting(reader.section("sweep")) if "sweep" in reader else None,
            task=reader.optional_integer("task"),
        )


def _event(item: Reader) -> Event:
    return Event(item.number("time"), item.text("what"), item.text("detail", ""))


def _setting(item: Reader) -> Setting:
    name = item.text("name")
    if "/" in name or name.startswith("."):
        raise item.error("name", f"{name[:80]!r} is no name of a sweep")
    return Setting(name, item.mapping("values"))
