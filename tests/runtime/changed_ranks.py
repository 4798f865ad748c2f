"""Ranks that train, changed in some way: ``changed_ranks.py CHANGES RUN [RUN_OF_RANK_1]``.

Changes are names with commas between them, and their functions say what they do; most are made on
rank 1 alone.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from mpi4py import MPI

RANK = MPI.COMM_WORLD.rank
AHEAD_S = 1000.0
if "ahead" in sys.argv[1].split(",") and RANK:  # before anybody takes a reference
    real = time.perf_counter
    time.perf_counter = lambda: real() + AHEAD_S

import torch  # noqa: E402

from pipectl.capture import CapturedJob  # noqa: E402
from pipectl.runs import RunDirectory  # noqa: E402
from pipectl.runtime import agreement, clock  # noqa: E402
from pipectl.runtime.rank_process import run_rank  # noqa: E402
from pipectl.runtime.telemetry import Telemetry  # noqa: E402
from pipectl.runtime.transport import Transport  # noqa: E402
from pipectl.runtime.worker import run  # noqa: E402
from pipectl.spec import load  # noqa: E402
from pipectl.watch.board import Board  # noqa: E402


def pipectl() -> None:
    """Another version of it."""
    agreement.__version__ = "0.0.7"  # type: ignore[attr-defined]


def pytorch() -> None:
    """Another version of it."""
    torch.__version__ = "0.0.7"


def stranger() -> None:
    """Something that is no pipectl of any version."""
    agreement.identity = lambda *_: ("a fingerprint", "a hash")


def deeper() -> None:
    """A factory that makes another model."""
    built = CapturedJob.__init__

    def build(self: CapturedJob, spec: Any) -> None:
        model = spec.model.model_copy(update={"kwargs": {"depth": 3}})
        built(self, spec.model_copy(update={"model": model}))

    CapturedJob.__init__ = build


def reseeded() -> None:
    """A factory that draws other initial values."""
    built = CapturedJob.__init__

    def build(self: CapturedJob, spec: Any) -> None:
        training = spec.training.model_copy(update={"seed": 99})
        built(self, spec.model_copy(update={"training": training}))

    CapturedJob.__init__ = build


def accelerator() -> None:
    """As torch would name one; nothing is computed on it before the ranks have agreed."""
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")


WATCHED: dict[str, Any] = {}


def wired() -> None:
    """On all ranks, fails where parts of the worker were not told what its job asks for.

    Every transport knows who moves its messages and whether it checks them, and a
    checkpoint asks whether the metrics of its step are written.
    """
    for kind, name in ((Transport, "__init__"), (Telemetry, "has_written")):
        calls = mock.patch.object(kind, name, autospec=True, side_effect=getattr(kind, name))
        WATCHED[name] = calls.start()


def check_wires(directory: RunDirectory) -> None:
    may_thread = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    progress = load(directory.job).launch.progress if may_thread else "none"
    made = {(call.args[4].mode, call.kwargs["check"]) for call in WATCHED["__init__"].mock_calls}
    assert made == {(progress, True)}
    assert WATCHED["has_written"].called == (RANK == 0)


def work(directory: RunDirectory, communicator: MPI.Intracomm, board: Board) -> None:
    run(directory, communicator, board)
    if WATCHED:
        check_wires(directory)


if __name__ == "__main__":
    for change in sys.argv[1].split(","):
        if change == "ahead":  # as if on another machine
            clock.machine = lambda: RANK
        elif change == "wired":
            wired()
        elif RANK == 1 and change:
            globals()[change]()
    sys.argv[1:] = ["--run", str(Path(sys.argv[2:][RANK and -1]))]
    run_rank(work, __doc__)
