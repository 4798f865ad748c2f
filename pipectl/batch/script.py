"""Job scripts, from the templates in ``templates/``.

Values in ``{{ }}`` are quoted for the shell unless marked as safe: a text is one word, a sequence a
command line. Control characters are refused. Jinja is imported only to render.
"""

from __future__ import annotations

import re
import shlex
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.batch import process
from pipectl.batch.containers import edf_of, wrap
from pipectl.batch.launchers import (
    NOT_OF_JOBS,
    OF_JOBS,
    Expanded,
    is_told_of_jobs,
    launch_command,
)
from pipectl.batch.refusals import TROUBLES
from pipectl.batch.request import CHECKPOINTED, WORKER, JobRequest
from pipectl.directives import SYNTAXES, find_option, options_of
from pipectl.errors import InvalidInputError
from pipectl.units import first_harmful, format_clock

if TYPE_CHECKING:
    from jinja2 import Environment

    from pipectl.spec.launch import Environment as SpecOfEnvironment

TIGHT_HEAP = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
"""Makes glibc join free memory at once. By default it keeps small pieces around aligned blocks
apart, so a freed block is too small for the next one of its size, and the heap grows by several
times the largest tensors. glibc reads this before a process can set anything."""
_TEMPLATES = Path(__file__).parent / "templates"
_PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_-]+")


def render_script(
    base: str,
    request: JobRequest,
    scheduler: str,
    *,
    alone_on_node: tuple[str, ...] = (),
    **values: Any,
) -> str:
    """Render a job script.

    Args:
        base: file name of one of pipectl's templates, or the text of one that extends
            ``job.sh.j2``.
        scheduler: name of the batch system and of the section with the user's options.
        alone_on_node: command that starts another on the first node, if the script runs elsewhere.
        values: further variables of ``base``.

    Raises:
        InvalidInputError: a value cannot be written to a script.
        SchedulerError: see :func:`pipectl.batch.launchers.launch_command`.
    """
    from markupsafe import Markup

    syntax = SYNTAXES.get(scheduler)  # None if the batch system reads no options in scripts

    def sets(*table: str) -> str | None:
        """Return the name of a user's option that is in the table."""
        if syntax is None:
            return None
        return find_option(syntax, getattr(request, scheduler).options, table)

    def writes(option: str) -> bool:
        """Return whether pipectl writes its own option, because no option of the user is in its
        place."""
        names = () if syntax is None else syntax.replacements[option]
        return not any(name in getattr(request, scheduler).options for name in names)

    if syntax is not None and request.after and (name := sets(*syntax.dependencies)) is not None:
        raise InvalidInputError(
            f"{scheduler}.options.{name}: `pipectl submit --after` sets the job's dependency",
            hint="remove it, or submit without --after",
        )
    if syntax is not None and request.launch.options:
        raise InvalidInputError(
            "launch.options: are for the batch system of a package",
            hint=f"write {scheduler}.options",
        )
    _refuse_broken_lines(request.environment)
    command = launch_command(request, scheduler)
    first = wrap(request, request.first_command, scheduler) if request.first_command else ()

    def on_node(words: tuple[str, ...]) -> tuple[str, ...]:
        """Return a command of one process as it is started from where the script runs."""
        return (*alone_on_node, *words) if words and words[0] != "srun" else words

    environment = _environment()
    ours = environment.from_string(base) if "{%" in base else environment.get_template(base)
    context = {
        "job": request,
        "scheduler": scheduler,
        "ranks_command": command if not request.single_process else on_node(command),
        "first_command": on_node(first),
        # Elsewhere, there may be no such program.
        "container_program": "" if alone_on_node else request.container_program,
        "edf": Markup(edf_of(request)),
        "teardown": Markup(shlex.quote("\n".join(request.environment.teardown))),
        "checkpointed": CHECKPOINTED,
        "worker": WORKER,
        "tight_heap": TIGHT_HEAP,
        "sets": sets,
        "writes": writes,
        "of_jobs": Markup("|".join(OF_JOBS)),
        "not_of_jobs": Markup("|".join(NOT_OF_JOBS)),
        "is_told_of_jobs": is_told_of_jobs,
        "troubles": "|".join(TROUBLES),
        **values,
    }
    return ours.render(context)


@lru_cache(64)  # the points of a sweep have the same
def _fault_of_lines(lines: str) -> str:
    """Why shell code of the user is not whole; empty if it is."""
    if not lines:
        return ""
    # The end of a group is wrong here, unless it is a word of a last line that goes on.
    fault = process.fault_of_bash(f"{lines}\n")
    if not fault and not process.fault_of_bash(f"{lines}\n}}\n"):
        fault = "its last line is not complete"
    return fault


def _refuse_broken_lines(environment: SpecOfEnvironment) -> None:
    """Refuse shell code of the user that is not whole: what follows would become a part of it."""
    for key in ("setup", "teardown"):
        if fault := _fault_of_lines("\n".join(getattr(environment, key))):
            raise InvalidInputError(
                f"environment.{key}: not valid bash: {fault}",
                hint=f"correct it; lines are counted from the first of environment.{key}",
            )


def render_variables(request: JobRequest) -> str:
    """Render the file of the job's variables, which may contain keys and tokens.

    Raises:
        InvalidInputError: bash cannot export a name or value.
    """
    lines = []
    for name, text in request.environment.variables.items():
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise InvalidInputError(
                f"environment.variables: {name!r} is not a variable name",
                hint="use letters, digits and underscores; the first cannot be a digit",
            )
        _refuse_controls(text.replace("\t", ""))
        lines.append(f"export {name}={shlex.quote(text)}\n")
    return "".join(lines)


def _quote(word: object) -> str:
    """Return a word as the shell reads it."""
    if isinstance(word, Expanded):
        return f'"{word}"'
    return shlex.quote(_refuse_controls(str(word)))


def _refuse_controls(text: str) -> str:
    """Return the text; raise an error if it has control characters, which could end a directive."""
    breaks = (character for character in text if character in "\n\t")
    if character := first_harmful(text) or next(breaks, None):
        raise InvalidInputError(
            f"{text!r} contains the control character {character!r}",
            hint="remove it; a value in a job script must be one line of printable text",
        )
    return text


def slurm_value(text: str) -> str:
    """Quote a value for an ``#SBATCH`` line.

    Slurm's parser (src/sbatch/opt.c) expands nothing, but a backslash escapes even within single
    quotes: quoting for the shell would lose characters.
    """
    if _PLAIN.fullmatch(_refuse_controls(text)):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def slurm_file(path: str) -> str:
    """Quote an absolute path for ``--output``, where Slurm replaces ``%j`` and the like.

    Slurm (src/slurmd/slurmstepd/fname.c) replaces nothing in a path with a backslash, and removes
    one of each pair of backslashes; otherwise ``%%`` stands for ``%``.
    """
    if "\\" in path:
        return slurm_value(path.replace("\\", "\\\\"))
    return slurm_value(path.replace("%", "%%"))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_eval_context
    from markupsafe import Markup

    @pass_eval_context  # otherwise constants would be escaped as HTML first
    def quote(_: object, value: object) -> Markup:
        if isinstance(value, Markup):
            return value
        words = value if isinstance(value, list | tuple) else (value,)
        return Markup(" ".join(map(_quote, words)))

    # With autoescape, results of blocks, macros and filters are Markup: they are quoted already.
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        autoescape=True,
        finalize=quote,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{##",  # bash has ${#variable}
        comment_end_string="##}",
    )
    environment.filters["slurm"] = lambda value: Markup(slurm_value(str(value)))
    environment.filters["slurm_file"] = lambda path: Markup(slurm_file(str(path)))
    environment.filters["options"] = lambda options: [
        written for name, value in options.items() for written in options_of(name, value)
    ]
    environment.filters["clock"] = format_clock
    return environment
