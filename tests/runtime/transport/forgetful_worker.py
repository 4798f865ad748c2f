"""A worker whose second rank remembers one sample less of what others announce to it."""

from __future__ import annotations

from dataclasses import replace

from mpi4py import MPI

from pipectl.runtime.failure import run_rank
from pipectl.runtime.layout import Layout
from pipectl.runtime.worker import run

if __name__ == "__main__":
    if MPI.COMM_WORLD.rank == 1:
        read = Layout.from_json

        def forgetful(fields: list) -> Layout:
            layout = read(fields)
            return replace(layout, sizes=(layout.sizes[0] - 1, *layout.sizes[1:]))

        Layout.from_json = forgetful
    run_rank(run, __doc__)
