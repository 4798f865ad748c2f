"""The state of runs: the batch system's word joined with what the run directory holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipectl.batch import Evidence, JobState, JobStatus, get, resolve
from pipectl.errors import DataFileError, PipectlError
from pipectl.jobs.culprit import Culprit, culprit
from pipectl.jobs.measured import Measured, efficiency, measured
from pipectl.jobs.recovery import recovered
from pipectl.plan import Plan
from pipectl.runs import (
    PROFILING,
    Record,
    RunDirectory,
    read_exit_code,
    read_figures,
    read_heartbeat,
)


class Peak(NamedTuple):
    """The most memory a rank has held, the process included, and what was predicted."""

    rank: int
    measured_bytes: int
    predicted_bytes: int | None


class Laggard(NamedTuple):
    """The rank that the others wait for.

    Args:
        node: empty where it is not known.
        share: of its own time that it waits, from 0 to 1.
        others: what the others wait on average.
    """

    rank: int
    node: str
    share: float
    others: float


_MUCH, _FAR_LESS = 0.3, 0.5
"""The others' waiting that is worth a word, and how much less whoever they wait for waits."""


@dataclass(frozen=True)
class RunStatus:
    """Everything known about one run.

    Args:
        record: None where it cannot be read; ``job.reason`` then says why.
        job: the state and where it is known from.
        phase: what the ranks said they do, e.g. ``training``; empty before the first heartbeat.
        plan: None before the job has made one.
        culprit: the first failure that was reported, if any was.
        restarts: how often the job was started again.
    """

    run: RunDirectory
    record: Record | None
    job: JobStatus
    phase: str
    measured: Measured
    plan: Plan | None
    ranks: tuple[Mapping[str, Any], ...]
    culprit: Culprit | None
    restarts: int = 0

    @property
    def predicted_step_s(self) -> float | None:
        """The simulated step time."""
        if self.plan is None or self.plan.prediction is None:
            return None
        return self.plan.prediction.step_time_s

    @property
    def prediction_ratio(self) -> float | None:
        """Measured over predicted step time."""
        predicted, found = self.predicted_step_s, self.measured.step_time_s
        return found / predicted if predicted and found else None

    @property
    def efficiency(self) -> float | None:
        """See :func:`pipectl.jobs.measured.efficiency`."""
        if self.plan is None or not self.measured.step_time_s:
            return None
        return efficiency(self.plan, self.measured.step_time_s)

    @property
    def peaks(self) -> list[Peak]:
        """The most memory of every rank that has reported it."""
        prediction = None if self.plan is None else self.plan.prediction
        predicted = dict(enumerate(() if prediction is None else prediction.peak_memory_bytes))
        return [
            Peak(int(rank["rank"]), int(rank["peak_bytes"]), predicted.get(int(rank["rank"])))
            for rank in self.ranks
            if "peak_bytes" in rank
        ]

    @property
    def laggard(self) -> Laggard | None:
        """The rank that the others wait for; None where all wait about alike, or little."""
        known = [rank for rank in self.ranks if rank.get("waiting") is not None]
        if len(known) < 2:
            return None
        least = min(known, key=lambda rank: rank["waiting"])
        share = float(least["waiting"])
        others = (sum(rank["waiting"] for rank in known) - share) / (len(known) - 1)
        if others < _MUCH or share > _FAR_LESS * others:
            return None
        return Laggard(int(least["rank"]), str(least.get("node", "")), share, others)

    @property
    def steps(self) -> int | None:
        """Steps the run is to make."""
        return self.record.steps if self.record is not None else self.measured.steps


@dataclass(frozen=True)
class Answer:
    """What one batch system said about its jobs."""

    listed: Mapping[str, JobStatus]
    error: str | None = None


Answers = Mapping[str, Answer]
"""By batch system."""


def ask(records: Sequence[Record]) -> dict[str, Answer]:
    """Ask every batch system once; one that fails is not asked again."""
    answers = {}
    for name in {record.scheduler for record in records}:
        ours = [record for record in records if record.scheduler == name and record.job_id]
        ids = [record.job_id for record in ours if record.job_id is not None]
        if not ids:
            continue
        since = min(record.submitted_at for record in ours)
        try:
            answers[name] = Answer(get(name).query(ids, since=since))
        except PipectlError as error:
            answers[name] = Answer({}, error.message)
    return answers


def statuses(
    runs: Sequence[RunDirectory],
    now: float,
    ask: Callable[[Sequence[Record]], Answers] = ask,
) -> list[RunStatus]:
    """The state of several runs, with one question per batch system.

    Args:
        now: seconds since the epoch.
        ask: what the batch systems say of the jobs in these records.
    """
    records = [_record(run, now) for run in runs]
    answers = ask([record for record in records if isinstance(record, Record)])
    return [_status(run, record, answers, now) for run, record in zip(runs, records, strict=True)]


def status(run: RunDirectory, now: float) -> RunStatus:
    """The state of one run; see :func:`statuses`."""
    return statuses([run], now)[0]


def figures(run: RunDirectory, record: Record | None) -> Measured:
    """What a run has done so far; the steps of one that only measures are percent."""
    if record is None or record.kind != PROFILING:
        return measured(read_figures(run))
    heartbeat = _heartbeat(run)
    return Measured(step=heartbeat.get("step") or 0, steps=record.steps)


def _record(run: RunDirectory, now: float) -> Record | DataFileError:
    try:
        return recovered(run, now)
    except DataFileError as error:
        return error


def _status(
    run: RunDirectory, record: Record | DataFileError, answers: Answers, now: float
) -> RunStatus:
    heartbeat = _heartbeat(run)
    if isinstance(record, Record):
        known = record
        job = _job(run, record, answers.get(record.scheduler, Answer({})), heartbeat, now)
    else:
        known = None
        job = JobStatus(JobState.UNKNOWN, reason=record.message, source="none")
    return RunStatus(
        run=run,
        record=known,
        job=job,
        phase=heartbeat.get("state") or "",
        restarts=max(0, (heartbeat.get("attempt") or 1) - 1),
        measured=figures(run, known),
        plan=_plan(run),
        ranks=tuple(heartbeat.get("ranks") or ()),
        culprit=culprit(run),
    )


def _job(
    run: RunDirectory, record: Record, answer: Answer, heartbeat: Mapping[str, Any], now: float
) -> JobStatus:
    return resolve(
        Evidence(
            now=now,
            submitted_at=record.submitted_at,
            listed=answer.listed.get(record.job_id or ""),
            query_error=answer.error,
            exit_code=read_exit_code(run),
            heartbeat_at=_written_at(run.heartbeat) if heartbeat else None,
            heartbeat=_said(heartbeat),
            cancelled=record.state == "cancelled",
            submitting=record.state == "submitting",
        )
    )


def _written_at(path: Path) -> float | None:
    """By the clock of the file system, which all nodes share; their own may be wrong."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _said(heartbeat: Mapping[str, Any]) -> str:
    if not heartbeat:
        return ""
    return f"{heartbeat.get('state')}, step {heartbeat.get('step')} of {heartbeat.get('steps')}"


def _heartbeat(run: RunDirectory) -> Mapping[str, Any]:
    """The last heartbeat; a damaged one counts as none."""
    try:
        return read_heartbeat(run) or {}
    except DataFileError:
        return {}


def _plan(run: RunDirectory) -> Plan | None:
    """The plan; a damaged one does not keep the state from being told."""
    try:
        return Plan.load(run.plan)
    except DataFileError:
        return None
