"""Which launcher's words the job script needs, found out once, when a job is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pipectl.batch import JobRequest, dialect_of, find_mpiexec, process
from pipectl.batch.dialects import AUTO
from pipectl.batch.pmi import USUAL, offered, suitable, takes
from pipectl.errors import SchedulerError

_PATIENCE_S = 20.0


class Settled(NamedTuple):
    """What ``launch.mpi`` comes to.

    Args:
        mpi: for the request.
        said: why, in a line for people; empty where nobody would ask.
        warning: what will probably fail; empty where nothing will.
    """

    mpi: str
    said: str = ""
    warning: str = ""

    def of(self, request: JobRequest) -> JobRequest:
        """A request with it."""
        return replace(request, mpi=self.mpi)


def settle(request: JobRequest) -> Settled:
    """Choose where ``launch.mpi`` is ``auto``, and look whether Slurm knows what else it is.

    What the job's modules and set-up lines bring is not there yet, and nothing is guessed of it.
    """
    if request.alone:
        return Settled(request.mpi)
    if request.launcher == "srun":
        return _settle_srun(request)
    found = dialect_here(request) or request.mpi
    if request.mpi in {AUTO, found}:
        return Settled(found)
    return Settled(found, f"mpiexec is of the kind {found} here, whatever launch.mpi says")


def dialect_here(request: JobRequest) -> str | None:
    """The dialect of the very mpiexec that a job will start; None where that is not known."""
    try:
        mpiexec = find_mpiexec(request)
    except SchedulerError:
        return None
    return None if mpiexec == "mpiexec" else dialect_of(mpiexec)


def _settle_srun(request: JobRequest) -> Settled:
    kinds = pmi_kinds()
    if request.mpi != AUTO:
        return Settled(request.mpi, warning=_unknown(request.mpi, kinds))
    library = None if _elsewhere(request) else mpi_library(request.python)
    if library is None:
        mpi = USUAL if USUAL in kinds or "pmix" not in kinds else "pmix"
        why = "which MPI the ranks will find is not known here; launch.mpi overrules it"
        return Settled(mpi, f"srun --mpi={mpi}: {why}")
    mpi = suitable(library, kinds) or suitable(library, ()) or USUAL
    return Settled(mpi, f"srun --mpi={mpi}: the ranks have {library}", _unknown(mpi, kinds))


def pmi_kinds() -> Sequence[str]:
    """What this Slurm's srun may be given as ``--mpi``; empty where it does not say."""
    listed = _said("srun", "--mpi=list")
    return () if listed is None else offered(listed)


def mpi_library(python: str) -> str | None:
    """What the MPI library of mpi4py calls itself, in its first words."""
    said = _said(python, "-m", "mpi4py", "--mpi-lib-version")
    first = (said or "").strip().partition("\n")[0]
    return " ".join(first.partition(",")[0].split()) or None


def _elsewhere(request: JobRequest) -> bool:
    """Whether ranks may find another MPI than commands here do."""
    return bool(request.modules or request.setup or request.container or request.template)


def _unknown(mpi: str, kinds: Sequence[str]) -> str:
    if takes(kinds, mpi):
        return ""
    return (
        f"srun here knows no --mpi={mpi}, but {', '.join(kinds)}; ranks may not find each other "
        "(launch.mpi)"
    )


def _said(*argv: str) -> str | None:
    """What a command prints; None where it does not exist, fails or takes too long."""
    try:
        done = process.run(argv, cure="", timeout_s=_PATIENCE_S)
    except SchedulerError:
        return None
    return None if done.returncode else f"{done.stdout}\n{done.stderr}"
