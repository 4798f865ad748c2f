"""``heartbeat.json``: what a job does now, and how its ranks are; written behind steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipectl.files import write_json
from pipectl.runs.directory import RunDirectory

VERSION = 1


def beat(
    run: RunDirectory,
    state: str,
    step: int,
    steps: int,
    attempt: int = 1,
    ranks: Sequence[dict[str, Any]] = (),
    messages: Mapping[str, Any] | None = None,
    now: float | None = None,
) -> None:
    """Write it anew.

    Args:
        state: in a word or two, such as ``training``.
        attempt: number of the job's start, from 1.
        ranks: what is known of each.
        messages: how they travel; None before that is known.
        now: seconds since the epoch; None for this moment.
    """
    document = {
        "version": VERSION,
        "time": time.time() if now is None else now,
        "attempt": attempt,
        "state": state,
        "step": step,
        "steps": steps,
        "ranks": list(ranks),
        **({"messages": dict(messages)} if messages else {}),
    }
    write_json(run.heartbeat, document)
