"""Writing user text into job scripts so that it arrives unchanged and runs nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence

from pipectl.errors import InvalidInputError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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


def shell_word(text: str, what: str) -> str:
    """``text`` as exactly one word for bash."""
    return shlex.quote(checked(text, what))


def shell_command(words: Sequence[str], what: str) -> str:
    """A command line that bash splits back into exactly ``words``."""
    return " ".join(shell_word(word, what) for word in words)


def variable_name(name: str) -> str:
    """``name`` itself, refused if bash cannot export it."""
    if _VARIABLE.fullmatch(name):
        return name
    raise InvalidInputError(
        f"environment.variables: {name!r} cannot name a variable",
        cure="use letters, digits and underscores, and no digit first",
    )


def slurm_value(text: str, what: str) -> str:
    """``text`` as one value of an ``#SBATCH`` line.

    Slurm's parser (src/sbatch/opt.c) expands nothing, but takes a backslash as an escape even
    within single quotes, so that shell quoting would lose characters.
    """
    checked(text, what)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def slurm_file(path: str, what: str) -> str:
    """``path`` as the value of ``--output``, where ``%j`` and the like would be replaced.

    Slurm (src/slurmd/slurmstepd/fname.c) replaces nothing once it meets a backslash, and then
    takes one backslash from each pair; without a backslash, ``%%`` stands for ``%``. It treats
    the working directory before a relative name alike, so the path must be absolute.
    """
    if "\\" in path:
        return slurm_value(path.replace("\\", "\\\\"), what)
    return slurm_value(path.replace("%", "%%"), what)


def pbs_value(text: str, what: str) -> str:
    """``text`` as one word of a ``#PBS`` line.

    PBS (src/cmds/qsub.c, make_argv) knows quotes as a shell does, and a backslash in them is one.
    """
    return shlex.quote(checked(text, what))


def pbs_path(path: str, what: str) -> str:
    """``path`` as the value of ``-o``, where what is before a colon would name a host."""
    if ":" not in path:
        return pbs_value(path, what)
    raise InvalidInputError(
        f"{what}: {path!r} holds a colon, behind which PBS would look for a path",
        cure="choose a directory without one",
    )


def options_of(line: str, flags: str = "") -> list[str]:
    """The options of one directive, each with its value: a line may hold several.

    Args:
        flags: letters of options without a value, behind which others may stand in the same word.
    """
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.split()
    found: list[str] = []
    for word in words:
        if word.startswith("-") or not found:
            while word[:1] == "-" and word[1:2] in tuple(flags) and word[2:]:
                found.append(word[:2])
                word = f"-{word[2:]}"
            found.append(word)
        else:
            found[-1] += f" {word}"
    return found


def checked_directive(
    text: str,
    what: str,
    command: str,
    managed: Mapping[str, str | None],
    is_option: Callable[[str, str], bool],
    *,
    mark: str,
    example: str,
    flags: str = "",
) -> str:
    """A line of the user's own options for the head of a script, verbatim.

    Args:
        what: its field.
        command: whose option it is.
        managed: options that pipectl writes itself, and the fields to set instead.
        is_option: whether what the user wrote is an option, in any spelling.
        mark: of a directive, which may be there.
        flags: as for :func:`options_of`.

    Raises:
        InvalidInputError: it is none, or holds one that pipectl writes.
    """
    line = checked(text, what).strip().removeprefix(mark).strip()
    if not line.startswith("-"):
        raise InvalidInputError(
            f"{what}: {text!r} is no option of {command}",
            cure=f"write it as on {command}'s command line, for example {example}",
        )
    given = options_of(line, flags)
    for option, key in managed.items():
        if any(is_option(one, option) for one in given):
            raise InvalidInputError(
                f"{what}: {option} is written by pipectl itself",
                cure=f"set {key} in the job spec" if key else "remove it",
            )
    return line


def _is_control(character: str) -> bool:
    """C0 and C1 controls, DEL, and the Unicode line separators."""
    code = ord(character)
    return code < 0x20 or 0x7F <= code < 0xA0 or code in (0x2028, 0x2029)
