"""Slurm through its command line tools: sbatch, squeue, sacct, scontrol and scancel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from math import inf
from pathlib import Path

from pipectl.batch import process
from pipectl.batch.protocol import JobRequest, JobState, JobStatus
from pipectl.batch.slurm_script import render_script
from pipectl.batch.slurm_text import (
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    Listed,
    array_of,
    is_id,
    parse_exit_code,
    parse_sacct,
    parse_shown,
    parse_squeue,
    submitted_id,
)
from pipectl.batch.submission import Program, job_number
from pipectl.errors import SchedulerError

_CURE = "run this where Slurm's commands are installed, or set launch.scheduler: local"
_UNSURE = ("timed out", "unable to contact", "connection failure", "zero bytes")
_CLOCK_SKEW_S = 60.0

# Variables that change what the commands do, over the job script's own directives, or come from a
# job around this one.
_OVERRIDES = ("SBATCH_", "SLURM_", "SQUEUE_", "SACCT_", "SCANCEL_")
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})

_ADVICE = (
    (
        "configuration source",
        "Slurm's controller cannot be reached; check the login node or SLURM_CONF,\n"
        "or run on this machine with --scheduler local",
    ),
    ("partition", "set slurm.partition; `sinfo -s` lists what there is"),
    ("account", "set slurm.account; `sacctmgr show associations user=$USER` lists yours"),
    ("qos", "set slurm.qos; `sacctmgr show qos` lists what there is"),
    ("gres", "set resources.gpus_per_node to what `sinfo -o '%P %G'` shows"),
    ("memory", "lower resources.memory_per_node; `sinfo -o '%P %m'` shows MB per node"),
    ("node configuration", "lower resources; `sinfo -o '%P %D %c %m %G'` shows the nodes"),
    ("time limit", "lower resources.walltime; `sinfo -o '%P %l'` shows the limits"),
    ("unrecognized option", "correct slurm.directives"),
)

_SBATCH = Program(
    ("sbatch", "--parsable"),
    submitted_id,
    _UNSURE,
    _ADVICE,
    marked=lambda tag: f"with the comment {tag!r}",
    look="squeue --me -o '%i %k'",
)


class SlurmScheduler:
    """Slurm, version 20.02 or later.

    Args:
        timeout_s: after which a command is given up.
    """

    name = "slurm"

    def __init__(self, timeout_s: float = process.TIMEOUT_S) -> None:
        self._timeout_s = timeout_s

    def render(self, request: JobRequest) -> str:
        """See :class:`~pipectl.batch.protocol.Scheduler`."""
        return render_script(request)

    def submit(self, script: Path, request: JobRequest) -> str:
        """Submit with sbatch; when its answer is lost, the job is looked up by its tag."""
        return _SBATCH.submit(script, request, self._run, self.find)

    def query(self, ids: Sequence[str], *, since: float | None = None) -> Mapping[str, JobStatus]:
        """States from squeue; for jobs that are over or not listed from the accounting too."""
        ids = list(filter(is_id, ids))  # a damaged record must not hide the other jobs
        if not ids:
            return {}
        jobs = list(dict.fromkeys(map(array_of, ids)))
        # A doubled id keeps squeue from failing for a single id that it does not know.
        rows = self._squeue("-j", ",".join([*jobs, jobs[0]]))
        found = {row.job_id: row.status for row in rows}
        over = [job_id for job_id in ids if job_id not in found or found[job_id].state.final]
        accounts = self._accounting(over, since)
        merged = {job_id: _merge(found.get(job_id), accounts.get(job_id)) for job_id in over}
        known = {job_id: status for job_id, status in merged.items() if status is not None}
        found |= self._with_exit_codes(known)
        return {job_id: found[job_id] for job_id in ids if job_id in found}

    def cancel(self, job_id: str) -> None:
        """See :class:`~pipectl.batch.protocol.Scheduler`; scancel is silent on unknown ids."""
        done = self._run("scancel", job_id)
        if done.returncode != 0:
            raise SchedulerError(f"scancel {job_id}: {done.said}", cure="try again in a minute")

    def task_id(self, array_id: str, index: int) -> str:
        """See :class:`~pipectl.batch.protocol.Scheduler`."""
        return f"{array_id}_{index}"

    def array_id(self, task_id: str) -> str:
        """See :class:`~pipectl.batch.protocol.Scheduler`."""
        return array_of(task_id)

    def estimate(self, script: Path) -> str | None:
        """The forecast of ``sbatch --test-only``; it knows no time limits of partitions."""
        done = self._run("sbatch", "--test-only", str(script))
        if done.returncode != 0:
            raise _SBATCH.refusal(script, done)
        lines = f"{done.stderr}\n{done.stdout}".splitlines()
        forecasts = (line for line in lines if " to start at " in line)
        return next((line.removeprefix("sbatch: ") for line in forecasts), None)

    def find(self, tag: str) -> str | None:
        """The id of the latest job of ours with this tag as its comment."""
        matches = [array_of(row.job_id) for row in self._squeue("--me") if row.comment == tag]
        return max(matches, key=job_number, default=None)

    def _squeue(self, *selection: str) -> list[Listed]:
        done = self._run("squeue", "-h", "-r", "-t", "all", "-o", SQUEUE_FORMAT, *selection)
        if done.returncode != 0:
            raise SchedulerError(f"squeue: {done.said}", cure="try again in a minute")
        return list(parse_squeue(done.stdout))

    def _accounting(self, ids: Sequence[str], since: float | None) -> dict[str, JobStatus]:
        """Latest attempts by id; empty where a site keeps no accounting."""
        if not ids:
            return {}
        window = [] if since is None else ["-S", _day_before(since)]
        jobs = ",".join(dict.fromkeys(map(array_of, ids)))
        selection = ["-j", jobs, *window, "-o", SACCT_FORMAT]
        try:
            done = self._run("sacct", "-X", "-D", "-n", "-P", *selection)
        except SchedulerError:
            return {}
        rows = [row for row in parse_sacct(done.stdout) if _is_ours(row, since)]
        rows.sort(key=lambda row: inf if row.status.start is None else row.status.start)
        return {row.job_id: row.status for row in rows}

    def _with_exit_codes(self, found: Mapping[str, JobStatus]) -> dict[str, JobStatus]:
        """The controller still knows the exit codes of jobs that squeue lists."""
        lacking = [
            job_id
            for job_id, status in found.items()
            if status.source == "queue" and status.exit_code is None
        ]
        shown: dict[str, str] = {}
        for job_id in dict.fromkeys(map(array_of, lacking)):
            with suppress(SchedulerError):
                shown |= parse_shown(self._run("scontrol", "show", "job", "-o", job_id).stdout)
        return {
            job_id: replace(status, exit_code=parse_exit_code(shown[job_id], status.state))
            if job_id in lacking and job_id in shown
            else status
            for job_id, status in found.items()
        }

    def _run(self, *argv: str) -> process.Completed:
        environment = process.environment_without(*_OVERRIDES, kept=_KEPT)
        if argv[0] in {"squeue", "sacct"}:
            environment["SLURM_TIME_FORMAT"] = "%s"
        return process.run(argv, cure=_CURE, env=environment, timeout_s=self._timeout_s)


def _merge(queue: JobStatus | None, account: JobStatus | None) -> JobStatus | None:
    """One status of a job that is over; the accounting may lag behind or never hear of an end."""
    if queue is not None:
        agreed = account is not None and account.state is queue.state
        return replace(queue, exit_code=account.exit_code) if account and agreed else queue
    if account is None or account.state.final:
        return account
    reason = f"no longer listed, though the accounting still says {account.state}"
    return replace(account, state=JobState.UNKNOWN, reason=reason)


def _is_ours(row: Listed, since: float | None) -> bool:
    """Whether a row can be our job, not an old one with the same id."""
    if since is None or row.submitted_at is None:
        return True
    return row.submitted_at >= since - _CLOCK_SKEW_S


def _day_before(time: float) -> str:
    return (datetime.fromtimestamp(time) - timedelta(days=1)).strftime("%Y-%m-%d")
