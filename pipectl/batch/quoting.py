"""Writing user text into job scripts so that it arrives unchanged and runs nothing."""

from __future__ import annotations

import re

from pipectl.errors import InvalidInputError

_PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_-]+")


def checked(text: str, what: str) -> str:
    """``text`` itself, refused if it has control characters (a newline would end a directive).

    Raises:
        InvalidInputError: naming ``what``.
    """
    bad = next((character for character in text if _is_control(character)), None)
    if bad is None:
        return text
    raise InvalidInputError(
        f"{what}: holds the control character {bad!r}, which no job script can carry",
        cure="remove it; a value must be one line of printable text",
    )


def _is_control(character: str) -> bool:
    """C0 and C1 controls, DEL, and the Unicode line separators."""
    code = ord(character)
    return code < 0x20 or 0x7F <= code < 0xA0 or code in (0x2028, 0x2029)


def slurm_value(text: str) -> str:
    """``text`` as one value of an ``#SBATCH`` line.

    Slurm's parser (src/sbatch/opt.c) expands nothing, but takes a backslash as an escape even
    within single quotes, so that shell quoting would lose characters.
    """
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def slurm_file(path: str) -> str:
    """``path`` as the value of ``--output``, where ``%j`` and the like would be replaced.

    Slurm (src/slurmd/slurmstepd/fname.c) replaces nothing once it meets a backslash, and then
    takes one backslash from each pair; without a backslash, ``%%`` stands for ``%``. It treats
    the working directory before a relative name alike, so the path must be absolute.
    """
    if "\\" in path:
        return slurm_value(path.replace("\\", "\\\\"))
    return slurm_value(path.replace("%", "%%"))
