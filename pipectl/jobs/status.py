"""The state of runs: the batch system's word joined with what the run directory holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from pipectl.batch import Evidence, JobState, JobStatus, get, process, resolve
from pipectl.errors import DataFileError, PipectlError
from pipectl.jobs.culprit import Culprit
from pipectl.jobs.measured import Expected, Measured
from pipectl.jobs.reading import Reading, read
from pipectl.jobs.recovery import continued, recovered
from pipectl.plan import Plan
from pipectl.runs import TRAINING, Record, RunDirectory, read_requeue_error, read_stall


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


_SHORT_PATIENCE_S = 10.0
_MUCH, _FAR_LESS = 0.3, 0.5
"""The others' waiting that is worth a word, and how much less whoever they wait for waits."""


@dataclass(frozen=True)
class RunStatus:
    """Everything known about one run.

    Args:
        record: None where it cannot be read; ``job.reason`` then says why.
        job: the state and where it is known from.
        phase: what the ranks said they do, e.g. ``training``; empty before the first heartbeat, and
            while the next start is yet to come.
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
    def stalled(self) -> str:
        """Who waits for whom, if no rank has moved on for long; else empty."""
        return read_stall(self.run) if self.job.state.alive else ""

    @property
    def expected(self) -> Expected | None:
        """What the plan says of the figures."""
        return None if self.plan is None else Expected.of(self.plan)

    @property
    def predicted_step_s(self) -> float | None:
        """The simulated step time."""
        return None if self.expected is None else self.expected.step_time_s

    @property
    def prediction_ratio(self) -> float | None:
        """Measured over predicted step time."""
        predicted, found = self.predicted_step_s, self.measured.step_time_s
        return found / predicted if predicted and found else None

    @property
    def efficiency(self) -> float | None:
        """See :meth:`pipectl.jobs.measured.Expected.efficiency`."""
        if self.expected is None or not self.measured.step_time_s:
            return None
        return self.expected.efficiency(self.measured.step_time_s)

    @property
    def can_go_on(self) -> bool:
        """Whether it is a training that ended before it was done, whatever ended it."""
        ended = self.job.state.final and self.job.state is not JobState.COMPLETED
        return ended and self.record is not None and self.record.kind == TRAINING

    @property
    def peaks(self) -> list[Peak]:
        """The most memory of every rank that has reported it."""
        expected = self.expected
        predicted = dict(enumerate(() if expected is None else expected.peak_memory_bytes))
        return [
            Peak(int(rank["rank"]), int(rank["peak_bytes"]), predicted.get(int(rank["rank"])))
            for rank in self.ranks
            if rank.get("peak_bytes") is not None
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
    with process.patience(_patience_s(runs)):
        answers = ask([record for record in records if isinstance(record, Record)])
        before, records = (
            records,
            [
                continued(run, record, now) if isinstance(record, Record) else record
                for run, record in zip(runs, records, strict=True)
            ],
        )
        if records != before:
            answers = ask([record for record in records if isinstance(record, Record)])
    found = []
    for run, record in zip(runs, records, strict=True):
        reading = read(run, record if isinstance(record, Record) else None)
        found.append(_status(run, record, reading, answers, now))
    return found


def status(run: RunDirectory, now: float) -> RunStatus:
    """The state of one run; see :func:`statuses`."""
    return statuses([run], now)[0]


def _patience_s(runs: Sequence[RunDirectory]) -> float:
    """How long to wait for batch systems: not long if the files of every run tell something."""
    tell = all(run.heartbeat.exists() or run.exit_code.exists() for run in runs)
    return _SHORT_PATIENCE_S if tell else inf


def _record(run: RunDirectory, now: float) -> Record | DataFileError:
    try:
        return recovered(run, now)
    except DataFileError as error:
        return error


def _status(
    run: RunDirectory,
    record: Record | DataFileError,
    reading: Reading,
    answers: Answers,
    now: float,
) -> RunStatus:
    if isinstance(record, Record):
        job = _job(record, answers.get(record.scheduler, Answer({})), reading, now)
        if job.state is JobState.PREEMPTED and (error := read_requeue_error(run)):
            job = replace(job, reason=f"{job.reason}; it could not be started again: {error}")
    else:
        job = JobStatus(JobState.UNKNOWN, reason=record.message, source="none")
    heartbeat = reading.heartbeat
    return RunStatus(
        run=run,
        record=record if isinstance(record, Record) else None,
        job=job,
        phase="" if job.state.waits else heartbeat.get("state") or "",
        restarts=max(0, (heartbeat.get("attempt") or 1) - 1),
        measured=reading.measured.waiting if job.state.waits else reading.measured,
        plan=_plan(run),
        ranks=tuple(heartbeat.get("ranks") or ()),
        culprit=reading.culprit,
    )


def _job(record: Record, answer: Answer, reading: Reading, now: float) -> JobStatus:
    return resolve(
        Evidence(
            now=now,
            submitted_at=record.submitted_at,
            listed=answer.listed.get(record.job_id or ""),
            query_error=answer.error,
            exit_code=reading.exit_code,
            heartbeat_at=reading.heartbeat_at,
            heartbeat=_said(reading.heartbeat),
            step_time_s=reading.measured.step_time_s,
            cancelled=record.state == "cancelled",
            submitting=record.state == "submitting",
        )
    )


def _said(heartbeat: Mapping[str, Any]) -> str:
    if not heartbeat:
        return ""
    return f"{heartbeat.get('state')}, step {heartbeat.get('step')} of {heartbeat.get('steps')}"


def _plan(run: RunDirectory) -> Plan | None:
    """The plan; a damaged one does not keep the state from being told."""
    try:
        return Plan.load(run.plan)
    except DataFileError:
        return None
