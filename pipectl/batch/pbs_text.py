"""Reading what the commands of PBS print; text in, plain data out.

``qstat -f`` is read in its oldest form, lines of ``name = value``: as JSON it may be invalid where
a job's environment holds quotes, and some releases print only the first of several jobs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime

from pipectl.batch.protocol import JobState, JobStatus

_LIVE = {
    "Q": JobState.QUEUED,
    "W": JobState.QUEUED,
    "T": JobState.QUEUED,
    "H": JobState.HELD,
    "R": JobState.RUNNING,
    "B": JobState.RUNNING,
    "S": JobState.SUSPENDED,
    "U": JobState.SUSPENDED,
    "E": JobState.COMPLETING,
}
_OVER = frozenset("FXC")
_DELETED, _DONE, _MOVED = 91, 92, 94
"""Substates of jobs that are over (src/include/job.h)."""
_SIGNALLED = 256
"""Added to the number of the signal that ended a job."""
_OF_PBS = {
    -29: (JobState.TIMEOUT, "over its walltime"),
    -28: (JobState.TIMEOUT, "over its processor time"),
    -27: (JobState.OUT_OF_MEMORY, "over its memory"),
    -26: (JobState.OUT_OF_MEMORY, "over its virtual memory"),
    -25: (JobState.FAILED, "used more cores than it asked for"),
    -24: (JobState.FAILED, "used more cores than it asked for"),
    -20: (JobState.NODE_FAIL, "its first node was lost"),
}
_JOB_ID = re.compile(r"([0-9]{1,18}(?:\[[0-9]*\])?)(\.[A-Za-z0-9._-]+)?")
_HEAD = re.compile(r"Job Id: (\S+)")
_FIELD = re.compile(r"    ([A-Za-z_.]+) = (.*)")
_HOST = re.compile(r"([^/+()\s]+)/")


def submitted_id(stdout: str) -> str | None:
    """The job id in the output of ``qsub``, which a site banner may precede."""
    matches = (_JOB_ID.fullmatch(line.strip()) for line in reversed(stdout.splitlines()))
    return next((match[0] for match in matches if match), None)


def parse_qstat(stdout: str) -> dict[str, JobStatus]:
    """The jobs in what ``qstat -x -f`` prints, by id."""
    return {job_id: _status(fields) for job_id, fields in _jobs(stdout)}


def parse_names(stdout: str) -> dict[str, str]:
    """The names of the jobs in what ``qstat -x -f`` prints, by id."""
    return {job_id: fields.get("Job_Name", "") for job_id, fields in _jobs(stdout)}


def _jobs(stdout: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Ids and fields. The first of two fields counts: a later one may be of the environment."""
    job_id, fields, last = "", {}, ""  # type: tuple[str, dict[str, str], str]
    for line in stdout.splitlines():
        if head := _HEAD.fullmatch(line.strip()):
            if job_id:
                yield job_id, fields
            job_id, fields, last = head[1], {}, ""
        elif field := _FIELD.fullmatch(line):
            last = field[1]
            fields.setdefault(last, field[2])
        elif line.startswith("\t") and last:
            fields[last] += line.strip()
    if job_id:
        yield job_id, fields


def _status(fields: Mapping[str, str]) -> JobStatus:
    letter, code = fields.get("job_state", ""), _number(fields.get("Exit_status"))
    state, reason = _verdict(letter, _number(fields.get("substate")), code)
    if not reason and not state.final:
        reason = _comment(state, fields)
    return JobStatus(
        state,
        reason=reason,
        exit_code=_shell_code(state, code),
        nodes=",".join(dict.fromkeys(_HOST.findall(fields.get("exec_host", "")))),
        start=_time(fields.get("stime")) or _time(fields.get("estimated.start_time")),
        end=_time(fields.get("mtime")) if state.final else None,
    )


def _verdict(letter: str, substate: int | None, code: int | None) -> tuple[JobState, str]:
    """State and reason."""
    if letter in _LIVE:
        return _LIVE[letter], ""
    if letter == "M" or substate == _MOVED:
        return JobState.UNKNOWN, "moved to another server"
    if letter not in _OVER:
        return JobState.UNKNOWN, f"PBS calls its state {letter!r}"
    if substate == _DELETED:
        return JobState.CANCELLED, ""
    if code is None and letter == "X":
        return JobState.UNKNOWN, "over; PBS keeps no exit code of jobs of an array"
    if code is None:
        if substate == _DONE:
            return JobState.CANCELLED, "never ran: a job that it depended on failed"
        return JobState.FAILED, "over, and left no exit code"
    if code == 0:
        return JobState.COMPLETED, ""
    return _of_code(code)


def _of_code(code: int) -> tuple[JobState, str]:
    """What an exit status other than 0 says."""
    if code < 0:
        return _OF_PBS.get(code, (JobState.FAILED, f"PBS could not run it (status {code})"))
    if code > _SIGNALLED:
        return JobState.FAILED, f"ended by signal {code - _SIGNALLED}"
    return JobState.FAILED, f"exit code {code}"


def _shell_code(state: JobState, code: int | None) -> int | None:
    """As a shell would report it: 128 + signal for a job that was killed."""
    if code is None or code < 0 or not state.final:
        return None
    return code - 128 if code > _SIGNALLED else code


def _comment(state: JobState, fields: Mapping[str, str]) -> str:
    """Why it waits."""
    if not state.waits:
        return ""
    if state is JobState.HELD and fields.get("depend"):
        return f"waits for {fields['depend']}"
    return fields.get("comment", "").removeprefix("Not Running: ")


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch("-?[0-9]{1,9}", text) else None


def _time(text: str | None) -> float | None:
    """Seconds since the epoch of a time such as ``Fri Nov 20 16:34:21 2026``."""
    try:
        return datetime.strptime(text or "", "%a %b %d %H:%M:%S %Y").timestamp()
    except ValueError:
        return None
