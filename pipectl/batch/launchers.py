"""The command that starts one process per rank: MPI's mpiexec, or Slurm's srun.

The options of mpiexec are those of ``mpiexec -help`` and ``mpiexec -bind-to -help`` of MPICH, of
prterun's help (``--map-by``, ``--rank-by``, ``--bind-to``; Open MPI 4 takes the same), of Intel's
developer reference (``mpiexec.hydra``, "Interoperability with OpenMP API", "Process Pinning"), and
of the job scripts that sites with Cray's PALS show.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipectl.batch import process
from pipectl.batch.protocol import JobRequest
from pipectl.errors import InvalidInputError, SchedulerError
from pipectl.units import did_you_mean

AUTO = "auto"
USUAL_PMI = "pmi2"
_TIMEOUT_S = 20.0
_PMI_KIND = re.compile(r"^(?:srun:)?\s*([A-Za-z]\w*)\s*$", flags=re.MULTILINE)
_PMI_OF_LIBRARY = (
    ("open mpi", ("pmix",)),
    ("cray mpich", ("cray_shasta", "pmi2")),
    ("mpich", ("pmi2",)),
    ("mvapich", ("pmi2",)),
    ("intel(r) mpi", ("pmi2",)),
)
"""Kinds of PMI by parts of what an MPI library says of itself; the first that fits counts."""
_VERSIONS = {
    "HYDRA build details": "hydra",
    "(Open MPI)": "openmpi",
    "(OpenRTE)": "openmpi",
    "Intel(R) MPI Library": "intel",
    "mpiexec version ": "cray",
}
"""Whose an mpiexec is, by parts of what ``mpiexec --version`` prints."""
_SRUN_BINDING = {"none": (), "cores": ("--cpu-bind=cores",), "numa": ("--cpu-bind=ldoms",)}


MPIEXECS = ("hydra", "openmpi", "intel", "cray")
"""Names for ``launch.mpi`` with mpiexec: MPICH, Open MPI, Intel MPI, and PALS on Cray EX."""


def mpiexec_options(
    mpi: str, ranks: int, per_node: int | None, cores: int, bind: str
) -> tuple[str, ...]:
    """Options of mpiexec for a launch.

    Args:
        mpi: whose mpiexec it is; with ``auto`` only what all of them take.
        per_node: ranks per node; None if all are on this machine.
        cores: per rank.
        bind: ``none``, ``cores`` (each rank to its own) or ``numa`` (each rank to a domain).

    Raises:
        InvalidInputError: ``mpi`` is not known, or is ``auto`` and ranks are to be bound.
    """
    count = ("-n", str(ranks))
    match mpi:
        case "hydra":  # by default it binds nothing
            place = () if per_node is None else ("-ppn", str(per_node))
            binding = {"none": (), "cores": (f"core:{cores}",), "numa": ("numa",)}[bind]
            return (*count, *place, *(("-bind-to",) if binding else ()), *binding)
        case "openmpi":  # by default it binds each of two ranks to one core, more to a domain
            where = "slot" if per_node is None else f"ppr:{per_node}:node"
            if bind == "cores":
                where += f":PE={cores}"
            elif per_node is None:
                where += ":OVERSUBSCRIBE"  # more ranks than cores are slow, not wrong
            unit = "core" if bind == "cores" else bind
            return (*count, "--map-by", where, "--rank-by", "slot", "--bind-to", unit)
        case "intel":  # by default it divides the cores; global options have to come first
            place = () if per_node is None else ("-ppn", str(per_node))
            pins = {
                "none": ("-genv", "I_MPI_PIN", "off"),
                "cores": (
                    *("-genv", "I_MPI_PIN_CELL", "core"),
                    *("-genv", "I_MPI_PIN_DOMAIN", f"{cores}:compact"),
                ),
                "numa": ("-genv", "I_MPI_PIN_DOMAIN", "numa"),
            }
            return (*place, *pins[bind], *count)
        case "cray":
            place = () if per_node is None else ("--ppn", str(per_node))
            unit = "depth" if bind == "cores" else bind
            return (*count, *place, "--depth", str(cores), "--cpu-bind", unit)
        case "auto" if bind == "none":
            return count
        case "auto":
            raise InvalidInputError(
                f"launch.bind: how to bind ranks to {bind} depends on the mpiexec that the job "
                "finds, which is not known here",
                cure=f"set launch.mpi to what it is: {', '.join(MPIEXECS)}",
            )
    raise InvalidInputError(
        f"launch.mpi: no mpiexec of the kind {mpi!r}{did_you_mean(mpi, MPIEXECS)}",
        cure=f"choose one of {', '.join((AUTO, *MPIEXECS))}, or set launch.launcher: srun",
    )


def launch_command(request: JobRequest, *, here: bool = False) -> tuple[str, ...]:
    """The command that starts all ranks, or the one process of a job without MPI.

    Args:
        here: see :func:`mpiexec_command`.

    Returns:
        Nothing for an array, whose runs start their own ranks.

    Raises:
        InvalidInputError: ranks cannot be bound as the job wants it.
        SchedulerError: there is no mpiexec.
    """
    if request.array is not None:
        return ()
    if request.alone:
        return request.in_container(request.command)
    if request.launch.launcher == "srun":
        return srun_command(request)
    return mpiexec_command(request, here=here)


def mpiexec_command(request: JobRequest, *, here: bool = False) -> tuple[str, ...]:
    """The whole launch with mpiexec; inside an allocation it finds the nodes by itself.

    Args:
        here: whether all ranks are started on this machine, whatever nodes the job asks for.

    Raises:
        InvalidInputError: ranks cannot be bound as the job wants it.
        SchedulerError: there is no mpiexec.
    """
    per_node = None if here else request.resources.tasks_per_node
    options = mpiexec_options(
        request.launch.mpi,
        request.ranks,
        per_node,
        request.resources.cpus_per_task,
        request.launch.bind,
    )
    return (
        find_mpiexec(request),
        *options,
        *request.launch.args,
        *request.in_container(request.command),
    )


def refuse_srun(request: JobRequest, jobs: str) -> None:
    """Refuse to start ranks with srun where there is no Slurm.

    Args:
        jobs: what kind of jobs they are, in words.

    Raises:
        SchedulerError: the job is to be started with srun.
    """
    if request.launch.launcher == "srun" and not request.alone:
        raise SchedulerError(
            "launch.launcher: srun needs Slurm", cure=f"use mpiexec or auto for {jobs}"
        )


def srun_command(request: JobRequest) -> tuple[str, ...]:
    """The whole launch with srun.

    ``--cpus-per-task`` is repeated because Slurm 22.05 to 23.02 do not inherit it. A rank that dies
    ends the step instead of leaving the others blocked.
    """
    cores = (f"--cpus-per-task={request.resources.cpus_per_task}",)
    return (
        "srun",
        "--kill-on-bad-exit=1",
        f"--mpi={USUAL_PMI if request.launch.mpi == AUTO else request.launch.mpi}",
        f"--ntasks={request.ranks}",
        f"--ntasks-per-node={request.resources.tasks_per_node}",
        *(() if "cpus-per-task" in request.slurm.options else cores),
        "--distribution=block",
        "--export=ALL",
        *_SRUN_BINDING[request.launch.bind],
        *request.launch.args,
        *request.in_container(request.command),
    )


def find_mpiexec(request: JobRequest) -> str:
    """Path of mpiexec: the request's own, that beside its interpreter, or the first on PATH.

    Returns:
        ``mpiexec`` alone if the PATH inside the job decides, which is not known here.

    Raises:
        SchedulerError: none of them exists.
    """
    if request.mpiexec is not None:
        return request.mpiexec
    embedded = Path(request.python).parent / "mpiexec"
    if embedded.exists():
        return str(embedded)
    if request.changes_path:
        return "mpiexec"
    on_path = shutil.which("mpiexec")
    if on_path is None:
        raise SchedulerError(
            "mpiexec: not found beside the Python interpreter nor on PATH",
            cure="pip install mpich, or name your cluster's MPI in environment.modules",
        )
    return on_path


class MpiChoice(NamedTuple):
    """What ``launch.mpi`` comes to.

    Args:
        mpi: for the request.
        reason: in a line for people; empty if nobody would ask.
        warning: what will probably fail; empty if nothing will.
    """

    mpi: str
    reason: str = ""
    warning: str = ""

    def apply(self, request: JobRequest) -> JobRequest:
        """A request with it."""
        return request.update(launch={"mpi": self.mpi})


def choose_mpi(request: JobRequest) -> MpiChoice:
    """Choose ``launch.mpi`` if it is ``auto``, and compare it with what is installed otherwise.

    What the job's modules, set-up lines and template bring is not there yet, and not guessed.
    """
    if request.alone:
        return MpiChoice(request.launch.mpi)
    if request.launch.launcher == "srun":
        return _choose_pmi(request)
    try:
        mpiexec = find_mpiexec(request)
    except SchedulerError:
        mpiexec = "mpiexec"
    mpi = (None if mpiexec == "mpiexec" else mpi_of(mpiexec)) or request.launch.mpi
    if request.launch.mpi in {AUTO, mpi}:
        return MpiChoice(mpi)
    warning = f"launch.mpi is {request.launch.mpi}, but {mpiexec} is of the kind {mpi}"
    return MpiChoice(request.launch.mpi, warning=warning)


def _choose_pmi(request: JobRequest) -> MpiChoice:
    kinds = pmi_kinds(_output("srun", "--mpi=list") or "")
    if request.launch.mpi != AUTO:
        return MpiChoice(request.launch.mpi, warning=_warn_unknown(request.launch.mpi, kinds))
    elsewhere = request.changes_path or request.environment.container
    version = None if elsewhere else _output(request.python, "-m", "mpi4py", "--mpi-lib-version")
    first_line = (version or "").strip().partition("\n")[0]
    library = " ".join(first_line.partition(",")[0].split())
    if not library:
        mpi = USUAL_PMI if USUAL_PMI in kinds or "pmix" not in kinds else "pmix"
        why = "which MPI the ranks will find is not known here; launch.mpi overrules it"
        return MpiChoice(mpi, f"srun --mpi={mpi}: {why}")
    suitable = next((pmi for name, pmi in _PMI_OF_LIBRARY if name in library.lower()), (USUAL_PMI,))
    mpi = next((kind for kind in suitable if kind in kinds), suitable[0])
    reason = f"srun --mpi={mpi}: the ranks have {library}"
    return MpiChoice(mpi, reason, _warn_unknown(mpi, kinds))


def _warn_unknown(mpi: str, kinds: Sequence[str]) -> str:
    if knows_pmi(kinds, mpi):
        return ""
    return (
        f"srun here knows no --mpi={mpi}, but {', '.join(kinds)}; ranks may not find each other "
        "(launch.mpi)"
    )


def pmi_kinds(text: str) -> tuple[str, ...]:
    """Kinds of PMI that a Slurm has; empty if it does not say.

    Between the wrong two of launcher and MPI, every rank is the only one of its own job. MPICH and
    its relatives speak PMI-2, Open MPI speaks PMIx, and MPICH on Cray EX its own kind.

    Args:
        text: what ``srun --mpi=list`` prints; versions of one kind are there without it.
    """
    return tuple(dict.fromkeys(_PMI_KIND.findall(text)))


def knows_pmi(kinds: Sequence[str], mpi: str) -> bool:
    """Whether a Slurm knows what ``srun --mpi`` is given: a kind, or a version of one.

    Args:
        kinds: that Slurm has; with none, it does not say, and may know anything.
    """
    return not kinds or mpi in kinds or mpi.startswith(tuple(f"{kind}_v" for kind in kinds))


def mpi_of(mpiexec: str) -> str | None:
    """Whose an mpiexec is, as it says itself; None if that is not known."""
    version = _output(mpiexec, "--version", failing=True) or ""
    return next((name for part, name in _VERSIONS.items() if part in version), None)


def _output(*argv: str, failing: bool = False) -> str | None:
    """What a command prints; None if it does not exist, takes too long or fails.

    Args:
        failing: whether what a failing command prints counts.
    """
    try:
        done = process.run(argv, cure="", timeout_s=_TIMEOUT_S)
    except SchedulerError:
        return None
    return f"{done.stdout}\n{done.stderr}" if failing or done.returncode == 0 else None
