"""The link probe: ``python -m mpi4py -m pipectl.runtime.links.probe --run DIRECTORY ...``.

Its ranks are started as those of a training are, so what they find holds for it. Rank 0 writes
``cluster.json``, and a picture beside it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mpi4py import MPI

from pipectl.cluster import Cluster
from pipectl.errors import MismatchError, PipectlError
from pipectl.files import write_text
from pipectl.report.charts import links_svg
from pipectl.runs import RunDirectory, beat
from pipectl.runtime.failure import report
from pipectl.runtime.links.describe import describe
from pipectl.runtime.links.measure import Figures, measure
from pipectl.runtime.links.session import Session
from pipectl.spec import load


def probe(directory: RunDirectory, budget_s: float) -> Figures:
    """Measure with all ranks of the job.

    Raises:
        MismatchError: they do not know each other, or are not numbered node by node.
    """
    communicator = MPI.COMM_WORLD.Dup()
    if communicator.size == 1:
        raise MismatchError(
            "MPI started a single process, so there is no link to measure",
            cure="ask for two ranks at least; if the job has several, the launcher and mpi4py use "
            "different MPIs: set launch.mpi, or use the mpiexec that belongs to mpi4py's MPI",
        )

    def say(what: str, percent: int) -> None:
        if communicator.rank == 0:
            beat(directory, what, percent, 100, 1)

    return measure(Session(communicator), budget_s, say)


def save(figures: Figures, directory: RunDirectory, output: Path, key: str) -> Cluster:
    """Write the cluster into the run directory and, with a picture beside it, to ``output``."""
    spec = load(directory.job, check_files=False)
    cluster = describe(
        figures,
        name=spec.name,
        library=MPI.Get_library_version(),
        key=key,
        cpus_per_task=spec.resources.cpus_per_task,
        memory_per_node=spec.resources.memory_per_node,
    )
    cluster.save(directory.cluster)
    write_text(output.with_suffix(".svg"), links_svg(cluster))
    cluster.save(output)
    return cluster


def main() -> None:
    """Entry point; exits through MPI's abort when this rank fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    parser.add_argument("--output", type=Path, required=True, help="the cluster description")
    parser.add_argument("--key", required=True, help="what it is measured for")
    parser.add_argument("--budget", type=float, required=True, help="seconds to measure, about")
    given = parser.parse_args()
    directory = RunDirectory(given.run)
    try:
        figures = probe(directory, given.budget)
        if MPI.COMM_WORLD.rank == 0:
            save(figures, directory, given.output, given.key)
    except BaseException as error:
        report(directory, MPI.COMM_WORLD.rank, error, action="measuring links")
        sys.exit(error.exit_code if isinstance(error, PipectlError) else 1)


if __name__ == "__main__":
    main()
