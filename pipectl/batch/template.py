"""A script of the user's around the job script: two comment lines mark where its parts go."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipectl.batch.quoting import checked, options_of
from pipectl.errors import InvalidInputError, Problem, SpecError

DIRECTIVES = "#pipectl directives"
BODY = "#pipectl body"
_MARK = re.compile(r"\s*#\s*pipectl\b.*")
_SHEBANG = re.compile(r"#!\s*(/\S*/bash|/usr/bin/env (-S )?bash)(\s.*)?")
_CURE = f"a template has the lines `{DIRECTIVES}` and `{BODY}`, each once; see docs/slurm.md"

BEFORE_BODY = """\
# The template's own EXIT trap is kept; what else of it would change what follows is off.
trap - ERR DEBUG RETURN
template_exit=()
eval "template_exit=($(trap -p EXIT))"
set +efC"""

AFTER_FRAME = """\
template_end() {
    local code=$?
    (exit "$code")
    finish
    (exit "$code")
    eval "${template_exit[2]-}"
}
trap template_end EXIT"""


@dataclass(frozen=True)
class Template:
    """A user's script, verbatim.

    Args:
        file: its path, for messages.
        text: with both marks; see :func:`check`.
    """

    file: str
    text: str

    @property
    def head(self) -> str:
        """Everything before the body."""
        return self.text.partition(f"\n{BODY}")[0] + "\n"


def check(template: Template) -> None:
    """Refuse a template in which pipectl's parts could not stand, or would not count.

    Raises:
        SpecError: with every problem and its line.
    """
    problems = list(_faults(template))
    if problems:
        raise SpecError(problems, cure=_CURE)


def assemble(
    template: Template | None,
    header: str,
    body: str,
    *,
    mark: str = "",
    directive: Callable[[str, str], str] | None = None,
) -> str:
    """The whole job script.

    Args:
        template: None for pipectl's own frame, which is a shebang.
        header: lines of directives.
        mark: with which the template's own directives begin, ``#SBATCH`` say.
        directive: refuses one that may not be there; gets its options and where it is.

    Raises:
        InvalidInputError: the template cannot be used, or has a directive that pipectl manages.
    """
    if template is None:
        return f"#!/bin/bash\n{header}{body}"
    check(template)
    if directive is not None:
        for place, options in _directives(template, mark):
            directive(options, place)
    parts = {DIRECTIVES: header.rstrip("\n"), BODY: body.strip("\n")}
    lines = (parts.get(line.rstrip(), line) for line in template.text.splitlines())
    return "\n".join(lines) + "\n"


def without_commands(template: Template | None) -> Template | None:
    """What batch systems read of a template: its directives, and nothing that is run."""
    if template is None:
        return None
    lines = template.text.splitlines()
    head = [line for line in lines[: _first_command(lines) - 1] if line.rstrip() != BODY]
    return Template(template.file, "\n".join([*head, BODY]) + "\n")


def interpreter(template: Template | None) -> tuple[str, ...]:
    """The words of the command that runs a job script."""
    line = "#!/bin/bash" if template is None else template.text.splitlines()[0]
    return tuple(line.removeprefix("#!").split())


def _faults(template: Template) -> Iterator[Problem]:
    hidden = list(_hidden(template))
    if hidden:
        yield from hidden
        return
    lines = template.text.splitlines()
    if not lines or not _SHEBANG.fullmatch(lines[0]):
        yield _fault(template, 1, "the first line must start bash, such as #!/bin/bash")
    places = _places(lines)
    for mark in (DIRECTIVES, BODY):
        yield from _count_faults(template, mark, places[mark], len(lines))
    for number, line in enumerate(lines, start=1):
        if _MARK.fullmatch(line) and line.rstrip() not in places:
            yield _fault(template, number, f"is no mark: known are `{DIRECTIVES}`, `{BODY}`")
    if all(len(found) == 1 for found in places.values()):
        yield from _order_faults(template, lines, places[DIRECTIVES][0], places[BODY][0])


def _places(lines: list[str]) -> dict[str, list[int]]:
    """The numbers of the lines with each mark."""
    return {
        mark: [number for number, line in enumerate(lines, start=1) if line.rstrip() == mark]
        for mark in (DIRECTIVES, BODY)
    }


def _count_faults(
    template: Template, mark: str, found: list[int], length: int
) -> Iterator[Problem]:
    if not found:
        yield _fault(template, max(1, length), f"there is no line `{mark}`")
    for again in found[1:]:
        yield _fault(template, again, f"`{mark}` stands here again; first on line {found[0]}")


def _order_faults(
    template: Template, lines: list[str], directives: int, body: int
) -> Iterator[Problem]:
    first = _first_command(lines)
    if directives > body:
        yield _fault(template, directives, f"`{DIRECTIVES}` must stand before `{BODY}`")
    elif directives > first:
        yield _fault(
            template, directives, f"directives count only before the first command, on line {first}"
        )
    if lines[body - 2].endswith("\\"):
        yield _fault(template, body - 1, "a line that goes on cannot stand before the body")
    behind = next((n for n in range(body, len(lines)) if _is_command(lines[n])), None)
    if behind is not None:
        yield _fault(
            template,
            behind + 1,
            "no command may follow the body, which ends the script; put it into a trap before it: "
            "trap 'command' EXIT",
        )


def _hidden(template: Template) -> Iterator[Problem]:
    """What bash or a person would read otherwise than it is."""
    for number, line in enumerate(template.text.split("\n"), start=1):
        if "\r" in line:
            yield _fault(template, number, "ends as lines on Windows do; save it with Unix ends")
            return
        try:
            checked(line.replace("\t", ""), "this line")
        except InvalidInputError as error:
            yield _fault(template, number, error.message)


def _directives(template: Template, mark: str) -> Iterator[tuple[str, str]]:
    """Place and text of the template's own directives, those without any option left out."""
    lines = template.text.splitlines()
    first = _first_command(lines)
    for number, line in enumerate(lines, start=1):
        if not re.match(rf"{mark}(\s|$)", line):
            continue
        if number > first:
            message = f"{mark} counts only before the first command, on line {first}"
            raise SpecError([_fault(template, number, message)])
        text = line.removeprefix(mark).replace("\t", " ")
        if options_of(text):
            yield f"{template.file}:{number}", text.strip()


def _first_command(lines: list[str]) -> int:
    """The number of the first line that batch systems take for one, and look no further."""
    numbers = (number for number, line in enumerate(lines, start=1) if _is_command(line))
    return next(numbers, len(lines) + 1)


def _is_command(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _fault(template: Template, line: int, message: str) -> Problem:
    return Problem(template.file, line, 1, message)
