"""A worker whose second rank remembers one sample less of what others announce to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpi4py import MPI

from pipectl.runtime.layout import Layout
from pipectl.runtime.process import run_rank
from pipectl.runtime.transport import Wire
from pipectl.runtime.worker import run

if __name__ == "__main__":
    if MPI.COMM_WORLD.rank == 1:
        receive = Wire.receive_object

        def forgetful(*given: Any) -> list[Layout | None]:
            return [
                layout and replace(layout, sizes=(layout.sizes[0] - 1, *layout.sizes[1:]))
                for layout in receive(*given)
            ]

        Wire.receive_object = forgetful
    run_rank(run, __doc__)
