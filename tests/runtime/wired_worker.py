"""A worker that fails where parts of it were not told what its job asks for.

Every transport knows who moves its messages and whether it checks them; operators let messages
advance if they are to; and a checkpoint asks whether the metrics of its step are written.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from mpi4py import MPI

from pipectl.runs import RunDirectory
from pipectl.runtime.process import Doing, run_rank
from pipectl.runtime.telemetry import Telemetry
from pipectl.runtime.transport import Progress, Transport
from pipectl.runtime.worker import run
from pipectl.spec import load

made: set[tuple[str, bool]] = set()
calls: Counter[str] = Counter()


def note_transports() -> None:
    build = Transport.__init__

    def building(self: Transport, *given: Any, **options: Any) -> None:
        build(self, *given, **options)
        made.add((given[3].mode, options["check"]))

    Transport.__init__ = building


def count_calls(kind: type, name: str) -> None:
    call = getattr(kind, name)

    def counting(*given: Any) -> Any:
        calls[name] += 1
        return call(*given)

    setattr(kind, name, counting)


def checked(directory: RunDirectory, communicator: MPI.Intracomm, doing: Doing) -> None:
    run(directory, communicator, doing)
    asked = load(directory.job).launch
    assert made == {(asked.progress, True)}
    assert bool(communicator.allreduce(calls["tick"])) == (asked.progress == "poll")
    assert bool(calls["has_written"]) == (communicator.rank == 0)


if __name__ == "__main__":
    note_transports()
    count_calls(Progress, "tick")
    count_calls(Telemetry, "has_written")
    run_rank(checked, __doc__)
