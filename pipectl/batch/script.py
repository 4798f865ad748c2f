"""Job scripts: the templates in ``templates/``, or a user's template that extends one of them.

Values in ``{{ }}`` are quoted for the shell unless marked as safe: a text is one word, a sequence a
command line. Control characters are refused. Jinja is imported only to render.
"""

from __future__ import annotations

import re
import shlex
import traceback
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipectl.batch import process
from pipectl.batch.containers import edf_of, wrap
from pipectl.batch.launchers import NOT_OF_JOBS, OF_JOBS, is_told_of_jobs, launch_command
from pipectl.batch.refusals import TROUBLES
from pipectl.batch.request import CHECKPOINTED, JobRequest, Template
from pipectl.directives import (
    SYNTAXES,
    Syntax,
    fault_of_line,
    find_option,
    options_of,
)
from pipectl.errors import InvalidInputError, PipectlError, Problem, SpecError
from pipectl.units import did_you_mean, first_harmful, format_clock

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2 import Template as Compiled

TIGHT_HEAP = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
"""Makes glibc join free memory at once. By default it keeps small pieces around aligned blocks
apart, so a freed block is too small for the next one of its size, and the heap grows by several
times the largest tensors. glibc reads this before a process can set anything."""
_TEMPLATES = Path(__file__).parent / "templates"
_PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_-]+")
_SHEBANG = re.compile(r"#!\s*(/\S*/bash|/usr/bin/env (-S )?bash)(\s.*)?")
_BASH_ERROR = re.compile(r"line (\d+): (.*)")
_CURE = "docs/slurm.md shows a template"


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
        base: file name of one of pipectl's templates, or a template that extends ``job.sh.j2``.
        scheduler: name of the batch system and of the section with the user's options.
        alone_on_node: command that starts another on the first node, if the script runs elsewhere.
        values: further variables of ``base``.

    Raises:
        InvalidInputError: a value cannot be written to a script, or the user's template is wrong.
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
            cure="remove it, or submit without --after",
        )
    if syntax is not None and request.launch.options:
        raise InvalidInputError(
            "launch.options: are for the batch system of a package",
            cure=f"write {scheduler}.options",
        )
    command = launch_command(request, scheduler)
    first = wrap(request, request.first_command, scheduler) if request.first_command else ()

    def on_node(words: tuple[str, ...]) -> tuple[str, ...]:
        """Return a command of one process as it is started from where the script runs."""
        return (*alone_on_node, *words) if words and words[0] != "srun" else words

    environment = _environment()
    ours = environment.from_string(base) if "{%" in base else environment.get_template(base)
    context = {
        "job": request,
        "base": ours,
        "scheduler": scheduler,
        "launch": command if not request.alone else on_node(command),
        "first": on_node(first),
        # Elsewhere, there may be no such program.
        "container_program": "" if alone_on_node else request.container_program,
        "edf": Markup(edf_of(request)),
        "checkpointed": CHECKPOINTED,
        "tight_heap": TIGHT_HEAP,
        "sets": sets,
        "writes": writes,
        "of_jobs": Markup("|".join(OF_JOBS)),
        "not_of_jobs": Markup("|".join(NOT_OF_JOBS)),
        "is_told_of_jobs": is_told_of_jobs,
        "troubles": "|".join(TROUBLES),
        **values,
    }
    script = ours.render(context)
    if request.template is None:
        return script
    template = request.template
    user = _compile(environment, template)
    try:
        custom = user.render(context)
    except Exception as error:  # expressions in a template may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno or 1 for frame in frames if frame.filename == template.file]
        message = error.message if isinstance(error, PipectlError) else str(error)
        raise _fault(template, lines[-1] if lines else 1, message or repr(error)) from None
    _check_custom(template, script, custom, syntax)
    return custom


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
                cure="use letters, digits and underscores; the first cannot be a digit",
            )
        _refuse_controls(text.replace("\t", ""))
        lines.append(f"export {name}={shlex.quote(text)}\n")
    return "".join(lines)


def _refuse_controls(text: str) -> str:
    """Return the text; raise an error if it has control characters, which could end a directive."""
    breaks = (character for character in text if character in "\n\t")
    if character := first_harmful(text) or next(breaks, None):
        raise InvalidInputError(
            f"{text!r} contains the control character {character!r}",
            cure="remove it; a value in a job script must be one line of printable text",
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
    from jinja2 import FileSystemLoader, StrictUndefined, pass_eval_context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from markupsafe import Markup

    @pass_eval_context  # otherwise constants would be escaped as HTML first
    def quote(_: object, value: object) -> Markup:
        if isinstance(value, Markup):
            return value
        words = value if isinstance(value, list | tuple) else (value,)
        return Markup(" ".join(shlex.quote(_refuse_controls(str(word))) for word in words))

    # With autoescape, results of blocks, macros and filters are Markup: they are quoted already.
    environment = ImmutableSandboxedEnvironment(
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


def _compile(environment: Environment, template: Template) -> Compiled:
    """Compile a user's template, and check that all of its text is written to the script."""
    from jinja2 import Template as Compiled
    from jinja2 import TemplateSyntaxError, nodes

    for number, own in enumerate(template.text.split("\n"), start=1):
        if character := first_harmful(own.removesuffix("\r")):
            raise _fault(template, number, f"contains the control character {character!r}")
    try:
        tree = environment.parse(template.text)
        code = environment.compile(tree, filename=template.file)
    except TemplateSyntaxError as error:
        raise _fault(template, error.lineno, error.message or "not a template") from None
    if not any(isinstance(node, nodes.Extends) for node in tree.body):
        message = (
            "does not extend pipectl's: begin with {% extends base %}, and write #SBATCH and #PBS "
            "lines into {% block directives %}, commands into {% block setup %}"
        )
        raise _fault(template, 1, message)
    templates = [environment.get_template(path.name) for path in _TEMPLATES.iterdir()]
    blocks = sorted({name for ours in templates for name in ours.blocks})
    for node in tree.body:
        if isinstance(node, nodes.Block) and node.name not in blocks:
            hint = did_you_mean(node.name, blocks)
            raise _fault(template, node.lineno, f"there is no block {node.name!r}{hint}")
        for text in node.nodes if isinstance(node, nodes.Output) else ():
            if not isinstance(text, nodes.TemplateData) or text.data.strip():
                line = text.lineno
                if isinstance(text, nodes.TemplateData):
                    line += len(text.data) - len(text.data.lstrip("\n"))
                message = "text outside of all blocks would not be written: put it into one"
                raise _fault(template, line, message)
    return Compiled.from_code(environment, code, environment.make_globals(None))


def _check_custom(template: Template, script: str, custom: str, syntax: Syntax | None) -> None:
    """Check that the batch system and bash read the script of a user's template as intended.

    Args:
        script: script of pipectl's own template.
        custom: script of the user's template.
    """
    first = custom.partition("\n")[0]
    if not _SHEBANG.fullmatch(first):
        message = f"the first line must start bash, such as #!/bin/bash, not {first!r}"
        raise _fault(template, first, message)
    if syntax is not None:
        ours, lines = _directives(script, syntax), _directives(custom, syntax)
        added = lines[: len(lines) - len(ours)]
        if lines != added + ours:
            message = (
                f"{syntax.mark} lines come before pipectl's, each on a line of its own: write them "
                "into {% block directives %}"
            )
            raise _fault(template, "{% block directives %}", message)
        for line in re.findall(rf"^{syntax.mark}\b.*$", custom, re.MULTILINE):
            if line not in lines:
                message = f"{syntax.mark} counts only before the first command"
                raise _fault(template, line, message)
        for line in added:
            options = line.removeprefix(syntax.mark).replace("\t", " ").strip()
            if options and (fault := fault_of_line(syntax, options)):
                raise _fault(template, line, *fault)
    # Through stdin, since the script of an array may be longer than an argument may be.
    done = process.run(["bash", "-n"], cure="install bash", stdin=custom)
    if done.returncode or done.stderr:  # a warning: a here-document without an end
        text, message = "", done.message
        if match := _BASH_ERROR.search(done.stderr):
            text, message = [*custom.splitlines(), ""][int(match[1]) - 1], match[2]
        raise _fault(template, text, f"the script is not valid bash: {message}")


def _directives(script: str, syntax: Syntax) -> list[str]:
    """Return the directives of a script, up to the first command."""
    lines = []
    for line in script.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if re.match(rf"{syntax.mark}(\s|$)", line):
            lines.append(line)
    return lines


def _fault(template: Template, where: int | str, message: str, cure: str = _CURE) -> SpecError:
    """Return an error for a template at a line, given by number or text."""
    if isinstance(where, str):
        lines = enumerate(template.text.splitlines(), start=1)
        where = next((number for number, line in lines if where and where in line), 1)
    return SpecError([Problem(template.file, where, 1, message)], cure=cure)
