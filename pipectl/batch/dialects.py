"""What the ``mpiexec`` of each MPI is told in its own words: how many ranks, where, on which cores.

The words are those of ``mpiexec -help`` and ``mpiexec -bind-to -help`` of MPICH, of prterun's help
(``--map-by``, ``--rank-by``, ``--bind-to``; Open MPI 4 takes the same), of Intel's developer
reference (``mpiexec.hydra``, "Interoperability with OpenMP API", "Process Pinning"), and of the job
scripts that sites with Cray's PALS show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pipectl.errors import InvalidInputError
from pipectl.units import did_you_mean

AUTO = "auto"


class Layout(NamedTuple):
    """How ranks are to be started.

    Args:
        ranks: of the job.
        per_node: ranks on each node; None where all are on this machine.
        cores: of each rank.
        bind: ``none``, ``cores`` (each rank to its own) or ``numa`` (each rank to a domain).
    """

    ranks: int
    per_node: int | None
    cores: int
    bind: str


class Dialect(NamedTuple):
    """One way to talk to mpiexec.

    Args:
        name: for ``launch.mpi``.
        sign: a part of what ``mpiexec --version`` says.
        words: of a launch, without the program itself.
    """

    name: str
    sign: str
    words: Callable[[Layout], Iterator[str]]


def _hydra(layout: Layout) -> Iterator[str]:
    """MPICH; it binds nothing unless told to."""
    yield from ("-n", str(layout.ranks))
    if layout.per_node is not None:
        yield from ("-ppn", str(layout.per_node))
    if layout.bind != "none":
        yield from ("-bind-to", {"cores": f"core:{layout.cores}", "numa": "numa"}[layout.bind])


def _openmpi(layout: Layout) -> Iterator[str]:
    """Open MPI; on its own it ties each of two ranks to one core, more ranks to a domain."""
    yield from ("-n", str(layout.ranks))
    place = "slot" if layout.per_node is None else f"ppr:{layout.per_node}:node"
    if layout.bind == "cores":
        place += f":PE={layout.cores}"
    elif layout.per_node is None:
        place += ":OVERSUBSCRIBE"  # more ranks than cores are slow, not wrong
    yield from ("--map-by", place, "--rank-by", "slot")
    yield from ("--bind-to", {"none": "none", "cores": "core", "numa": "numa"}[layout.bind])


def _intel(layout: Layout) -> Iterator[str]:
    """Intel MPI; on its own it shares out the cores. What is global has to come first."""
    if layout.per_node is not None:
        yield from ("-ppn", str(layout.per_node))
    if layout.bind == "none":
        yield from ("-genv", "I_MPI_PIN", "off")
    elif layout.bind == "cores":
        yield from ("-genv", "I_MPI_PIN_CELL", "core")
        yield from ("-genv", "I_MPI_PIN_DOMAIN", f"{layout.cores}:compact")
    else:
        yield from ("-genv", "I_MPI_PIN_DOMAIN", "numa")
    yield from ("-n", str(layout.ranks))


def _cray(layout: Layout) -> Iterator[str]:
    """PALS on Cray EX."""
    yield from ("-n", str(layout.ranks))
    if layout.per_node is not None:
        yield from ("--ppn", str(layout.per_node))
    yield from ("--depth", str(layout.cores))
    yield from ("--cpu-bind", {"none": "none", "cores": "depth", "numa": "numa"}[layout.bind])


DIALECTS = (
    Dialect("hydra", "HYDRA build details", _hydra),
    Dialect("openmpi", "(Open MPI)", _openmpi),
    Dialect("openmpi", "(OpenRTE)", _openmpi),
    Dialect("intel", "Intel(R) MPI Library", _intel),
    Dialect("cray", "mpiexec version ", _cray),
)
NAMES = tuple(dict.fromkeys(dialect.name for dialect in DIALECTS))


def recognized(said: str) -> str | None:
    """The dialect of an mpiexec.

    Args:
        said: upon ``--version``.
    """
    return next((dialect.name for dialect in DIALECTS if dialect.sign in said), None)


def launch_words(name: str, layout: Layout) -> tuple[str, ...]:
    """Options of mpiexec for a launch.

    Args:
        name: of a dialect; with ``auto`` only what all of them take.

    Raises:
        InvalidInputError: there is no such dialect, or none is known and ranks are to be bound.
    """
    if name == AUTO:
        if layout.bind != "none":
            raise InvalidInputError(
                f"launch.bind: how to bind ranks to {layout.bind} depends on the mpiexec that the "
                "job finds, which is not known here",
                cure=f"set launch.mpi to what it is: {', '.join(NAMES)}",
            )
        return ("-n", str(layout.ranks))
    for dialect in DIALECTS:
        if dialect.name == name:
            return tuple(dialect.words(layout))
    raise InvalidInputError(
        f"launch.mpi: no mpiexec of the kind {name!r}{did_you_mean(name, NAMES)}",
        cure=f"choose one of {', '.join((AUTO, *NAMES))}, or set launch.launcher: srun",
    )
