"""The command that starts one process per rank: MPI's ``mpiexec``, Slurm's ``srun``, or another.

Sources of the options: ``mpiexec -help`` and ``mpiexec -bind-to -help`` of MPICH; prterun's help
(``--map-by``, ``--rank-by``, ``--bind-to``; Open MPI 4 takes the same); Intel's developer reference
(``mpiexec.hydra``, "Interoperability with OpenMP API", "Process Pinning"); job scripts of sites
with Cray's PALS, and of TACC's with ibrun; flux-run(1).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipectl.batch import process
from pipectl.batch.containers import rank_words, wrap
from pipectl.batch.request import JobRequest
from pipectl.errors import InvalidInputError, SchedulerError
from pipectl.units import did_you_mean

if TYPE_CHECKING:
    from pipectl.spec.launch import Environment, Launch

AUTO = "auto"
_TIMEOUT_S = 20.0


class Expanded(str):
    """A word of a command in which the shell replaces a variable of the job script."""


_VARIABLE = re.compile(r"(--[a-z-]+=)?\$(ranks|count|nodelist)")
_COUNTS = {"ranks": "$ranks", "nodes": "$count"}
"""What the script of a job with a range of nodes knows first at its start."""


class _Mpiexec(NamedTuple):
    """The options of a kind of mpiexec.

    Args:
        versions: texts of which ``mpiexec --version`` prints one.
        words: the options, with placeholders for ``place`` and ``bind``.
        place: placement on the nodes of a job, and on this machine alone.
        bind: binding by ``launch.bind``.
    """

    versions: tuple[str, ...]
    words: str
    place: tuple[str, str]
    bind: Mapping[str, str]


_MPIEXECS = {
    "hydra": _Mpiexec(  # by default it binds nothing
        ("HYDRA build details",),
        "-n {ranks} {place} {bind}",
        ("-ppn {per_node}", ""),
        {"none": "", "cores": "-bind-to core:{cores}", "numa": "-bind-to numa"},
    ),
    # By default it binds each of two ranks to one core, more to a domain. More ranks than cores of
    # this machine are slow, not wrong.
    "openmpi": _Mpiexec(
        ("(Open MPI)", "(OpenRTE)"),
        "-n {ranks} --map-by {place}{bind}",
        ("ppr:{per_node}:node", "slot"),
        {
            "none": "{oversubscribe} --rank-by slot --bind-to none",
            "cores": ":PE={cores} --rank-by slot --bind-to core",
            "numa": "{oversubscribe} --rank-by slot --bind-to numa",
        },
    ),
    "intel": _Mpiexec(  # by default it divides the cores; global options have to come first
        ("Intel(R) MPI Library",),
        "{place} {bind} -n {ranks}",
        ("-ppn {per_node}", ""),
        {
            "none": "-genv I_MPI_PIN off",
            "cores": "-genv I_MPI_PIN_CELL core -genv I_MPI_PIN_DOMAIN {cores}:compact",
            "numa": "-genv I_MPI_PIN_DOMAIN numa",
        },
    ),
    "cray": _Mpiexec(
        ("mpiexec version ",),
        "-n {ranks} {place} --depth {cores} --cpu-bind {bind}",
        ("--ppn {per_node}", ""),
        {"none": "none", "cores": "depth", "numa": "numa"},
    ),
}


class _Launcher(NamedTuple):
    """The options of a launcher that does not belong to an MPI.

    Args:
        words: the command, with placeholders for ``mpi``, ``cores`` and ``bind``.
        bind: binding by ``launch.bind``; what is missing is refused.
        mpi: option for ``launch.mpi``; empty if there is none.
        scheduler: the batch system that it belongs to; empty if any may have it.
        hint: how to bind in another way.
    """

    words: str
    bind: Mapping[str, str]
    mpi: str = ""
    scheduler: str = ""
    hint: str = ""


_LAUNCHERS = {
    # In Slurm 22.05 to 23.02, srun does not inherit the cores. A rank that dies must end the step,
    # otherwise the others block.
    "srun": _Launcher(
        "srun --kill-on-bad-exit=1 {mpi} --ntasks={ranks} --ntasks-per-node={per_node} {cores} "
        "--distribution=block --export=ALL {bind}",
        {"none": "", "cores": "--cpu-bind=cores", "numa": "--cpu-bind=ldoms"},
        mpi="--mpi={mpi}",
        scheduler="slurm",
    ),
    # TACC's; the loaded modules say which MPI.
    "ibrun": _Launcher(
        "ibrun -n {ranks}",
        {"none": ""},
        scheduler="slurm",
        hint="ibrun binds ranks by a program: write launch.args: [task_affinity]",
    ),
    # By default the ranks that still run are killed 30 s after the first one has ended.
    "flux": _Launcher(
        "flux run --nodes={nodes} --exclusive --tasks-per-node={per_node} {mpi} -o exit-on-error "
        "-o exit-timeout=none {bind}",
        {"none": "", "cores": "-o cpu-affinity=per-task"},
        mpi="-o pmi={mpi}",
        hint="flux binds ranks to cores only, or by -o cpu-affinity in launch.args",
    ),
}
MPIEXECS = tuple(_MPIEXECS)
"""Names for ``launch.mpi`` with mpiexec: MPICH, Open MPI, Intel MPI, and PALS on Cray EX."""
OF_JOBS = (
    "SLURM*", "PBS_*", "PALS_*", "LSB_*", "LOADL*", "COBALT_*", "FLUX_*", "PE_HOSTFILE",
    "HYDRA_LAUNCHER*", "HYDRA_BOOTSTRAP*", "HYDRA_RMK", "HYDRA_HOST_FILE", "HYDI_*",
    "I_MPI_HYDRA_BOOTSTRAP*", "I_MPI_HYDRA_RMK", "I_MPI_HYDRA_HOST_FILE", "I_MPI_PMI_LIBRARY",
    "PMI_*", "PMI2_*", "PMIX_*", "MPI_LOCAL*", "OMPI_COMM_*", "OMPI_UNIVERSE*", "OMPI_MCA_orte_*",
    "OMPI_MCA_ess*", "PRTE_LAUNCHED",
)  # fmt: skip
"""Patterns of the variables by which an mpiexec or MPI finds that it runs in a job of a batch
system, or under another launcher."""
NOT_OF_JOBS = ("*_TMPDIR", "*_SUBMIT_DIR", "SLURM_CONF*", "SLURM_JWT", "PBS_O_*", "PMIX_MCA_*")
"""Patterns of variables that it does not look at, but that a user's code may need."""
_PMIS = {"open mpi": ("pmix",), "cray mpich": ("cray_shasta", "pmi2")}
"""Kinds of PMI of MPI libraries, the best first, by parts of their version text."""
_USUAL_PMI = "pmi2"
"""The kind of MPICH and its derivatives."""


def launch_command(request: JobRequest, scheduler: str) -> tuple[str, ...]:
    """Return the command that starts all ranks, or the one process of a job without MPI.

    In an allocation, mpiexec finds the nodes by itself. The command of an array is empty, because
    its runs start their own ranks.

    Args:
        scheduler: name of the batch system.

    Raises:
        InvalidInputError: ranks cannot be bound as requested, or not started in their container.
        SchedulerError: there is no mpiexec, or the launcher belongs to another batch system.
    """
    if request.array is not None:
        return ()
    launch = request.launch
    if request.single_process:
        return wrap(request, request.command, scheduler)
    options, command = rank_words(request, request.command, scheduler)
    if request.launcher == "mpiexec":
        own = _mpiexec_options(request, on_this_machine=scheduler == "local")
        mpiexec = request.mpiexec or find_mpiexec(request.environment)
        return (mpiexec, *map(_expanded, own), *launch.args, *command)
    words = map(_expanded, _launcher_words(request, scheduler))
    return (*words, *options, *launch.args, *command)


def _expanded(word: str) -> str:
    return Expanded(word) if _VARIABLE.fullmatch(word) else word


def _counts(request: JobRequest) -> Mapping[str, object]:
    """Return the numbers of nodes and ranks of a job, or the variables that have them."""
    if request.node_range is not None:
        return _COUNTS
    return {"ranks": request.ranks, "nodes": request.resources.nodes}


def _launcher_words(request: JobRequest, scheduler: str) -> list[str]:
    """Return a launcher that does not belong to an MPI, with its options."""
    launch, resources = request.launch, request.resources
    name, launcher = request.launcher, _LAUNCHERS[request.launcher]
    if launcher.scheduler not in {"", scheduler}:
        raise SchedulerError(
            f"launch.launcher: {name} needs {launcher.scheduler.capitalize()}",
            hint="use mpiexec or auto",
        )
    if launch.mpi != AUTO and not launcher.mpi:
        raise InvalidInputError(
            f"launch.mpi: {name} starts the MPI of the loaded modules, and takes no {launch.mpi!r}",
            hint="remove launch.mpi, and name the MPI in environment.modules",
        )
    if launch.bind not in launcher.bind:
        raise InvalidInputError(
            f"launch.bind: {name} has no option that binds ranks to {launch.bind}",
            hint=launcher.hint,
        )
    cores = f"--cpus-per-task={resources.cpus_per_task}"
    has_mpi = launch.mpi != AUTO or name == "srun"
    words = launcher.words.format(
        **_counts(request),
        per_node=resources.tasks_per_node,
        cores="" if "cpus-per-task" in request.slurm.options else cores,
        mpi=launcher.mpi.format(mpi=launch.mpi) if has_mpi else "",
        bind=launcher.bind[launch.bind],
    )
    if name == "srun" and request.node_range is not None:
        words += " --nodes=$count --nodelist=$nodelist"
    return words.split()


def belongs_to_mpi(launch: Launch) -> bool:
    """Return whether the launcher of a job is an mpiexec, which needs no batch system."""
    return launch.launcher not in _LAUNCHERS


def is_told_of_jobs(launch: Launch) -> bool:
    """Return whether a launcher starts ranks through a batch system even on this machine: PALS and
    Flux have no other way."""
    return launch.mpi == "cray" or launch.launcher == "flux"


def local_environment(launch: Launch | None = None) -> dict[str, str]:
    """Return the environment of an mpiexec, or of a process with MPI, for this machine alone.

    In a job, such as the shell of ``srun --pty bash``, mpiexec would start the ranks through the
    batch system, on the nodes of that job, and might wait for cores that the shell has.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if (launch is not None and is_told_of_jobs(launch))
        or any(fnmatchcase(name, pattern) for pattern in NOT_OF_JOBS)
        or not any(fnmatchcase(name, pattern) for pattern in OF_JOBS)
    }


def _mpiexec_options(request: JobRequest, *, on_this_machine: bool) -> list[str]:
    """Return the options of mpiexec for ranks on this machine, or on the nodes of the job."""
    mpi, bind = request.launch.mpi, request.launch.bind
    if mpi == AUTO and bind == "none":
        return ["-n", str(_counts(request)["ranks"])]  # all kinds take it
    if mpi == AUTO:
        raise InvalidInputError(
            f"launch.bind: how to bind ranks to {bind} depends on the mpiexec that the job finds, "
            "which is not known here",
            hint=f"set launch.mpi to its kind: {', '.join(MPIEXECS)}",
        )
    if mpi not in _MPIEXECS:
        raise InvalidInputError(
            f"launch.mpi: no mpiexec of the kind {mpi!r}{did_you_mean(mpi, MPIEXECS)}",
            hint=f"choose one of {', '.join((AUTO, *MPIEXECS))}, or set launch.launcher: srun",
        )
    kind, resources = _MPIEXECS[mpi], request.resources
    values = {
        **_counts(request),
        "per_node": resources.tasks_per_node,
        "cores": resources.cpus_per_task,
        "oversubscribe": ":OVERSUBSCRIBE" if on_this_machine else "",
    }
    place, bound = kind.place[on_this_machine].format(**values), kind.bind[bind].format(**values)
    return kind.words.format(place=place, bind=bound, **values).split()


def _changes_path(environment: Environment) -> bool:
    """Return whether PATH in a job may differ from that of this process."""
    return bool(environment.modules or environment.setup or "PATH" in environment.variables)


def find_mpiexec(environment: Environment) -> str:
    """Return the path of a job's mpiexec: the one beside this Python, or the first on PATH.

    The result is ``mpiexec`` if it depends on the job's own PATH.

    Raises:
        SchedulerError: there is no mpiexec.
    """
    embedded = Path(sys.executable).parent / "mpiexec"
    if embedded.exists():
        return str(embedded)
    if _changes_path(environment):
        return "mpiexec"
    on_path = shutil.which("mpiexec")
    if on_path is None:
        raise SchedulerError(
            "mpiexec: not found next to the Python interpreter or on PATH",
            hint="pip install mpich, or name your cluster's MPI in environment.modules",
        )
    return on_path


class MpiChoice(NamedTuple):
    """The MPI of a job.

    Args:
        kind: the value of ``launch.mpi``.
        reason: why this kind was chosen, for the user; may be empty.
        warning: what will probably fail; may be empty.
    """

    kind: str
    reason: str = ""
    warning: str = ""


def choose_mpi(launch: Launch, environment: Environment, *, single_process: bool) -> MpiChoice:
    """Choose ``launch.mpi`` if it is ``auto``; otherwise compare it with the installed MPI.

    An MPI from the job's modules or setup is not known before the job runs.

    Args:
        single_process: whether the job is one process, without MPI.
    """
    mpi = launch.mpi
    if single_process:
        return MpiChoice(mpi)
    container = environment.container
    starts_container = container is not None and container.by_srun and launch.launcher == AUTO
    if launch.launcher == "srun" or starts_container:
        return _choose_pmi(mpi, environment)
    if not belongs_to_mpi(launch):
        return MpiChoice(mpi)
    try:
        mpiexec = find_mpiexec(environment)
    except SchedulerError:
        return MpiChoice(mpi)
    kind = None if mpiexec == "mpiexec" else kind_of(mpiexec)
    if kind is None or mpi in {AUTO, kind}:
        return MpiChoice(kind or mpi)
    return MpiChoice(mpi, warning=f"launch.mpi is {mpi}, but {mpiexec} is of the kind {kind}")


def _choose_pmi(mpi: str, environment: Environment) -> MpiChoice:
    """Choose the kind of PMI for ``srun --mpi``.

    If srun and the MPI library use different kinds of PMI, each rank starts as a job of one rank.
    """
    kinds, reason = list_pmis(), ""
    if mpi == AUTO:
        elsewhere = _changes_path(environment) or environment.container
        command = (sys.executable, "-m", "mpi4py", "--mpi-lib-version")
        version = "" if elsewhere else (_output(*command) or "").strip().partition("\n")[0]
        library = " ".join(version.partition(",")[0].split())
        if library:
            names = (name for name in _PMIS if name in library.lower())
            suitable = _PMIS.get(next(names, ""), (_USUAL_PMI,))
            mpi = next((kind for kind in suitable if kind in kinds), suitable[0])
            reason = f"srun --mpi={mpi}: the ranks have {library}"
        else:
            mpi = "pmix" if "pmix" in kinds and _USUAL_PMI not in kinds else _USUAL_PMI
            why = "which MPI the ranks will find is not known here; launch.mpi overrules it"
            reason = f"srun --mpi={mpi}: {why}"
    warning = (
        f"srun here knows no --mpi={mpi}, but {', '.join(kinds)}; ranks may not find each other "
        "(launch.mpi)"
    )
    return MpiChoice(mpi, reason, "" if knows_pmi(kinds, mpi) else warning)


def list_pmis() -> tuple[str, ...]:
    """Return the kinds of PMI that ``srun --mpi=list`` prints, without versions."""
    output = _output("srun", "--mpi=list") or ""
    names = re.findall(r"^(?:srun:)?\s*([A-Za-z]\w*)\s*$", output, flags=re.MULTILINE)
    return tuple(dict.fromkeys(names))


def knows_pmi(kinds: Sequence[str], mpi: str) -> bool:
    """Return whether ``srun --mpi`` accepts a kind of PMI, or a version of it.

    Args:
        kinds: kinds that Slurm lists; if there are none, anything may be accepted.
    """
    return not kinds or mpi in kinds or mpi.startswith(tuple(f"{kind}_v" for kind in kinds))


def kind_of(mpiexec: str) -> str | None:
    """Return the kind of an mpiexec from its version output; None if it is unknown."""
    version = _output(mpiexec, "--version", may_fail=True) or ""
    kinds = _MPIEXECS.items()
    return next((kind for kind, own in kinds if any(x in version for x in own.versions)), None)


def _output(*argv: str, may_fail: bool = False) -> str | None:
    """Return the output of a command; None if it cannot run, times out, or fails and may not."""
    try:
        done = process.run(argv, hint="", timeout_s=_TIMEOUT_S)
    except SchedulerError:
        return None
    return f"{done.stdout}\n{done.stderr}" if may_fail or done.returncode == 0 else None
