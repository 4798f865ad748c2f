"""The state of runs, from the batch system and the run directory; :mod:`pipectl.jobs.verdict`
decides what their jobs do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

from pipectl.batch import LOCAL, JobState, JobStatus, get_scheduler
from pipectl.batch.process import TIMEOUT_S
from pipectl.errors import DataFileError, PipectlError, UnknownRunError, UsageError
from pipectl.faults import ErrorReport
from pipectl.files import fault_of_owner, is_there, owner_of
from pipectl.jobs.recover import add_next_job, find_jobs, recover, recover_from_files
from pipectl.jobs.times import NO_TIMES, Times, measure_times
from pipectl.jobs.verdict import Answer, find_job_status
from pipectl.plan import Plan
from pipectl.runs import (
    TRAINING,
    Measured,
    Metrics,
    MetricsLine,
    RankBeat,
    Record,
    RunDirectory,
    StartDirectory,
    read_errors,
    read_exit_code,
    read_exit_warning,
    read_heartbeat,
    read_measured,
    read_speed,
    read_stall,
)
from pipectl.runs.kept_code import CodeWatch, KeptCode, KeptFile
from pipectl.runs.phases import TRAINS, step_before

_SHORT_TIMEOUT_S = 10.0
_MIN_WAITING, _MAX_SHARE_OF_IT = 0.3, 0.5
"""Smallest waiting of the other ranks that counts, and largest waiting, relative to theirs, of the
rank that they wait for."""
_MIN_PAUSE_S, _MAX_PAUSE_S, _GROWTH = 10.0, 60.0, 1.25
POLL_S = 0.5
_OLDER = "it is of an older version of pipectl, whose runs have no directory `starts`"
_OF_OLDER = "look at it with that version"
_MAX_UNKNOWN_S = 300.0


class Peak(NamedTuple):
    """Peak memory of a rank's process, measured and predicted."""

    rank: int
    measured_bytes: int
    predicted_bytes: int | None


class Laggard(NamedTuple):
    """The rank that the others wait for.

    Args:
        node: empty if unknown.
        share: share of its time in which the rank waits, from 0 to 1.
        others: the same of the other ranks, on average.
    """

    rank: int
    node: str
    share: float
    others: float


@dataclass(frozen=True)
class RunStatus:
    """Everything known about one run.

    Args:
        start: its newest start, of which are the job, the phase, the ranks and the errors.
        record: None if it cannot be read; ``job.reason`` then says why.
        job: the state and its source.
        phase: what the ranks do, e.g. ``training``; empty before the first heartbeat, and while the
            job waits for its next start.
        plan: None before the job has made one.
        errors: failures, the first one first.
        restarts: number of times that the job was started again.
        query_error: why the batch system could not be asked; None if it answered.
        metrics: for curves; None if they were not read.
        times: how long it has waited and run.
        is_closed: whether this user may not look at the run; ``job.reason`` then says whose it is.
        code_watch: what was seen of its code; None to look at it when that is asked for.
    """

    run: RunDirectory
    start: StartDirectory
    record: Record | None
    job: JobStatus
    phase: str
    measured: Measured
    plan: Plan | None
    ranks: tuple[RankBeat, ...]
    errors: Sequence[ErrorReport]
    restarts: int = 0
    query_error: str | None = None
    metrics: Metrics | None = None
    times: Times = NO_TIMES
    is_closed: bool = False
    code_watch: CodeWatch | None = None

    @property
    def curve(self) -> list[MetricsLine]:
        """Lines of its metrics for curves by step; see :meth:`pipectl.runs.Metrics.curve`."""
        return [] if self.metrics is None else self.metrics.curve()

    @property
    def failure(self) -> ErrorReport | None:
        """The first failure; None if none was reported."""
        return self.errors[0] if self.errors else None

    @property
    def stalled(self) -> str:
        """Which ranks wait for which, if no rank has made progress for long; else empty."""
        return read_stall(self.start) if self.job.state.alive else ""

    @property
    def warning(self) -> str:
        """What failed after all work of a completed run was done; empty if nothing did."""
        is_complete = self.job.state is JobState.COMPLETED
        return read_exit_warning(self.start) if is_complete else ""

    @cached_property
    def _kept(self) -> CodeWatch:
        return self.code_watch or CodeWatch(self.run)

    @property
    def code(self) -> KeptCode | None:
        """The code that the run keeps; None if it keeps none."""
        return self._kept.code

    @property
    def changed_files(self) -> list[KeptFile]:
        """The user's files that have changed since the submission, of a run that may go on."""
        return [] if self.job.state is JobState.COMPLETED else self._kept.changed

    @property
    def predicted_step_s(self) -> float | None:
        """The simulated step time; None without a prediction."""
        return self.plan.prediction.step_time_s if self.plan and self.plan.prediction else None

    @property
    def prediction_ratio(self) -> float | None:
        """Measured over predicted step time."""
        predicted, step_s = self.predicted_step_s, self.measured.step_time_s
        return step_s / predicted if predicted and step_s else None

    @property
    def efficiency(self) -> float | None:
        """Predicted time in which ranks compute, divided by ranks times measured step time.

        It is 1 if all ranks compute without a pause, as fast as predicted.
        """
        ratio, prediction = self.prediction_ratio, self.plan and self.plan.prediction
        return (1 - prediction.bubble) / ratio if ratio and prediction else None

    @property
    def can_go_on(self) -> bool:
        """Whether it is a training that ended before it was complete."""
        ended = self.job.state.final and self.job.state is not JobState.COMPLETED
        return ended and self.record is not None and self.record.kind == TRAINING

    @property
    def peaks(self) -> list[Peak]:
        """Peak memory of every rank that has reported it."""
        prediction = self.plan.prediction if self.plan else None
        predicted = dict(enumerate(prediction.peak_memory_bytes if prediction else ()))
        return [
            Peak(rank.rank, rank.peak_bytes, predicted.get(rank.rank))
            for rank in self.ranks
            if rank.peak_bytes is not None
        ]

    @property
    def laggard(self) -> Laggard | None:
        """The rank that the others wait for; None if all ranks wait little or about the same, or
        after a failure, which ranks report at different times."""
        if self.job.state.final and self.job.state is not JobState.COMPLETED:
            return None
        waiting = [(each.waiting, each) for each in self.ranks if each.waiting is not None]
        if len(waiting) < 2:
            return None
        share, slowest = min(waiting, key=lambda pair: pair[0])
        others = (sum(each for each, _ in waiting) - share) / (len(waiting) - 1)
        if others < _MIN_WAITING or share > _MAX_SHARE_OF_IT * others:
            return None
        return Laggard(slowest.rank, slowest.node, share, others)

    @property
    def steps(self) -> int | None:
        """Number of steps of the whole run."""
        return self.record.steps if self.record is not None else self.measured.steps

    @property
    def step(self) -> int:
        """Number of completed steps, also if the last one is not recorded yet."""
        return max(self.measured.step, step_before(self.phase) or 0)

    @property
    def progress(self) -> tuple[int, int, str]:
        """Completed steps, all steps (0 before the first), and what the run does."""
        step, activity = self.step, self.phase or self.job.state.value
        if self.job.state.waits and self.job.reason:
            activity = f"{activity}: {self.job.reason}"
        return step, (self.steps or 0) if step else 0, f"{activity}{self.loss_text}"

    @property
    def loss_text(self) -> str:
        """``, loss 2.91``, of the last training step, once it is recorded; while ranks do something
        else, it says so."""
        loss, whose = self.measured.last_loss, "" if self.phase == TRAINS else "training "
        is_known = loss is not None and self.measured.step == self.step
        return f", {whose}loss {loss:.4g}" if is_known else ""

    @property
    def last_step(self) -> int | None:
        """The step at which the end of the walltime stops a training, at the measured step time;
        None if it is done by then, or if that is unknown."""
        left_s, remaining_s = self.times.left_s, self.measured.remaining_s
        if self.record is None or self.record.kind != TRAINING or left_s is None:
            return None
        usable_s = max(0.0, left_s - (self.record.lead_time_s or 0))
        if not self.measured.step_time_s or remaining_s is None or remaining_s <= usable_s:
            return None
        return self.measured.step + int(usable_s / self.measured.step_time_s)

    @property
    def exit_code(self) -> int:
        """0 for a completed run, else the exit code of the first failure."""
        if self.job.state is JobState.COMPLETED:
            return 0
        if self.job.state is JobState.UNKNOWN:
            return UnknownRunError.exit_code
        return self.failure.exit_code if self.failure else 1


class _Query(NamedTuple):
    """The last query of a batch system.

    Args:
        jobs: ids of the jobs, and paths of runs whose job was not found.
        pause_s: time until the next query, which is due at ``due_s``.
    """

    jobs: frozenset[str]
    answer: Answer
    pause_s: float
    due_s: float


def fault_of_reading(run: RunDirectory) -> str:
    """Whose run it is if this user may not look at it; else empty."""
    is_open = os.access(run.path, os.R_OK | os.X_OK)
    return "" if is_open or not (owner := owner_of(run.path)) else f"not readable: owner {owner}"


def get_status(run: RunDirectory, now: float) -> RunStatus:
    """The state of one run; see :func:`get_statuses`."""
    return get_statuses([run], now)[0]


def get_statuses(runs: Sequence[RunDirectory], now: float) -> list[RunStatus]:
    """The state of several runs, with one query per batch system."""
    return Poller().get_statuses(runs, now)


class Poller:
    """The state of runs that are watched.

    The files of jobs are read every time, metrics from where the last reading ended. Batch systems
    serve many users: they are asked at once about jobs that are new or have written their exit
    code, and else less and less often.

    Args:
        clock: clock in seconds, with any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queries: dict[tuple[str, str], _Query] = {}
        self._metrics: dict[RunDirectory, Metrics] = {}
        self._codes: dict[RunDirectory, CodeWatch] = {}

    def get_statuses(self, runs: Sequence[RunDirectory], now: float) -> list[RunStatus]:
        """The states now; answers of a batch system may be up to a minute old."""
        records: dict[RunDirectory, Record] = {}
        damage: dict[RunDirectory, str] = {}
        closed = {run: fault for run in runs if (fault := fault_of_reading(run))}
        readable = [run for run in runs if run not in closed]
        for run in readable:
            try:
                records[run] = recover_from_files(run, now)
            except DataFileError as error:
                damage[run] = error.message
        # Do not wait for a batch system that hangs if the files tell the state of every run.
        newest = (run.start for run in readable)
        files_tell = all(is_there(each.heartbeat) or is_there(each.exit_code) for each in newest)
        timeout_s = _SHORT_TIMEOUT_S if files_tell else TIMEOUT_S
        answers = self._query(records, now, timeout_s)
        newer = {run: add_next_job(run, record, now) for run, record in records.items()}
        if newer != records:
            records = newer
            answers = self._query(records, now, timeout_s)
        self._metrics = {run: self._metrics.get(run) or Metrics(run.metrics) for run in runs}
        return [
            _closed(run, closed[run])
            if run in closed
            else self._status_of(
                run, records.get(run) or damage[run], answers.get(run, Answer({})), now
            )
            for run in runs
        ]

    def _status_of(
        self, run: RunDirectory, found: Record | str, answer: Answer, now: float
    ) -> RunStatus:
        """The state of a run that this user may look at.

        Args:
            found: its record, or why that cannot be read.
            answer: of its batch system; all files are read after it.
        """
        start, record = run.start, found if isinstance(found, Record) else None
        heartbeat = read_heartbeat(start)
        measured = read_measured(run, record, heartbeat, self._metrics[run])
        if not isinstance(found, Record):
            job = JobStatus(JobState.UNKNOWN, reason=found, source="none")
        elif not is_there(run.starts):
            job = JobStatus(JobState.UNKNOWN, reason=_OLDER, source="none", hint=_OF_OLDER)
        else:
            job = find_job_status(start, found, answer, heartbeat, measured.step_time_s, now)
        if job.state.final and measured.timed_steps:
            measured = replace(measured, **vars(read_speed(run, self._metrics[run])))
        restarts = max(0, heartbeat.attempt - 1) if heartbeat else 0
        return RunStatus(
            run=run,
            start=start,
            record=record,
            job=job,
            phase=heartbeat.state if heartbeat and not job.state.waits else "",
            # The speed of a start that is yet to come is unknown.
            measured=replace(measured, steps=None) if job.state.waits else measured,
            plan=_read_plan(run),
            ranks=heartbeat.ranks if heartbeat else (),
            errors=read_errors(start),
            restarts=restarts,
            query_error=answer.error,
            metrics=self._metrics[run],
            code_watch=self._codes.setdefault(run, CodeWatch(run, self._clock)),
            times=measure_times(start, record, job, restarts, now) if record else NO_TIMES,
        )

    def _query(
        self, records: dict[RunDirectory, Record], now: float, timeout_s: float
    ) -> dict[RunDirectory, Answer]:
        """The newest answer of every batch system, or cluster of one, by run; ``records`` get the
        jobs of interrupted submissions."""
        answers: dict[RunDirectory, Answer] = {}
        places: dict[tuple[str, str], dict[RunDirectory, Record]] = {}
        for run, record in records.items():
            places.setdefault(_place_of(record), {})[run] = record
        for place, ours in places.items():
            name, last, jobs = place[0], self._queries.get(place), _names_of_jobs(ours)
            is_known = last is not None and jobs <= last.jobs
            if last is None or name == LOCAL or not is_known or self._is_due(last, ours):
                answer = _ask(name, ours, now, timeout_s)
                pause_s = _MIN_PAUSE_S
                if last is not None and is_known:
                    pause_s = min(last.pause_s * _GROWTH, _MAX_PAUSE_S)
                jobs |= _names_of_jobs(ours)
                last = _Query(jobs, answer, pause_s, self._clock() + pause_s)
                self._queries[place] = last
            answers.update(dict.fromkeys(ours, last.answer))
            records.update(ours)
        return answers

    def _is_due(self, last: _Query, records: Mapping[RunDirectory, Record]) -> bool:
        """Whether it is time to ask again, or a job that ran has written its exit code."""
        if self._clock() >= last.due_s:
            return True
        jobs = ((run, last.answer.listed.get(each.job_id or "")) for run, each in records.items())
        running = (run for run, job in jobs if job and job.state.alive and not job.state.waits)
        return any(is_there(run.start.exit_code) for run in running)


def _closed(run: RunDirectory, reason: str) -> RunStatus:
    """The state of a run that this user may not look at."""
    return RunStatus(
        run=run,
        start=run.start,
        record=None,
        job=JobStatus(JobState.UNKNOWN, reason=reason, source="none"),
        phase="",
        measured=Measured(),
        plan=None,
        ranks=(),
        errors=(),
        is_closed=True,
    )


def _ask(name: str, records: dict[RunDirectory, Record], now: float, timeout_s: float) -> Answer:
    """Ask a batch system once about its jobs; ``records`` get those of interrupted submissions."""
    try:
        unsure = [run for run, each in records.items() if each.is_unsure]
        unsure = [run for run in unsure if fault_of_owner(run.path, root=False) is None]
        found = find_jobs((records[run] for run in unsure), timeout_s)
        for run in unsure if found else []:
            records[run] = recover(run, now, found=found)
        times = {each.job_id: each.submitted_at for each in records.values() if each.job_id}
        if not times:
            return Answer({})
        written = {
            each.job_id: read_exit_code(run.start) for run, each in records.items() if each.job_id
        }
        codes = {job: code for job, code in written.items() if code is not None}
        scheduler = get_scheduler(name, timeout_s, codes)
        return Answer(scheduler.query(list(times), since=min(times.values())))
    except PipectlError as error:
        return Answer({}, error.message)


def _place_of(record: Record) -> tuple[str, str]:
    """The batch system of a run, and its cluster: each is asked by itself, so that one that does
    not answer hides no job of another."""
    cluster = record.clusters
    if record.job_id is not None:
        with suppress(UsageError):  # a record may name any batch system
            cluster = get_scheduler(record.scheduler).cluster_of(record.job_id)
    return record.scheduler, cluster


def _names_of_jobs(records: Mapping[RunDirectory, Record]) -> frozenset[str]:
    """The id of every job; the path of the run while its job is not known."""
    return frozenset(each.job_id or str(run.path) for run, each in records.items())


def poll(run: RunDirectory, max_unknown_s: float = _MAX_UNKNOWN_S) -> Iterator[RunStatus]:
    """The status of a run, twice a second until the run is over, or its state has been unknown for
    ``max_unknown_s``."""
    poller, unknown_s = Poller(), 0.0
    while True:
        (status,) = poller.get_statuses([run], time.time())
        yield status
        unknown_s = unknown_s + POLL_S if status.job.state is JobState.UNKNOWN else 0.0
        if status.job.state.final or unknown_s >= max_unknown_s:
            return
        time.sleep(POLL_S)


def _read_plan(run: RunDirectory) -> Plan | None:
    """The plan of a run; None if there is none, or if it is damaged."""
    with suppress(OSError, DataFileError):
        return _plan_in(run.plan, run.plan.stat().st_mtime_ns)
    return None


@lru_cache(maxsize=1024)
def _plan_in(path: Path, _changed_at_ns: int) -> Plan:
    """The plan in a file as of some time."""
    return Plan.load(path)


def find_best(runs: Sequence[RunStatus]) -> RunStatus | None:
    """The completed run with the lowest loss; None if fewer than two can be compared.

    The loss of the evaluation counts if all runs have one, else that of the last step. Other
    metrics do not count, because it is unknown whether more is better.
    """
    completed = [status for status in runs if status.job.state is JobState.COMPLETED]
    all_evaluated = all("loss" in status.measured.evaluation for status in completed)
    losses = []
    for index, status in enumerate(completed):
        measured = status.measured
        loss = measured.evaluation["loss"] if all_evaluated else measured.last_loss
        if loss is not None:
            losses.append((loss, index))
    return completed[min(losses)[1]] if len(losses) > 1 else None
