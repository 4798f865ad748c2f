"""The user's own template of job scripts: read, checked, and kept with the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipectl.batch import JobRequest, Template, check_template, render_variables
from pipectl.errors import Problem, SpecError
from pipectl.files import write_text
from pipectl.spec import dump

if TYPE_CHECKING:
    from pipectl.runs import RunDirectory
    from pipectl.spec import JobSpec

_MAX_BYTES = 2**16


def read_template(spec: JobSpec) -> Template | None:
    """The template that a job names; None where it names none.

    Raises:
        SpecError: it cannot be read or used, with the line.
    """
    path = spec.template_file
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SpecError([Problem(str(path), 0, 0, error.strerror or "cannot be read")]) from None
    if len(content) > _MAX_BYTES:
        raise SpecError([Problem(str(path), 0, 0, "larger than 64 KiB; this is no template")])
    try:
        template = Template(str(path), content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise SpecError([Problem(str(path), line, 1, "not UTF-8 text")]) from None
    check_template(template)
    return template


def write_job(run: RunDirectory, spec: JobSpec, template: Template | None) -> None:
    """Write ``job.yaml`` of a run, and beside it the template, by which it is resumed."""
    if template is not None:
        write_text(run.template, template.text)
        launch = spec.launch.model_copy(update={"template": str(run.template)})
        spec = spec.model_copy(update={"launch": launch})
    write_private(run.job, dump(spec))


def write_script(run: RunDirectory, script: str, request: JobRequest) -> None:
    """Write the job script, and the variables that it sources."""
    write_text(run.script, script, mode=0o700)
    if request.variables:
        write_private(run.variables, render_variables(request))
    else:
        run.variables.unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Write what may hold keys and tokens, for its owner alone."""
    write_text(path, text, mode=0o600)
