"""What ``srun --mpi`` is given, so that the ranks it starts find each other.

Between the wrong two of launcher and MPI, every rank is the only one of its own job. MPICH and what
is made of it speak PMI-2, Open MPI speaks PMIx, and MPICH on Cray EX its own kind.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_LINE = re.compile(r"^(?:srun:)?\s*([A-Za-z]\w*)\s*$", flags=re.MULTILINE)
_WISHES = (
    ("open mpi", ("pmix",)),
    ("cray mpich", ("cray_shasta", "pmi2")),
    ("mpich", ("pmi2",)),
    ("mvapich", ("pmi2",)),
    ("intel(r) mpi", ("pmi2",)),
)
"""By parts of what an MPI library says of itself, in small letters; the first that fits counts."""
USUAL = "pmi2"


def offered(listed: str) -> tuple[str, ...]:
    """Kinds of PMI that a Slurm has.

    Args:
        listed: what ``srun --mpi=list`` says; versions of one kind are there without it.
    """
    return tuple(dict.fromkeys(_LINE.findall(listed)))


def suitable(library: str, kinds: Sequence[str]) -> str | None:
    """The kind for an MPI library; None where it is unknown, or Slurm has none for it.

    Args:
        library: what it says of itself, or its name.
        kinds: that Slurm has; with none, all there are.
    """
    said = library.lower()
    wishes: Sequence[str] = next((wishes for name, wishes in _WISHES if name in said), ())
    return next((wish for wish in wishes if not kinds or wish in kinds), None)


def takes(kinds: Sequence[str], mpi: str) -> bool:
    """Whether a Slurm knows what ``srun --mpi`` is given: a kind, or a version of one.

    Args:
        kinds: that Slurm has; with none, it does not say, and may know anything.
    """
    return not kinds or mpi in kinds or mpi.startswith(tuple(f"{kind}_v" for kind in kinds))
