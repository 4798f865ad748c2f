"""When a job would be done, by partition or queue and by number of nodes.

The steps take the time that is predicted for the best plan on so many nodes; to these come the
pauses of the latest run of the job (:mod:`pipectl.runs.pauses`). A start of a run ends
``checkpoint.lead_time`` before its walltime. If the training is not done by then, the run is
requeued, and taken to wait as long as before its first start, or as long as the batch system holds
back what is requeued.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import TypedDict

from pipectl.batch import (
    HERE,
    QUEUES_TIMEOUT_S,
    JobRequest,
    NoAnswerError,
    Queue,
    Scheduler,
    get_scheduler,
)
from pipectl.errors import PipectlError, SchedulerError
from pipectl.jobs.job import Job, change, make_job, request_at
from pipectl.jobs.output import is_fresh
from pipectl.jobs.plan_search import PlanSearch
from pipectl.jobs.planning import PlanInputs
from pipectl.planner.explain.scaling import Count, scaling
from pipectl.profile import Profile
from pipectl.runs import Pauses, read_pauses
from pipectl.spec import JobSpec, profile_key
from pipectl.units import format_clock, plural

MAX_QUESTIONS = 24
"""Maximum number of starts that a batch system is asked for."""
_MAX_REQUEUES_ASKED = 3
"""Maximum number of requeues of a row for whose starts it is asked."""
_MAX_WORDS = 200
_PREFIX = re.compile(r"^\w+: error: ")
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Prospect:
    """What becomes of a job in one partition or queue, on one number of nodes.

    Args:
        nodes: number of nodes.
        step_s: predicted time of a step.
        walltime_s: of each start; None if there is no limit.
        limit_s: the longest walltime that the partition or queue allows; None if there is no limit.
        starts_at: expected start; None if it is not known.
        run_s: time of all starts together, without the waits between them.
        start_run_s: of that, time of a start whose walltime ends before the training does.
        requeues: how often one does.
        done_at: expected end; None if it is not known.
        enough_s: walltime with which no requeue is needed.
        allowed_requeues: ``checkpoint.max_requeues``.
        queue: name of the partition or queue; empty without one.
        to: what the job has to name to get there; empty to leave it as it is.
        reason: why the job cannot run there, or why its start is not known; may be empty.
        is_refused: whether it cannot run there.
        is_like_profile: whether the nodes are of the kinds that were profiled, as far as the batch
            system knows them.
    """

    nodes: int
    step_s: float
    run_s: float
    walltime_s: int | None = None
    limit_s: int | None = None
    starts_at: float | None = None
    start_run_s: float = 0.0
    requeues: int = 0
    done_at: float | None = None
    enough_s: float = 0.0
    allowed_requeues: int = 0
    queue: str = ""
    to: str = ""
    reason: str = ""
    is_refused: bool = False
    is_like_profile: bool = True

    @property
    def node_hours(self) -> float:
        """Node-hours of all starts."""
        return self.nodes * self.run_s / _SECONDS_PER_HOUR

    @property
    def needs_resume(self) -> bool:
        """Whether the training is not done after the last requeue that the job allows."""
        return self.requeues > self.allowed_requeues


class ProspectJson(TypedDict):
    """What becomes of the job in one partition or queue, on one number of nodes.

    Args:
        queue: the partition or queue; null without one.
        nodes: number of nodes.
        step_time_s: predicted time of a step.
        walltime_s: of each start; null if there is no limit.
        starts_at, done_at: expected start and end; null if they are not known.
        run_s: time of all starts together, without the waits between them.
        requeues: how often a walltime ends before the training does.
        needs_resume: whether that is more often than `checkpoint.max_requeues` allows.
        node_hours: cost of all starts.
        soonest, cheapest: whether `submit --soonest` and `submit --cheapest` take it, with the same
            `--compare`.
        refused: whether the batch system refuses the job there.
        reason: why it does, or why the start is not known; else null.
    """

    queue: str | None
    nodes: int
    step_time_s: float
    walltime_s: int | None
    starts_at: float | None
    done_at: float | None
    run_s: float
    requeues: int
    needs_resume: bool
    node_hours: float
    soonest: bool
    cheapest: bool
    refused: bool
    reason: str | None


class ProspectsJson(TypedDict):
    """When a job would be done.

    Args:
        scheduler: name of the batch system.
        asked_at: when it was asked.
        rows: by partition or queue, and by number of nodes.
        left_out: why a partition or queue has no row for some numbers of nodes, by its name.
        infeasible: why no plan fits, by number of nodes.
        pauses: what a run takes besides its steps: `start_s` for each start, `step_s` for each
            step, `end_s`, and the `run` that they are of; empty if no run has shown them.
        cut_short: whether Ctrl-C ended planning or asking.
    """

    scheduler: str
    asked_at: float
    rows: list[ProspectJson]
    left_out: dict[str, str]
    infeasible: dict[str, str]
    pauses: dict[str, float | str]
    cut_short: bool


@dataclass
class Prospects:
    """All prospects of a job.

    Args:
        system: its batch system.
        now: when that was asked, in seconds since the epoch.
        pauses: see :class:`Pauses`.
        rows: by partition or queue, the job's own first, then by number of nodes.
        left_out, infeasible: see :class:`ProspectsJson`.
        cut_short: see :class:`ProspectsJson`.
        compared: numbers of nodes that were asked for; empty if they are those of the job.
    """

    spec: JobSpec
    system: Scheduler
    now: float
    pauses: Pauses
    rows: list[Prospect] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    infeasible: dict[int, str] = field(default_factory=dict)
    cut_short: bool = False
    compared: tuple[int, ...] = ()

    @property
    def has_queue(self) -> bool:
        """Whether jobs wait there."""
        return not self.system.runs_in_shell

    @property
    def _choices(self) -> list[Prospect]:
        """The rows that may be taken: those that train to the end by themselves, if there are."""
        usable = [row for row in self.rows if not row.is_refused]
        return [row for row in usable if not row.needs_resume] or usable

    @property
    def soonest(self) -> Prospect | None:
        """The row that is done first; None if the start of none is known."""
        known = [row for row in self._choices if row.done_at is not None]
        return min(known, key=lambda row: (row.done_at, row.node_hours), default=None)

    @property
    def cheapest(self) -> Prospect | None:
        """The row with the fewest node-hours, of equal ones the one that is done first."""
        return min(
            self._choices,
            key=lambda row: (row.node_hours, inf if row.done_at is None else row.done_at),
            default=None,
        )

    def to_json(self) -> ProspectsJson:
        """The documented object."""
        soonest, cheapest = self.soonest, self.cheapest
        return {
            "scheduler": self.system.name,
            "asked_at": self.now,
            "rows": [
                {
                    "queue": row.queue or None,
                    "nodes": row.nodes,
                    "step_time_s": row.step_s,
                    "walltime_s": row.walltime_s,
                    "starts_at": row.starts_at,
                    "done_at": row.done_at,
                    "run_s": row.run_s,
                    "requeues": row.requeues,
                    "needs_resume": row.needs_resume,
                    "node_hours": row.node_hours,
                    "soonest": row is soonest,
                    "cheapest": row is cheapest,
                    "refused": row.is_refused,
                    "reason": row.reason or None,
                }
                for row in self.rows
            ],
            "left_out": self.left_out,
            "infeasible": {str(nodes): why for nodes, why in self.infeasible.items()},
            "pauses": self.pauses._asdict(),
            "cut_short": self.cut_short,
        }


def find_prospects(
    inputs: PlanInputs,
    counts: Sequence[int],
    search: PlanSearch,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.time,
) -> Prospects:
    """Plan for every number of nodes, and ask the batch system when the job would start.

    Args:
        inputs: of a job.
        counts: numbers of nodes.
        tell: called with a description of what is done next.
        clock: seconds since the epoch.

    Raises:
        SchedulerError: the batch system lists no partitions or queues.
        UsageError: the job may go to several clusters.
    """
    spec = inputs.spec
    assert spec is not None
    system, folded = get_scheduler(inputs.batch_system, QUEUES_TIMEOUT_S), inputs.fold()
    job = make_job(at(spec, system, nodes=min(counts)), system.name)
    # A package has no section of its own in which a queue could be named.
    queues: Sequence[Queue] = (Queue("", default=True),)
    if system.queue_key and hasattr(spec, system.name):
        queues = system.queues_for(request_at(job, clock(), needs_mpi=False))
    if not queues:
        raise SchedulerError(f"{system.title} lists no {system.queue_key}", hint="ask the site")
    result = scaling(
        folded.profile, folded.cluster, folded.request, counts, search.plan,
        lambda count: tell(f"planning for {plural(count, 'node')}"),
    )  # fmt: skip
    pauses = read_pauses(Path(spec.output.directory), spec.name)
    found = Prospects(spec, system, clock(), pauses)
    found.infeasible = {each.nodes: each.reason for each in result.counts if each.plan is None}
    fitting = [each for each in result.counts if each.plan is not None]
    ask = _Questions(system, search, found.now, tell)
    in_queues = partial(_in_queues, queues=queues, ask=ask)
    found.rows = list((in_queues if found.has_queue else _here)(found, job, fitting))
    found.cut_short = search.cut_short
    return found


def _here(found: Prospects, job: Job, counts: Sequence[Count]) -> Iterator[Prospect]:
    """Rows where jobs start at once, and have no walltime."""
    for count in counts:
        place = at(found.spec, found.system, nodes=count.nodes)
        request = request_at(replace(job, spec=place), found.now, needs_mpi=False)
        if (misfit := found.system.misfit(Queue(""), request)) is not None:
            found.infeasible[count.nodes] = misfit.fault
            continue
        row = _row(found.spec, count, found.pauses)
        left_s = found.system.walltime_of(request) if found.system.name == HERE else None
        if left_s is not None and row.run_s > left_s:
            fault = f"the allocation ends before that, in {format_clock(left_s)}"
            row = replace(row, reason=fault)
        yield replace(row, starts_at=found.now, done_at=found.now + row.run_s)


def _in_queues(
    found: Prospects,
    job: Job,
    counts: Sequence[Count],
    queues: Sequence[Queue],
    ask: _Questions,
) -> Iterator[Prospect]:
    """Rows of partitions or queues, those of the job first; what has none is noted."""
    spec, system = found.spec, found.system
    named, _, server = _queue_of(spec, system).partition("@")
    names = [name for name in named.split(",") if name]
    own = [each for each in queues if (each.name in names if names else each.default)]
    kinds = {kind[1:] for queue in own for kind in queue.kinds}
    for queue in sorted(queues, key=lambda queue: queue not in own):
        if fault := _fault_of(queue):
            found.left_out[queue.name] = fault
            continue
        is_like_profile = not kinds or {kind[1:] for kind in queue.kinds} <= kinds
        to = f"{queue.name}@{server}" if server else queue.name
        to = "" if queue.default and not names else to
        for count in counts:
            place = at(spec, system, nodes=count.nodes, to=to, limit_s=queue.walltime_s)
            request = request_at(replace(job, spec=place), found.now, needs_mpi=False)
            if (misfit := system.misfit(queue, request)) is not None:
                found.left_out.setdefault(queue.name, misfit.fault)
                continue
            walltime_s = system.walltime_of(request) or queue.walltime_s
            row = replace(
                _row(spec, count, found.pauses, walltime_s, request.lead_time_s),
                queue=queue.name,
                to=to,
                limit_s=queue.walltime_s,
                is_like_profile=is_like_profile,
            )
            yield row if row.is_refused else ask.about(row, queue, request)


def at(
    spec: JobSpec,
    system: Scheduler,
    *,
    nodes: int,
    to: str = "",
    limit_s: int | None = None,
) -> JobSpec:
    """The job in a partition or queue, on a number of nodes, with the walltime that it allows.

    Args:
        to: its name, for PBS with the server; empty to leave that of the job.
        limit_s: maximum walltime; None if there is none.
    """
    walltime_s = min(spec.resources.walltime, limit_s or spec.resources.walltime)
    sections: dict[str, dict[str, object]] = {"resources": {"nodes": nodes, "walltime": walltime_s}}
    if to:
        sections[system.name] = {system.queue_key: to}
    return change(spec, **sections)


def choose(found: Prospects, row: Prospect, inputs: PlanInputs) -> tuple[JobSpec, Profile | None]:
    """The job in the partition or queue of a row, on its nodes.

    Returns:
        The job, and the profile that it was planned with, if that holds there; None leaves it to
        the submission to find or measure one.
    """
    spec = at(found.spec, found.system, nodes=row.nodes, to=row.to, limit_s=row.walltime_s)
    profile = inputs.profile
    holds = row.is_like_profile and profile.fingerprint is not None
    if not row.to or not holds or not is_fresh(found.spec, profile):
        return spec, None
    # The key has the name of the partition, which stands for the kind of its nodes.
    return spec, replace(profile, key=profile.key and profile_key(spec))


class _Questions:
    """What a batch system is asked, one question after the other, until it is silent."""

    def __init__(
        self, system: Scheduler, search: PlanSearch, now: float, tell: Callable[[str], None]
    ) -> None:
        self._system, self._search, self._now, self._tell = system, search, now, tell
        self._asked, self._silence = 0, ""

    def about(self, row: Prospect, queue: Queue, request: JobRequest) -> Prospect:
        """The row with its start and end, or why they are not known."""
        if self._search.expired():
            return replace(row, reason="not asked: interrupted")
        if self._silence or self._asked >= MAX_QUESTIONS:
            most = f"not asked: a command asks for at most {MAX_QUESTIONS} starts"
            return replace(row, reason=self._silence or most)
        self._asked += 1
        self._tell(f"asking {self._system.title}: {queue.name}, {plural(row.nodes, 'node')}")
        try:
            starts_at = self._system.forecast(request, queue, self._now)
        except NoAnswerError as error:
            self._silence = _in_a_line(error)
            return replace(row, reason=self._silence)
        except SchedulerError as error:
            return replace(row, reason=_in_a_line(error), is_refused=True)
        if starts_at is None:
            return replace(row, reason=f"{self._system.title} does not say when it would start")
        starts_at = max(starts_at, self._now)
        begins, left_s, waited_s = starts_at, row.run_s, 0.0
        for requeue in range(row.requeues):
            ended, left_s = begins + row.start_run_s, left_s - row.start_run_s
            if requeue < _MAX_REQUEUES_ASKED:  # those after it wait as long as that one
                begins = self._system.forecast_again(request, queue, self._now, starts_at, ended)
                waited_s = begins - ended
            else:
                begins = ended + waited_s
        return replace(row, starts_at=starts_at, done_at=begins + left_s)


def _row(
    spec: JobSpec,
    count: Count,
    pauses: Pauses,
    walltime_s: int | None = None,
    lead_time_s: int = 0,
) -> Prospect:
    """The row of a partition or queue, before its start is known.

    Args:
        walltime_s: of each start; None if there is no limit.
        lead_time_s: how long before its end a start stops that does not train to the end.
    """
    step_s, steps = count.step_s or 0.0, spec.training.steps
    each_s = step_s + pauses.step_s
    train_s = steps * each_s + pauses.end_s
    usable_s = inf if walltime_s is None else walltime_s - lead_time_s - pauses.start_s
    fault, starts, start_run_s = "", 1, 0.0
    if train_s > usable_s:
        steps_per_start = int(usable_s / each_s)
        start_run_s = pauses.start_s + steps_per_start * each_s
        if steps_per_start < 1:
            fault = f"no step ends in its walltime, {format_clock(walltime_s or 0)}"
        starts = ceil(steps / max(1, steps_per_start))
    return Prospect(
        count.nodes,
        step_s,
        run_s=train_s + starts * pauses.start_s,
        walltime_s=walltime_s,
        start_run_s=start_run_s,
        requeues=starts - 1,
        enough_s=train_s + pauses.start_s + lead_time_s,
        allowed_requeues=spec.checkpoint.max_requeues,
        reason=fault,
        is_refused=bool(fault),
    )


def _queue_of(spec: JobSpec, system: Scheduler) -> str:
    """The partitions or the queue that a job names; empty if it names none, or there are none."""
    section = getattr(spec, system.name, None)
    return getattr(section, system.queue_key or "_", None) or ""


def _fault_of(queue: Queue) -> str:
    """Why nobody or not this user can use a partition or queue; empty if it can be used."""
    if not queue.for_user:
        return "not for this user"
    if not queue.open:
        return "takes no jobs"
    return "" if queue.has_nodes else "without nodes"


def _in_a_line(error: PipectlError) -> str:
    """The words of a batch system, without what comes before them."""
    lines = [line.strip() for line in error.message.splitlines()]
    words = "; ".join(_PREFIX.sub("", line) for line in lines[1:] or lines if line)
    return words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]}…"
