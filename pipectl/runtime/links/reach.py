"""A test that ranks reach each other: ``mpiexec -n 2 python -m mpi4py -m <this module>``.

Rank 0 prints one line of JSON. No torch is imported.
"""

from __future__ import annotations

import json
import socket
import sys

from mpi4py import MPI

from pipectl.runtime.links.measure import ping_pong

_SIZES = (8, 8 << 20)
_BUDGET_S = 0.2
_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


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
        (_, latency_s), (size, time_s) = ping_pong(world, _BUDGET_S, _SIZES)
        facts |= {"latency_s": latency_s, "bandwidth_bytes_per_s": size / time_s}
    if world.rank == 0:
        sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
