"""Ranks that train the jobs of several run directories, one after the other, as workers do.

Arguments: ``DIRECTORY``, or ``FROM:STEP:DIRECTORY`` to go on from another run's checkpoint.

A process captures a model once, for all runs that have it; model, loss and data are made anew for
each.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI

from pipectl.capture import CapturedGraph, CapturedJob
from pipectl.capture.opaque import Opaque
from pipectl.capture.operators import FunctionCall, runs
from pipectl.runs import RunDirectory
from pipectl.runtime.rank_process import run_rank
from pipectl.runtime.waiting import barrier
from pipectl.runtime.worker import run

CAPTURED: dict[str, CapturedGraph] = {}
"""By all that a graph depends on."""
capture = CapturedJob._capture


def captured_once(job: CapturedJob, loader: Any, *how: Any) -> CapturedGraph:
    """A graph without code of the user, which would be that of another run's objects."""
    *shape, known = how
    spec = job.spec
    data, gpus = (spec.data.factory, spec.data.kwargs, loader.lengths), spec.resources.gpus_per_node
    parts = spec.script, spec.model, spec.loss, data, spec.data.pad, gpus, spec.training.precision
    key = repr((*parts, *job.metrics(), *shape))
    if known is not None or key not in CAPTURED:
        graph = capture(job, loader, *how)
        kinds = Opaque, FunctionCall
        own = any(runs(node, graph.root, kind) for node in graph.operators for kind in kinds)
        if known is not None or job.kept or own:
            return graph
        CAPTURED[key] = graph
    return CAPTURED[key]


setattr(CapturedJob, "_capture", captured_once)  # noqa: B010 - a method is no variable

for argument in sys.argv[1:]:
    *start, directory = argument.split(":")
    if start:
        name = f"step-{int(start[1]):06d}"
        if MPI.COMM_WORLD.rank == 0:
            run_directory = RunDirectory(Path(directory))
            run_directory.start_of(2).errors.mkdir(parents=True)
            checkpoints = run_directory.checkpoints
            shutil.copytree(Path(start[0]) / "checkpoints" / name, checkpoints / name)
        barrier(MPI.COMM_WORLD)
    sys.argv[1:] = ["--run", directory]
    run_rank(run, __doc__)
