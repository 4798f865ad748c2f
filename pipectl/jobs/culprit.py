"""Which failure broke a run: the first one, on whatever rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipectl.errors import DataFileError
from pipectl.files import read_json
from pipectl.runs import RunDirectory, read_errors
from pipectl.runs.sound import sound


@dataclass(frozen=True)
class Culprit:
    """The failure that came first.

    Args:
        where: e.g. ``rank 3 on n1, stage 2, BACKWARD micro-batch 5, step 17``.
        others: how many further ranks reported an error.
    """

    where: str
    message: str
    cure: str | None
    exit_code: int
    others: int


def culprit(run: RunDirectory) -> Culprit | None:
    """The failure of a run; None where nothing reported one."""
    reports = [*_preparation(run), *read_errors(run)]
    if not reports:
        return None
    first = reports[0]
    kind, text, code = (first.get(key) for key in ("type", "message", "exit_code"))
    return Culprit(
        where=_where(first),
        message=f"{kind}: {text}" if kind else str(text),
        cure=first.get("cure"),
        exit_code=code if isinstance(code, int) and 0 < code < 128 else 1,
        others=len(reports) - 1,
    )


def _preparation(run: RunDirectory) -> list[dict[str, Any]]:
    try:
        return [sound(read_json(run.preparation_error, cure="", limit=2**24))]
    except DataFileError:
        return []


def _where(report: dict[str, Any]) -> str:
    rank, host = report.get("rank"), report.get("host")
    parts = ["preparation" if rank is None else f"rank {rank}"]
    if host:
        parts[0] += f" on {host}"
    stage = report.get("stage")
    if isinstance(stage, int) and stage >= 0:
        parts.append(f"stage {stage}")
    if report.get("action") and rank is not None:
        parts.append(str(report["action"]))
    if report.get("step") is not None:
        parts.append(f"step {report['step']}")
    return ", ".join(parts)
