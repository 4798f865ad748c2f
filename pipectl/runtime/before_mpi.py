"""What a rank does before MPI begins, which is when ``mpi4py.MPI`` is imported.

MPIs that use accelerators bind themselves to the one that is current then: if every rank of a node
left that to MPI, all would hold memory of the first accelerator. And libraries of networks allow
that a process forks (as workers that read data do) only if they are told before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from pipectl.errors import PipectlError
from pipectl.runs import RunDirectory
from pipectl.runtime.device import accelerator_of
from pipectl.spec import load

LOCAL_RANKS = (
    "MPI_LOCALRANKID",  # Hydra: MPICH, Intel MPI
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",  # last: processes that mpiexec starts within a step have that of the step
)
"""Variables in which launchers tell a process its number on its node."""
_FORKS = {"RDMAV_FORK_SAFE": "1", "FI_EFA_FORK_SAFE": "1"}


def local_rank(environment: Mapping[str, str]) -> int | None:
    """The number of this process on its node, as its launcher says; None if it says nothing."""
    for name in LOCAL_RANKS:
        with suppress(ValueError, KeyError):
            return int(environment[name])
    return None


def prepare(arguments: list[str]) -> None:
    """Choose the accelerator of this rank, and allow forks, as the job of a run asks for them.

    The choice is confirmed when the ranks know each other. Errors of files wait until then, too.

    Args:
        arguments: of the process, with ``--run DIRECTORY``.
    """
    with suppress(PipectlError, OSError, ValueError, IndexError):
        directory = RunDirectory(Path(arguments[arguments.index("--run") + 1]))
        spec = load(directory.job)
        if spec.data.workers or spec.data.is_of_script:  # a script may have processes of its own
            os.environ.update({**_FORKS, **os.environ})
        rank, count = local_rank(os.environ), spec.resources.gpus_per_node
        if rank is not None and count and torch.accelerator.is_available():
            torch.accelerator.set_device_index(accelerator_of(count, rank))


prepare(sys.argv)
