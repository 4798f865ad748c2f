"""This machine as a batch system: job scripts run at once, detached from the terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipectl.batch import process
from pipectl.batch.request import JobRequest
from pipectl.batch.scheduler import JobState, JobStatus, Scheduler
from pipectl.errors import SchedulerError
from pipectl.files import open_regular


class _Process(NamedTuple):
    """The id of a local job: ``pid.start@host``, with the start in clock ticks since boot.

    ``pid.start[2]@host`` is a job of an array that the process has yet to start.
    """

    pid: int
    start: int
    host: str
    waiting: bool = False

    @classmethod
    def parse(cls, job_id: str) -> _Process:
        match = re.fullmatch(r"(\d+)\.(\d+)(\[\d+\])?@(.+)", job_id)
        if match is None:
            raise SchedulerError(
                f"{job_id!r} is not the id of a local job", hint="restore the run's record.json"
            )
        return cls(int(match[1]), int(match[2]), match[4], waiting=match[3] is not None)

    @property
    def here(self) -> bool:
        return self.host == os.uname().nodename

    @property
    def alive(self) -> bool:
        return process.start_time(self.pid) == self.start


class LocalScheduler(Scheduler):
    """Jobs on this machine, without a queue or a time limit.

    Args:
        grace_s: seconds between SIGTERM and SIGKILL.
    """

    name, title = "local", "this machine"
    runs_in_shell = True

    def __init__(self, grace_s: float = 5.0) -> None:
        self._grace_s = grace_s

    def render(self, request: JobRequest) -> str:
        if request.after:
            raise SchedulerError(
                "local jobs cannot wait for other runs",
                hint="run `pipectl submit --wait` for each in turn",
            )
        return super().render(request)

    def submit(self, script: Path, request: JobRequest) -> str:
        """Start the script in its own session, with its output in ``logs/job.log``."""
        return self.start(script, request.run_directory, request.tag)

    def start(self, script: Path, directory: Path, *tag: str) -> str:
        """Start a script in a run directory; the process can be found by the tag."""
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with os.fdopen(open_regular(directory / "logs" / "job.log", flags), "ab") as log:
                command = ("bash", str(script), *tag)
                pid = process.start_detached(command, directory=directory, stdout=log.fileno())
        except OSError as error:
            raise SchedulerError(
                f"the job script cannot be started: {error}",
                hint="check the run directory and its disk",
            ) from error
        return f"{pid}.{process.start_time(pid) or 0}@{os.uname().nodename}"

    def query(
        self,
        ids: Sequence[str],
        *,
        since: float | None = None,  # noqa: ARG002 - a local id is never recycled
    ) -> Mapping[str, JobStatus]:
        return {job_id: _status(job_id) for job_id in ids}

    def cancel(self, job_id: str) -> None:
        """Send SIGTERM to the job's process group, then SIGKILL to all remaining processes.

        A waiting job of an array is not started any more: the run's record is read before.
        """
        job = _Process.parse(job_id)
        if not job.here:
            raise SchedulerError(f"this run belongs to {job.host}", hint=f"cancel it on {job.host}")
        if job.alive and not job.waiting:
            process.stop(job.pid, self._grace_s)

    def task_id(self, array_id: str, index: int) -> str:
        return array_id.replace("@", f"[{index}]@", 1)

    def find(self, tag: str) -> str | None:
        """Return the id of this user's process that has the tag as its argument.

        Tags are not secret: other users may start processes with them.
        """
        jobs = []
        for job in process.list_processes():
            with suppress(OSError):
                place = Path(f"/proc/{job.pid}")
                words = (place / "cmdline").read_bytes().split(b"\0")
                is_ours = place.stat().st_uid == os.geteuid()
                if is_ours and words[:1] == [b"bash"] and words[2:-1] == [os.fsencode(tag)]:
                    jobs.append((job.started, job.pid))
        if not jobs:
            return None
        start, pid = min(jobs)  # the others are subshells
        return f"{pid}.{start}@{os.uname().nodename}"


def _status(job_id: str) -> JobStatus:
    """Return the state of one job; a damaged id must not hide other jobs."""
    try:
        job = _Process.parse(job_id)
    except SchedulerError as error:
        return JobStatus(JobState.UNKNOWN, reason=error.message, source="process")
    state, reason, nodes, hint = JobState.FAILED, "", job.host, ""
    if not job.here:
        state, nodes = JobState.UNKNOWN, ""
        reason = f"started on {job.host}; its processes cannot be seen from here"
        hint = f"repeat the command on {job.host}; `pipectl logs` shows here what it has printed"
    elif job.waiting and job.alive:  # the process is the script of its array
        state, reason, nodes = JobState.QUEUED, "waits for its turn", ""
    elif job.waiting:
        reason, nodes = "never started: the process that starts the runs of its sweep is gone", ""
    elif job.alive:
        state = JobState.RUNNING
    else:
        reason = "its process is gone and left no exit code: killed, or the machine restarted"
    return JobStatus(state, reason=reason, nodes=nodes, source="process", hint=hint)
