"""PBS Pro and OpenPBS through their command line tools: qsub, qstat, qselect and qdel."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipectl.batch import process
from pipectl.batch.pbs_script import render_script, suffix
from pipectl.batch.pbs_text import parse_names, parse_qstat, submitted_id
from pipectl.batch.protocol import JobRequest, JobStatus
from pipectl.batch.submission import Program, job_number
from pipectl.errors import SchedulerError

_CURE = "run this where the commands of PBS are installed, or set launch.scheduler: local"
_UNKNOWN_ID, _FINISHED = 153, 35
"""Exit codes: of PBS's error, the rest by 256."""
_UNSURE = ("timed out", "communication failure", "end of file", "pbs_submit: unexpected")
_OVERRIDES = ("PBS_DPREFIX", "PBS_JOBID", "PBS_ENVIRONMENT", "PBS_NODEFILE")
"""Variables that change what the commands do, or come from a job around this one."""

_ADVICE = (
    ("max_run_subjobs", "this PBS limits no arrays: leave sweep.at_once out"),
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

_QSUB = Program(
    ("qsub", "-C", "#PBS"),
    submitted_id,
    _UNSURE,
    _ADVICE,
    marked=lambda tag: f"whose name ends in {suffix(tag)!r}",
    look="qstat -x -u $USER -w",
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
        """Submit with qsub; when its answer is lost, the job is looked up by its name."""
        return _QSUB.submit(script, request, self._run, self.find)

    def query(
        self,
        ids: Sequence[str],
        *,
        since: float | None = None,  # noqa: ARG002 - ids are not recycled while history is kept
    ) -> Mapping[str, JobStatus]:
        """States from qstat, with those that are over where the server keeps its history."""
        if not ids:
            return {}
        jobs = list(dict.fromkeys(map(self.array_id, ids)))
        expanded = ["-t"] if jobs != list(ids) else []
        done = self._run("qstat", "-x", *expanded, "-f", *jobs)
        found = parse_qstat(done.stdout)
        if not found and done.returncode not in {0, _UNKNOWN_ID, _FINISHED}:
            raise SchedulerError(f"qstat: {done.said}", cure="try again in a minute")
        return {job_id: found[job_id] for job_id in ids if job_id in found}

    def cancel(self, job_id: str) -> None:
        """See :class:`~pipectl.batch.protocol.Scheduler`."""
        done = self._run("qdel", job_id)
        if done.returncode not in {0, _UNKNOWN_ID, _FINISHED}:
            raise SchedulerError(f"qdel {job_id}: {done.said}", cure="try again in a minute")

    def task_id(self, array_id: str, index: int) -> str:
        """See :class:`~pipectl.batch.protocol.Scheduler`."""
        return array_id.replace("[]", f"[{index}]")

    def array_id(self, task_id: str) -> str:
        """See :class:`~pipectl.batch.protocol.Scheduler`."""
        return re.sub(r"\[[0-9]+\]", "[]", task_id)

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

    def _run(self, *argv: str) -> process.Completed:
        return process.run(argv, cure=_CURE, env=_environment(), timeout_s=self._timeout_s)


def _environment() -> dict[str, str]:
    """Our environment without what overrules directives, and without an outer job's variables.

    ``qstat`` writes times in the words of the language, and in the zone of this machine.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _OVERRIDES}
    return {**kept, "LC_ALL": "C"}
