"""A test that ranks reach each other: ``mpiexec -n 2 python -m mpi4py -m <this module>``.

Rank 0 prints one line of JSON. No torch is imported.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from statistics import median

from mpi4py import MPI

_SMALL, _LARGE = 8, 8 << 20
_REPEATS = 20
_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


def one_way_s(world: MPI.Comm, size: int) -> float:
    """Median seconds of a message from rank 0 to rank 1, or back; both ranks take part."""
    buffer, times = bytearray(size), []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        if world.rank == 0:
            world.Send(buffer, 1)
            world.Recv(buffer, 1)
        else:
            world.Recv(buffer, 0)
            world.Send(buffer, 0)
        times.append((time.perf_counter() - start) / 2)
    return median(times)


def main() -> None:
    """Print what ranks 0 and 1 know of each other."""
    world = MPI.COMM_WORLD
    facts = {
        "ranks": world.size,
        "hosts": world.allgather(socket.gethostname()),
        "library": " ".join(MPI.Get_library_version().replace("\0", "").splitlines()[0].split()),
        "threads": _LEVELS.get(MPI.Query_thread(), "unknown"),
    }
    if world.size == 2:
        facts["latency_s"] = one_way_s(world, _SMALL)
        facts["bandwidth_bytes_per_s"] = _LARGE / one_way_s(world, _LARGE)
    if world.rank == 0:
        sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
