"""The state of runs: what the batch system says, joined with what the run directory holds.

The sources, best first: queue and accounting (both through ``Scheduler.query``), the exit code that
our own script writes, the heartbeats of the ranks. A job that is not listed is never called
completed for that reason; what no source knows stays UNKNOWN.

A record may lack its job: the submission was interrupted, or the job script has submitted itself
again. :func:`recover` finds such jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import NamedTuple

from pipectl.batch import CHECKPOINTED, LOCAL, JobState, JobStatus, get_scheduler, process
from pipectl.errors import DataFileError, PipectlError, UsageError
from pipectl.faults import ErrorReport
from pipectl.files import fault_of_owner, read_limited
from pipectl.plan import Plan
from pipectl.runs import (
    TRAINING,
    Heartbeat,
    Measured,
    RankBeat,
    Record,
    RunDirectory,
    as_typed,
    is_job_id,
    list_runs,
    locked,
    read_errors,
    read_exit_code,
    read_heartbeat,
    read_measured,
    read_requeue_error,
    read_stall,
)
from pipectl.units import format_time

_SHORT_PATIENCE_S = 10.0
_MIN_WAITING, _MAX_SHARE_OF_IT = 0.3, 0.5
"""The others' waiting that is worth a word, and how much less the rank they wait for waits."""
_MIN_PAUSE_S, _MAX_PAUSE_S, _GROWTH = 10.0, 60.0, 1.25
_SUBMIT_GRACE_S = 60.0
_MIN_FRESH_S, _FRESH_STEPS = 60.0, 3
"""How old a heartbeat may be: one is written after each step."""
_STOPPED = "stopped at a checkpoint; `pipectl resume RUN` continues from it"
POLL_S = 0.5
_MAX_UNKNOWN_S = 300.0
BY_TAG = "found by its tag"
_MAX_RUNS = 10
"""How many of the newest runs with the same name are checked."""
_MAX_BYTES = 1000
_ARRAYS: dict[tuple[Path, str], str] = {}
"""Ids of the job arrays that were found, by directory of their runs and tag."""


class Peak(NamedTuple):
    """The most memory a rank has held, the process included, and what was predicted."""

    rank: int
    measured_bytes: int
    predicted_bytes: int | None


class Laggard(NamedTuple):
    """The rank that the others wait for.

    Args:
        node: empty if it is not known.
        share: of its own time that it waits, from 0 to 1.
        others: what the others wait on average.
    """

    rank: int
    node: str
    share: float
    others: float


@dataclass(frozen=True)
class RunStatus:
    """Everything known about one run.

    Args:
        record: None if it cannot be read; ``job.reason`` then says why.
        job: the state and where it is known from.
        phase: what the ranks said they do, e.g. ``training``; empty before the first heartbeat, and
            while the next start is yet to come.
        plan: None before the job has made one.
        errors: the first failure first.
        restarts: how often the job was started again.
        query_error: why the batch system could not be asked; None if it answered.
    """

    run: RunDirectory
    record: Record | None
    job: JobStatus
    phase: str
    measured: Measured
    plan: Plan | None
    ranks: tuple[RankBeat, ...]
    errors: Sequence[ErrorReport]
    restarts: int = 0
    query_error: str | None = None

    @property
    def failure(self) -> ErrorReport | None:
        """What broke it; None if nothing reported a failure."""
        return self.errors[0] if self.errors else None

    @property
    def stalled(self) -> str:
        """Who waits for whom, if no rank has moved on for long; else empty."""
        return read_stall(self.run) if self.job.state.alive else ""

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
        """Share of the ranks' time that the profile's compute explains.

        The operators' profiled time over all micro-batches, divided by ranks times the step time:
        1 for ranks that compute without a pause at the profile's pace.
        """
        plan, step_s = self.plan, self.measured.step_time_s
        if plan is None or not step_s:
            return None
        micro_batches = plan.batch_size / plan.micro_batch_size
        costs = [stage.cost for stage in plan.stages]
        work_s = sum(
            (cost.forward_s + cost.backward_s) * micro_batches + cost.update_s for cost in costs
        )
        return work_s / (plan.ranks * step_s)

    @property
    def can_go_on(self) -> bool:
        """Whether it is a training that ended before it was done, whatever ended it."""
        ended = self.job.state.final and self.job.state is not JobState.COMPLETED
        return ended and self.record is not None and self.record.kind == TRAINING

    @property
    def peaks(self) -> list[Peak]:
        """The most memory of every rank that has reported it."""
        prediction = self.plan.prediction if self.plan else None
        predicted = dict(enumerate(prediction.peak_memory_bytes if prediction else ()))
        return [
            Peak(rank.rank, rank.peak_bytes, predicted.get(rank.rank))
            for rank in self.ranks
            if rank.peak_bytes is not None
        ]

    @property
    def laggard(self) -> Laggard | None:
        """The rank that the others wait for; None if all wait about alike, or little."""
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
        """Steps the run is to make."""
        return self.record.steps if self.record is not None else self.measured.steps


class Answer(NamedTuple):
    """What a batch system said of its jobs, by their ids; or why it could not be asked."""

    listed: Mapping[str, JobStatus]
    error: str | None = None


def _ask(records: Sequence[Record]) -> dict[str, Answer]:
    """Ask every batch system once about the jobs in these records; answers by its name."""
    answers = {}
    for name in {record.scheduler for record in records if record.job_id}:
        ours = [record for record in records if record.scheduler == name]
        ids = [record.job_id for record in ours if record.job_id is not None]
        try:
            since = min(record.submitted_at for record in ours if record.job_id)
            answers[name] = Answer(get_scheduler(name).query(ids, since=since))
        except PipectlError as error:
            answers[name] = Answer({}, error.message)
    return answers


def get_status(run: RunDirectory, now: float) -> RunStatus:
    """The state of one run; see :func:`get_statuses`."""
    return get_statuses([run], now)[0]


def get_statuses(runs: Sequence[RunDirectory], now: float) -> list[RunStatus]:
    """The state of several runs, with one question per batch system."""
    return Poller().get_statuses(runs, now)


class Poller:
    """The state of runs again and again, for somebody who watches them.

    What jobs write is read every time. Batch systems serve many people: they are asked at once
    about a job that is new or has left its exit code since, and else ever more rarely.

    Args:
        clock: in seconds, of any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s, self._due_s = _MIN_PAUSE_S, 0.0
        self._asked: frozenset[tuple[str, str | None]] = frozenset()
        self._answers: Mapping[str, Answer] = {}

    def get_statuses(self, runs: Sequence[RunDirectory], now: float) -> list[RunStatus]:
        """As they are now; what a batch system said may be up to a minute old."""
        records: dict[RunDirectory, Record] = {}
        damage: dict[RunDirectory, str] = {}
        for run in runs:
            try:
                records[run] = recover(run, now)
            except DataFileError as error:
                damage[run] = error.message
        # A batch system that hangs is not waited for if the files say how every run is.
        files_tell = all(run.heartbeat.exists() or run.exit_code.exists() for run in runs)
        with process.patience(_SHORT_PATIENCE_S if files_tell else inf):
            answers = self._ask(records)
            newer = {run: add_next_job(run, record, now) for run, record in records.items()}
            if newer != records:
                records, answers = newer, self._ask(newer)
        statuses = []
        for run in runs:
            heartbeat = read_heartbeat(run)  # after the question, as all files
            record = records.get(run)
            measured = read_measured(run, record)
            answer = answers.get(record.scheduler if record else "", Answer({}))
            if record is None:
                job = JobStatus(JobState.UNKNOWN, reason=damage[run], source="none")
            else:
                job = _job_status(run, record, answer, heartbeat, measured.step_time_s, now)
            statuses.append(
                RunStatus(
                    run=run,
                    record=record,
                    job=job,
                    phase=heartbeat.state if heartbeat and not job.state.waits else "",
                    # Nobody knows the pace of a start that is yet to come.
                    measured=replace(measured, steps=None) if job.state.waits else measured,
                    plan=_read_plan(run),
                    ranks=heartbeat.ranks if heartbeat else (),
                    errors=read_errors(run),
                    restarts=max(0, heartbeat.attempt - 1) if heartbeat else 0,
                    query_error=answer.error,
                )
            )
        return statuses

    def _ask(self, records: Mapping[RunDirectory, Record]) -> Mapping[str, Answer]:
        here = [record for record in records.values() if record.scheduler == LOCAL]
        away = {run: record for run, record in records.items() if record.scheduler != LOCAL}
        jobs = frozenset((record.scheduler, record.job_id) for record in away.values())
        is_known = jobs <= self._asked
        if (
            not is_known
            or self._clock() >= self._due_s
            or any(self._has_ended_since(run, record) for run, record in away.items())
        ):
            self._pause_s = min(self._pause_s * _GROWTH, _MAX_PAUSE_S) if is_known else _MIN_PAUSE_S
            self._asked, self._answers = jobs, _ask(list(away.values()))
            self._due_s = self._clock() + self._pause_s
        return {**self._answers, **_ask(here)}

    def _has_ended_since(self, run: RunDirectory, record: Record) -> bool:
        """Whether a job that was running by the last answer has left its exit code."""
        listed = self._answers.get(record.scheduler, Answer({})).listed.get(record.job_id or "")
        is_running = listed is not None and listed.state.alive and not listed.state.waits
        return is_running and run.exit_code.exists()


def poll(run: RunDirectory, max_unknown_s: float = _MAX_UNKNOWN_S) -> Iterator[RunStatus]:
    """The status of a run, twice a second until the run is over, or unknown for so long."""
    poller, unknown_s = Poller(), 0.0
    while True:
        (status,) = poller.get_statuses([run], time.time())
        yield status
        unknown_s = unknown_s + POLL_S if status.job.state is JobState.UNKNOWN else 0.0
        if status.job.state.final or unknown_s >= max_unknown_s:
            return
        time.sleep(POLL_S)


def _job_status(
    run: RunDirectory,
    record: Record,
    answer: Answer,
    heartbeat: Heartbeat | None,
    step_time_s: float | None,
    now: float,
) -> JobStatus:
    """The state of a run's job, from what the batch system said and what the files say now."""
    beat_at, words = None, "no details"
    if heartbeat:
        words = f"{heartbeat.state}, step {heartbeat.step} of {heartbeat.steps}"
        with suppress(OSError):  # by the clock of the file system, which all nodes share
            beat_at = run.heartbeat.stat().st_mtime
    # After the question, so that a job which ends in between is not taken for one that vanished.
    code = read_exit_code(run)
    job = decide_state(record, answer, now, code, beat_at, words, step_time_s)
    if job.state is JobState.PREEMPTED and (error := read_requeue_error(run)):
        return replace(job, reason=f"{job.reason}; it could not be started again: {error}")
    return job


def decide_state(
    record: Record,
    answer: Answer,
    now: float,
    exit_code: int | None = None,
    beat_at: float | None = None,
    words: str = "",
    step_time_s: float | None = None,
) -> JobStatus:
    """A job's state with its source, and the reason if it is not obvious.

    Args:
        exit_code: of the job script; None if it has left none.
        beat_at, words: time and text of the last heartbeat, ``training, step 12 of 500`` say.
        step_time_s: None if it is not known.
    """
    listed, cancelled = answer.listed.get(record.job_id or ""), record.state == "cancelled"
    own = None if exit_code is None else _end_of(exit_code, cancelled=cancelled)
    if listed is not None and listed.state is not JobState.UNKNOWN:
        return _complete(listed, own, cancelled=cancelled)
    # The code may be of an earlier start, and the next one wait in a queue that did not answer.
    may_go_on = exit_code == CHECKPOINTED and answer.error is not None
    if own is not None and not may_go_on:
        return own
    if cancelled and answer.error is None and listed is None:
        reason = "cancelled, and no longer listed"
        return JobStatus(JobState.CANCELLED, reason=reason, source="record")
    reason = "not listed by the scheduler" if listed is None else listed.reason
    if answer.error is not None:
        reason = f"the scheduler could not be asked: {answer.error}"
    last = "no heartbeat"
    if beat_at is not None:
        age_s = now - beat_at
        last = f"last heartbeat {format_time(max(0.0, age_s))} ago ({words})"
        if abs(age_s) < max(_MIN_FRESH_S, _FRESH_STEPS * (step_time_s or 0.0)):
            return JobStatus(JobState.RUNNING, reason=f"{reason}; {last}", source="heartbeat")
    if now - record.submitted_at < _SUBMIT_GRACE_S:
        return JobStatus(JobState.QUEUED, reason="submitted just now", source="record")
    first = ["its submission was never confirmed"] if record.state == "submitting" else []
    end = "no exit code in the run directory"
    if may_go_on:
        end = "stopped at a checkpoint, and may continue"
    return JobStatus(JobState.UNKNOWN, reason="; ".join([*first, reason, end, last]), source="none")


def _end_of(code: int, *, cancelled: bool) -> JobStatus:
    """A job whose end was asked for is cancelled, unless it was done before that reached it."""
    state = JobState.FAILED if code else JobState.COMPLETED
    reason = f"exit code {code}" if code else ""
    if code == CHECKPOINTED:
        state, reason = JobState.PREEMPTED, _STOPPED
    if cancelled and code:
        state = JobState.CANCELLED
    return JobStatus(state, reason=reason, exit_code=code, source="run directory")


def _complete(listed: JobStatus, own: JobStatus | None, *, cancelled: bool) -> JobStatus:
    """What a batch system lists of a job, with what its script says of its end in ``own``.

    Batch systems list a job that stopped at a checkpoint as failed.
    """
    if own is None:
        is_killed = cancelled and listed.source == "process"
        is_killed &= listed.state is not JobState.RUNNING
        return replace(listed, state=JobState.CANCELLED, reason="") if is_killed else listed
    code = own.exit_code
    if listed.state is JobState.CANCELLED and code == 0:
        return replace(listed, state=JobState.COMPLETED, reason="", exit_code=0)
    if listed.state is JobState.CANCELLED and code == CHECKPOINTED:
        return replace(listed, reason=_STOPPED, exit_code=code)
    if not listed.state.final or listed.exit_code not in (None, CHECKPOINTED):
        return listed
    if listed.source == "process" or code == CHECKPOINTED:
        return replace(own, nodes=listed.nodes, start=listed.start, end=listed.end)
    return replace(listed, exit_code=code)


def _read_plan(run: RunDirectory) -> Plan | None:
    with suppress(OSError):
        return _plan_in(run.plan, run.plan.stat().st_mtime_ns)
    return None


@lru_cache(maxsize=1024)
def _plan_in(path: Path, _changed_at_ns: int) -> Plan | None:
    """The plan in a file as of some time; a damaged one does not hide the state."""
    with suppress(DataFileError):
        return Plan.load(path)
    return None


def find_best(runs: Sequence[RunStatus]) -> RunStatus | None:
    """Of the runs that have completed, the one with the lowest loss.

    That of the evaluation counts if all of them have one, else that of the last step; other metrics
    do not, since nobody says whether more of them is better.

    Returns:
        None if fewer than two can be compared.
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


def recover(run: RunDirectory, now: float) -> Record:
    """The record of a run, with the id of its current job.

    The saved record lacks this id if a submission was interrupted, but reached the queue (the job
    is found by its tag), or if the job script submitted itself again, as on PBS. Nothing is saved
    while another command holds the run, or if the run belongs to another user.

    Raises:
        DataFileError: there is no record, or it is damaged.
    """
    record = Record.load(run.record)
    newer = add_next_job(run, record, now)
    if record.job_id is not None and newer is record:
        return record
    if fault_of_owner(run.path, root=False) is not None:
        return newer
    with locked(run, wait=False) as ours:
        return recover_locked(run, now) if ours else record


def recover_locked(run: RunDirectory, now: float) -> Record:
    """As :func:`recover`, for a caller that holds the lock of the run.

    Raises:
        DataFileError: there is no record, or it is damaged.
    """
    record = Record.load(run.record)
    newer = add_next_job(run, record, now)
    if newer is record and record.job_id is None and record.state == "submitting":
        with suppress(PipectlError):
            if (job_id := _find(run, record)) is not None:
                newer = record.after(now, "submitted", job_id=job_id, detail=BY_TAG)
    if newer is not record:
        with suppress(UsageError):  # it is found in the same way the next time
            newer.save(run.record)
    return newer


def _find(run: RunDirectory, record: Record) -> str | None:
    """The id of the job with the record's tag; arrays are looked for once for all of their runs."""
    scheduler = get_scheduler(record.scheduler)
    if record.task is None:
        return scheduler.find(record.tag)
    key = run.path.parent, record.tag
    if key not in _ARRAYS and (array_id := scheduler.find(record.tag)) is not None:
        _ARRAYS[key] = array_id
    return scheduler.task_id(_ARRAYS[key], record.task) if key in _ARRAYS else None


def add_next_job(run: RunDirectory, record: Record, now: float) -> Record:
    """The record with the job that the job script submitted; the same record if there is none.

    A script submits just before it ends, so look here after asking for the state of its job.
    """
    words: list[str] = []
    with suppress(OSError, ValueError):
        words = read_limited(run.resubmitted, _MAX_BYTES).decode().split()
    if not words or not is_job_id(words[-1]) or words[-1] == record.job_id:
        return record
    detail = f"{words[-1]}, by its own script"
    return record.after(now, "submitted", job_id=words[-1], detail=detail)


def refuse_duplicate(base: Path, name: str, now: float) -> None:
    """Raise if an earlier submission of a job was interrupted, but reached the queue.

    This raises once per run, since it completes the run's record.

    Raises:
        UsageError: naming the run.
    """
    newest, count = None, 0
    for run in reversed(list_runs(base)):
        if not run.name.split("-", 2)[2].startswith(name):  # names may have a number at the end
            continue
        with suppress(DataFileError):
            record = Record.load(run.record)
            if record.name == name:
                count += 1
                if record.job_id is None:
                    record = recover(run, now)
                    # Another detail is of a submission beside this one that has just noted it.
                    if BY_TAG in {event.detail for event in record.history[-1:]}:
                        newest = newest or (run, record)
        if count == _MAX_RUNS:
            break
    if newest is not None:
        run, record = newest
        raise UsageError(
            f"{run.name}: its submission was interrupted, but it is {record.scheduler} job "
            f"{record.job_id}; nothing new was submitted",
            cure=f"follow it with `pipectl status {as_typed(run)}`, or end it with "
            "`pipectl cancel`; for one more run, submit again",
        )
