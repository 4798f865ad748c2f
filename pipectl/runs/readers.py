"""Reading what a running job writes, at any moment and after any crash."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipectl.access import read_limited
from pipectl.errors import DataFileError
from pipectl.files import read_json
from pipectl.runs.directory import RunDirectory
from pipectl.runs.manifest import checkpoints
from pipectl.runs.sound import sound
from pipectl.watch.node_file import DAMAGE, node_path, parse_report

_EDGE = 1 << 13
"""Bytes at either end of a long file: some 40 lines."""
_MAX_BYTES, _MAX_REPORT_BYTES, _MAX_DIGITS = 2**28, 2**24, 100
_FAULT, _EVALUATION, _ATTEMPT = b'"not_finite"', b'"evaluation"', re.compile(rb'"attempt": (\d+)')
_CURE = "the running job writes it again within seconds"


def read_metrics(run: RunDirectory) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl``, see :func:`merge_attempts`; lines cut by a crash are skipped."""
    return merge_attempts(list(_lines(run.metrics)))


def read_figures(run: RunDirectory) -> list[dict[str, Any]]:
    """As :func:`read_metrics`, of long runs only the first and last lines, and those that are rare.

    What is rare is what was not finite, an attempt's first line, and the last evaluation.
    """
    try:
        text = read_limited(run.metrics, _MAX_BYTES)
    except OSError:
        return []
    return merge_attempts(list(_parsed(_edges(text))))


def merge_attempts(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines by step: of its training, of what was not finite in it, of its evaluation.

    Where an attempt repeats steps of an earlier one, the later attempt wins: the earlier one's
    lines from that step on are dropped.
    """
    ends = _cut_offs(lines)
    kept: dict[tuple[int, int], dict[str, Any]] = {}
    for line in lines:
        if line["step"] < ends[line["attempt"]]:
            kept[line["step"], _kind(line)] = line
    return [kept[key] for key in sorted(kept)]


def read_heartbeat(run: RunDirectory) -> dict[str, Any] | None:
    """The last heartbeat; None before the first.

    Raises:
        DataFileError: the file is damaged.
    """
    try:
        return sound(read_json(run.heartbeat, cure=_CURE, limit=_MAX_REPORT_BYTES))
    except DataFileError:
        if not run.heartbeat.exists():
            return None
        raise


def read_errors(run: RunDirectory) -> list[dict[str, Any]]:
    """Failure reports of ranks, the first failure first; unreadable ones are left out.

    By time, but of the ends that watchers of one node tell of in the order that its kernel saw.
    """
    reports = []
    for path in sorted(run.errors.glob("rank-*.json")):
        try:
            reports.append(sound(read_json(path, cure=_CURE, limit=_MAX_REPORT_BYTES)))
        except DataFileError:
            continue
    reports.sort(key=_failure_order)
    for host in {report.get("host") for report in reports}:
        ended = [i for i, each in enumerate(reports) if _is_of_watcher(each, host)]
        ordered = sorted((reports[i] for i in ended), key=lambda each: int(each["earlier"]))
        for place, report in zip(ended, ordered, strict=True):
            reports[place] = report
    return reports


def read_stall(run: RunDirectory) -> str:
    """Who waits for whom, while no rank moves on; empty while all is well, or if nobody says so."""
    try:
        return parse_report(read_json(node_path(run.watch, 0), cure="")).stalled
    except (DataFileError, *DAMAGE):
        return ""


def read_exit_code(run: RunDirectory) -> int | None:
    """The job script's exit code; None while it has none."""
    return _number(run.exit_code)


def read_requeue_error(run: RunDirectory) -> str:
    """Why the batch system did not start the job again, in its last words; empty if it did."""
    try:
        text = read_limited(run.requeue_error, _MAX_REPORT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def read_starts(run: RunDirectory) -> int:
    """How often the job script was started."""
    return max(0, _number(run.attempt) or 0)


def _number(path: Path) -> int | None:
    try:
        return int(read_limited(path, _MAX_DIGITS))
    except (OSError, ValueError):
        return None


def measured_steps(run: RunDirectory) -> list[int]:
    """The steps of which there are timelines, ascending."""
    found = (re.fullmatch(r"step-(\d+)\.json", path.name) for path in run.trace.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def last_checkpoint(run: RunDirectory) -> Path | None:
    """The folder of the latest saved step; one that is still being written does not count."""
    return next(iter(checkpoints(run.checkpoints)), None)


def _edges(text: bytes) -> bytes:
    """The file, or its begin, its end, and of the lines between them those that are rare."""
    if len(text) <= 2 * _EDGE:
        return text
    begin = text.rfind(b"\n", 0, _EDGE) + 1
    end = text.find(b"\n", len(text) - _EDGE) + 1 or len(text)
    rare = {*_faults(text, begin, end), *_first_of_attempts(text, begin, end)}
    if (last := text.rfind(_EVALUATION, begin, end)) >= 0:
        rare.add(last)
    lines = (
        text[text.rfind(b"\n", 0, at) + 1 : text.find(b"\n", at) + 1 or None] for at in sorted(rare)
    )
    return b"".join((text[:begin], *lines, text[end:]))


def _faults(text: bytes, begin: int, end: int) -> Iterator[int]:
    """Where a fault is told of."""
    at = text.find(_FAULT, begin, end)
    while at >= 0:
        yield at
        at = text.find(_FAULT, at + 1, end)


def _first_of_attempts(text: bytes, begin: int, end: int) -> Iterator[int]:
    """Within each attempt's first line: later attempts overrule earlier ones from its step on."""
    found = _ATTEMPT.search(text, begin, end)
    while found:
        yield found.start()
        other = re.compile(rb'"attempt": (?!%b\b)(\d+)' % found[1])
        found = other.search(text, found.end(), end)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that are whole, with integer ``attempt`` and ``step``."""
    try:
        yield from _parsed(read_limited(path, _MAX_BYTES))
    except OSError:
        return


def _parsed(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.decode("utf-8", "replace").split("\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and _is_metric(value := sound(value)):
            yield value


def _is_metric(value: dict[str, Any]) -> bool:
    return value.get("step") is not None and value.get("attempt") is not None


def _kind(line: dict[str, Any]) -> int:
    """Where a line stands among those of its step."""
    return next((i for i, key in enumerate(("not_finite", "evaluation"), 1) if key in line), 0)


def _cut_offs(lines: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Per attempt, the first step that a later attempt did again."""
    first: dict[int, int] = {}
    for line in lines:
        first[line["attempt"]] = min(line["step"], first.get(line["attempt"], line["step"]))
    cut = float("inf")
    cut_offs = {}
    for attempt in sorted(first, reverse=True):
        cut_offs[attempt] = cut
        cut = min(cut, first[attempt])
    return cut_offs


def _is_of_watcher(report: dict[str, Any], host: str | None) -> bool:
    """Whether it tells how a rank of a node ended."""
    return report.get("host") == host and report.get("earlier") is not None


def _failure_order(report: dict[str, Any]) -> tuple[float, int]:
    time, rank = report.get("time"), report.get("rank")
    return (
        float(time) if isinstance(time, int | float) else float("inf"),
        rank if isinstance(rank, int) else 0,
    )
