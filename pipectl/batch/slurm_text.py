"""Reading what Slurm's commands print; text in, plain data out.

The text formats are stable, the JSON ones are not: ``squeue --json`` changed the type of
``job_state`` between releases, and ``sacct --json`` of 22.05 reports success for failed jobs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pipectl.batch.protocol import JobState, JobStatus

SQUEUE_FORMAT = "%i|%T|%D|%S|%e|%N|%k|%r"
SACCT_FORMAT = "JobID,State,ExitCode,Submit,Start,End,NodeList"

# slurm_protocol_defs.c and job_state_codes.shtml: base states, then the flags shown instead.
_STATES = {
    "PENDING": JobState.QUEUED,
    "RUNNING": JobState.RUNNING,
    "SUSPENDED": JobState.SUSPENDED,
    "COMPLETED": JobState.COMPLETED,
    "CANCELLED": JobState.CANCELLED,
    "FAILED": JobState.FAILED,
    "TIMEOUT": JobState.TIMEOUT,
    "DEADLINE": JobState.TIMEOUT,
    "NODE_FAIL": JobState.NODE_FAIL,
    "BOOT_FAIL": JobState.NODE_FAIL,
    "PREEMPTED": JobState.PREEMPTED,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
    "COMPLETING": JobState.COMPLETING,
    "STAGE_OUT": JobState.COMPLETING,
    "CONFIGURING": JobState.QUEUED,
    "POWER_UP_NODE": JobState.QUEUED,
    "REQUEUED": JobState.QUEUED,
    "REQUEUE_FED": JobState.QUEUED,
    "EXPEDITING": JobState.QUEUED,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STOPPED": JobState.SUSPENDED,
    "REQUEUE_HOLD": JobState.HELD,
    "SPECIAL_EXIT": JobState.HELD,
    "RESV_DEL_HOLD": JobState.HELD,
    "REVOKED": JobState.CANCELLED,
}
_BOOTING = frozenset({"CONFIGURING", "POWER_UP_NODE"})
# These keep the reason for which the job once waited.
_REASON_IS_STALE = frozenset({JobState.COMPLETED, JobState.CANCELLED})
_NO_REASON = frozenset({"None", "(null)", ""})
_JOB_ID = re.compile(r"([0-9]{1,18})(?:;\S+)?")
_ASKED = re.compile(r"[0-9]{1,18}(_[0-9]{1,9})?")
_SHOWN = re.compile(r"JobId=([0-9]+)(?: ArrayJobId=([0-9]+) ArrayTaskId=([0-9]+))?\s")
_WAITING = re.compile(r"([0-9]{1,18})_\[([0-9,-]{1,9999})(?:%[0-9]+)?\]")
_SECONDS = re.compile(r"[1-9][0-9]{0,10}")


@dataclass(frozen=True)
class Listed:
    """One row of squeue or sacct."""

    job_id: str
    status: JobStatus
    comment: str = ""
    submitted_at: float | None = None


def submitted_id(stdout: str) -> str | None:
    """The job id in the output of ``sbatch --parsable``, which a site banner may precede."""
    matches = (_JOB_ID.fullmatch(line.strip()) for line in reversed(stdout.splitlines()))
    return next((match[1] for match in matches if match), None)


def parse_squeue(stdout: str) -> Iterator[Listed]:
    """Rows of ``squeue -h -o SQUEUE_FORMAT`` with times in seconds since the epoch.

    A job of several components, listed as ``35+0``, ``35+1``, is one: what counts is its first.
    """
    rows = [line.split("|", 7) for line in stdout.splitlines()]
    nodes_of: dict[str, list[str]] = {}
    for fields in rows:
        if len(fields) == 8 and fields[5]:
            nodes_of.setdefault(fields[0].partition("+")[0], []).append(fields[5])
    for fields in rows:
        job_id, _, component = fields[0].partition("+")
        if len(fields) < 8 or component not in ("", "0"):
            continue
        _, word, _count, start, end, _, comment, reason = fields
        nodes = ",".join(nodes_of.get(job_id, ()))
        status = _status(word, reason, nodes=nodes, start=start, end=end)
        yield from (Listed(one, status, comment=comment) for one in _job_ids(job_id))


def parse_sacct(stdout: str) -> Iterator[Listed]:
    """Rows of ``sacct -n -P -o SACCT_FORMAT``, one per attempt of a job, oldest first."""
    for line in stdout.splitlines():
        fields = line.split("|")
        if len(fields) < 7:
            continue
        listed, _, component = fields[0].partition("+")
        if component not in ("", "0"):
            continue
        word, code, submit, start, end, nodes = fields[1:7]
        status = _status(
            word, "", nodes=nodes, start=start, end=end, code=code, source="accounting"
        )
        submitted = _time(submit)
        yield from (Listed(job_id, status, submitted_at=submitted) for job_id in _job_ids(listed))


def is_id(text: str) -> bool:
    """Whether it is the id of a job, or of one of an array; squeue answers nothing of any other."""
    return bool(_ASKED.fullmatch(text))


def array_of(job_id: str) -> str:
    """``35`` of ``35_2``, which is a job of that array; the id of any other job itself."""
    return job_id.partition("_")[0]


def _job_ids(listed: str) -> Iterator[str]:
    """The jobs of a row: those of an array that wait are one, such as ``35_[2-3,7%2]``."""
    waiting = _WAITING.fullmatch(listed)
    if waiting is None:
        yield listed
        return
    for part in waiting[2].split(","):
        first, _, last = part.partition("-")
        if first and len(first) < 7 and len(last) < 7:
            yield from (f"{waiting[1]}_{i}" for i in range(int(first), int(last or first) + 1))


def parse_shown(stdout: str) -> dict[str, str]:
    """The lines of ``scontrol show job -o`` by the ids of their jobs."""
    found = (_SHOWN.match(line) for line in stdout.splitlines())
    return {
        f"{match[2]}_{match[3]}" if match[2] else match[1]: match.string
        for match in found
        if match is not None
    }


def parse_exit_code(stdout: str, state: JobState) -> int | None:
    """The exit code of a job in this state, from ``scontrol show job -o``."""
    # The first match counts: a comment or path further on may hold such a word too.
    code = re.search(r"\sExitCode=(\S*)", stdout)
    return _final_code(state, code[1]) if code else None


def parse_state(text: str) -> JobState:
    """The state in a word like ``RUNNING``, ``CANCELLED by 1000``, ``CANCELLED+`` or a list.

    Of several states the one that is not final wins; unknown words are UNKNOWN.
    """
    words = (part.split()[0].rstrip("+") for part in text.split(",") if part.strip())
    states = [_STATES.get(word, JobState.UNKNOWN) for word in words]
    known = [state for state in states if state is not JobState.UNKNOWN]
    return min(known, key=lambda state: state.final, default=JobState.UNKNOWN)


def _status(
    word: str,
    reason: str,
    *,
    nodes: str,
    start: str,
    end: str,
    code: str = "",
    source: str = "queue",
) -> JobStatus:
    state = parse_state(word)
    why = "nodes are booting" if word in _BOOTING else _reason(reason)
    if state is JobState.UNKNOWN:
        why = f"Slurm calls its state {word!r}"
    if state is JobState.QUEUED and why.startswith("JobHeld"):
        state = JobState.HELD
    if state in _REASON_IS_STALE:
        why = ""
    return JobStatus(
        state,
        reason=why,
        exit_code=_final_code(state, code),
        nodes="" if nodes in {"None assigned", "(null)"} else nodes,
        start=_time(start),
        end=_time(end) if state.final else None,
        source=source,
    )


def _final_code(state: JobState, text: str) -> int | None:
    """The exit code of a final state; the 0 of a job that was killed says nothing."""
    code = _exit_code(text) if state.final else None
    return code if code or state is JobState.COMPLETED else None


def _reason(text: str) -> str:
    return "" if text in _NO_REASON else text


def _exit_code(text: str) -> int | None:
    """``code:signal`` as a shell would report it: 128 + signal for a job that was killed."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None:
        return None
    code, number = int(match[1]), int(match[2])
    return code if code or not number else 128 + number


def _time(text: str) -> float | None:
    """Seconds since the epoch; None for ``N/A``, ``Unknown`` and the like."""
    return float(text) if _SECONDS.fullmatch(text) else None
