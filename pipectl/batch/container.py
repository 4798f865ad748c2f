"""Commands within a container: Apptainer, which was Singularity."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pipectl.errors import InvalidInputError

PYTHON = "python3"
"""Of the container; it has torch, mpi4py and pipectl."""
_CUTS = re.compile("[,:]")


@dataclass(frozen=True)
class Container:
    """Where commands of a job run.

    Args:
        image: path of an image, or an address such as ``docker://…``.
        binds: directories of the host that it sees under the same names.
        accelerators: whether it sees those of the node.
    """

    image: str
    binds: tuple[Path, ...] = ()
    accelerators: bool = False

    def around(self, words: tuple[str, ...], python: str) -> tuple[str, ...]:
        """A command within it.

        Args:
            python: of the host, instead of which the container's runs.

        Raises:
            InvalidInputError: a directory cannot be named to it.
        """
        own = (PYTHON if words[0] == python else words[0], *words[1:])
        return ("apptainer", "exec", *self._options(), self.image, *own)

    def seeing(self, directory: Path) -> Container:
        """The same, with one directory more."""
        return replace(self, binds=tuple(dict.fromkeys((*self.binds, directory))))

    def _options(self) -> Iterator[str]:
        if self.accelerators:
            yield "--nv"
        for path in self.binds:
            if _CUTS.search(str(path)):
                raise InvalidInputError(
                    f"environment.container: {path} holds a comma or colon, which Apptainer would "
                    "take for the end of its name",
                    cure="choose a directory without one",
                )
            yield f"--bind={path}"
