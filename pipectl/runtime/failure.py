"""What a rank leaves behind when it fails."""

from __future__ import annotations

import socket
import sys
import time
import traceback
from typing import Any

from pipectl.errors import PipectlError
from pipectl.files import write_json
from pipectl.runs import RunDirectory


def report(
    directory: RunDirectory,
    rank: int,
    error: BaseException,
    *,
    action: str,
    stage: int | None = None,
    step: int | None = None,
) -> None:
    """Write what failed on this rank, and where, for ``pipectl status`` and into the log."""
    known = {"rank": rank, "stage": stage, "step": step}
    words = [f"{name} {value}" for name, value in known.items() if value is not None]
    place = ", ".join((*words, action))
    sys.stderr.write(f"pipectl: {place}: {type(error).__name__}: {error}\n")
    if not isinstance(error, PipectlError):
        traceback.print_exception(error)
    try:
        document = {"version": 1, **known, "action": action, **_details(error)}
        write_json(directory.error_of(rank), document)
    except PipectlError as unwritten:
        sys.stderr.write(f"pipectl: {unwritten}\n")
    sys.stderr.flush()


def _details(error: BaseException) -> dict[str, Any]:
    known = error if isinstance(error, PipectlError) else None
    return {
        "host": socket.gethostname(),
        "type": type(error).__name__,
        "message": known.message if known else str(error),
        "cure": known.cure if known else None,
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
        "exit_code": known.exit_code if known else 1,
    }
