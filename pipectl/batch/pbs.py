"""PBS Pro and OpenPBS through their command line tools: qsub, qstat, qselect and qdel."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipectl.batch import process
from pipectl.batch.pbs_script import render_script, suffix
from pipectl.batch.pbs_text import job_number, parse_names, parse_qstat, submitted_id
from pipectl.batch.protocol import JobRequest, JobStatus
from pipectl.errors import SchedulerError

_CURE = "run this where the commands of PBS are installed, or set launch.scheduler: local"
_UNKNOWN_ID, _FINISHED = 153, 35
"""Exit codes: of PBS's error, the rest by 256."""
_UNSURE = ("timed out", "communication failure", "end of file", "pbs_submit: unexpected")
_OVERRIDES = ("PBS_DPREFIX", "PBS_JOBID", "PBS_ENVIRONMENT", "PBS_NODEFILE")
"""Variables that change what the commands do, or come from a job around this one."""

_ADVICE = (
    ("usage:", "correct pbs.directives"),
    ("queue", "set pbs.queue; `qstat -Q` lists what there is"),
    ("account", "set pbs.account, or pbs.project where the site charges those"),
    ("project", "set pbs.project"),
    ("ngpus", "ask the site what it calls its accelerators, and use pbs.select_extra"),
    ("unknown resource", "correct pbs.select_extra; `pbsnodes -a` shows what nodes have"),
    ("walltime", "lower resources.walltime; `qstat -Qf` shows the limits"),
    ("select", "lower resources; `pbsnodes -a` shows the nodes"),
    ("illegal attribute", "correct pbs.directives"),
    ("cannot connect", "PBS's server cannot be reached; check the login node or PBS_SERVER"),
)


class PbsScheduler:
    """PBS Pro from version 13, or OpenPBS. (Torque is another system.)

    Args:
        timeout_s: after which a command is given up.
    """

    name = "pbs"

    def __init__(self, timeout_s: float = process.TIMEOUT_S) -> None:
        self._timeout_s = timeout_s

    def render(self, request: JobRequest) -> str:
        """See :class:`~pipectl.batch.protocol.Scheduler`."""
        return render_script(request)

    def submit(self, script: Path, request: JobRequest) -> str:
        """Submit with qsub; when its answer is lost, the job is looked up by its name.

        Without its log directory a job hangs at its end and its output is lost, so it is made here.
        """
        (request.run_directory / "logs").mkdir(parents=True, exist_ok=True)
        try:
            done = self._run("qsub", "-C", "#PBS", str(script))
        except process.NoAnswerError as error:
            return self._recover(request.tag, error.message)
        if done.returncode != 0 and not _is_unsure(done.stderr):
            raise _refusal(script, done)
        job_id = submitted_id(done.stdout) if done.returncode == 0 else None
        return job_id or self._recover(request.tag, done.said)

    def query(
        self,
        ids: Sequence[str],
        *,
        since: float | None = None,  # noqa: ARG002 - ids are not recycled while history is kept
    ) -> Mapping[str, JobStatus]:
        """States from qstat, with those that are over where the server keeps its history."""
        if not ids:
            return {}
        done = self._run("qstat", "-x", "-f", *ids)
        found = parse_qstat(done.stdout)
        if not found and done.returncode not in {0, _UNKNOWN_ID, _FINISHED}:
            raise SchedulerError(f"qstat: {done.said}", cure="try again in a minute")
        return {job_id: found[job_id] for job_id in ids if job_id in found}

    def cancel(self, job_id: str) -> None:
        """See :class:`~pipectl.batch.protocol.Scheduler`."""
        done = self._run("qdel", job_id)
        if done.returncode not in {0, _UNKNOWN_ID, _FINISHED}:
            raise SchedulerError(f"qdel {job_id}: {done.said}", cure="try again in a minute")

    def estimate(self, script: Path) -> str | None:  # noqa: ARG002
        """Always None: PBS forecasts only jobs that it has."""
        return None

    def find(self, tag: str) -> str | None:
        """The id of the latest job of ours whose name ends as the tag says."""
        done = self._run("qselect", "-x", "-u", getpass.getuser())
        if done.returncode != 0:
            raise SchedulerError(f"qselect: {done.said}", cure="try again in a minute")
        ids = done.stdout.split()
        listed = self._run("qstat", "-x", "-f", *ids).stdout if ids else ""
        matches = (job for job, name in parse_names(listed).items() if name.endswith(suffix(tag)))
        return max(matches, key=job_number, default=None)

    def _recover(self, tag: str, said: str) -> str:
        """The job that qsub may have made before its answer was lost.

        Raises:
            NoAnswerError: none is found, which does not prove that none comes.
        """
        try:
            job_id = self.find(tag)
        except SchedulerError as error:
            job_id, said = None, f"{said}; {error.message}"
        if job_id is None:
            raise process.NoAnswerError(
                f"qsub gave no job id, and no job whose name ends in {suffix(tag)!r} is listed: "
                f"{said}",
                cure="look with `qstat -x -u $USER -w` before you submit again",
            )
        return job_id

    def _run(self, *argv: str) -> process.Completed:
        return process.run(argv, cure=_CURE, env=_environment(), timeout_s=self._timeout_s)


def _environment() -> dict[str, str]:
    """Our environment without what overrules directives, and without an outer job's variables.

    ``qstat`` writes times in the words of the language, and in the zone of this machine.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _OVERRIDES}
    return {**kept, "LC_ALL": "C"}


def _is_unsure(stderr: str) -> bool:
    """Whether qsub may have submitted the job although it failed."""
    return any(phrase in stderr.lower() for phrase in _UNSURE)


def _refusal(script: Path, done: process.Completed) -> SchedulerError:
    text = done.said.lower()
    fallback = "correct the job spec as the message says"
    advice = next((cure for phrase, cure in _ADVICE if phrase in text), fallback)
    return SchedulerError(f"qsub refuses {script}:\n{done.said}", cure=advice)
