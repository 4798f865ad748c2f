"""What is found, and what programs say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from pipectl.batch import process
from pipectl.errors import SchedulerError

PATIENCE_S = 60.0


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """One line.

    Args:
        cure: what to do; empty where all is well.
    """

    what: str
    level: Level
    text: str
    cure: str = ""


Findings = Iterator[Finding]


def said(argv: Sequence[str], cure: str) -> str:
    """What a command prints.

    Raises:
        SchedulerError: it does not exist, fails, or takes too long.
    """
    done = process.run(argv, cure=cure, timeout_s=PATIENCE_S)
    if done.returncode:
        last = done.said.splitlines()[-1]
        raise SchedulerError(f"{Path(argv[0]).name}: {last}", cure=cure or None)
    return done.stdout or done.stderr
