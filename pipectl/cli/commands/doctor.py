"""`pipectl doctor`: does this machine have what jobs need?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli.console import joined, output, plain, say_json
from pipectl.cli.options import RUNS, Json, Overrides, RunsDirectory
from pipectl.cli.refusal import refuse
from pipectl.runs import runs_directory

if TYPE_CHECKING:
    from pipectl.jobs.doctor import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
_JOB = typer.Argument(metavar="[JOB.yaml]", help="A job whose launch is tried out.")


def command(
    job: Annotated[Path | None, _JOB] = None,
    overrides: Overrides = None,
    directory: RunsDirectory = RUNS,
    as_json: Json = False,
) -> None:
    """Check what jobs need of this machine.

    That is torch, MPI (two ranks play ping-pong), the batch system and the file system.
    """
    from pipectl.jobs.doctor import Level, examine
    from pipectl.spec import load

    if job is None:
        refuse({"--set": overrides}, "changes a job, and none is given", cure="name it: JOB.yaml")
    else:
        elsewhere = {"--directory": directory != runs_directory()}
        refuse(elsewhere, "the job has its own", cure="--set output.directory=DIRECTORY")
    spec = None if job is None else load(job, overrides or ())
    found = []
    for finding in examine(spec, directory if spec is None else Path(spec.output.directory)):
        found.append(finding)
        if not as_json:
            _say(finding)
    if as_json:
        say_json([finding._asdict() for finding in found])
    if any(finding.level is Level.FAIL for finding in found):
        raise typer.Exit(1)


def _say(finding: Finding) -> None:
    level = finding.level.value
    head = plain(f"{level:<5}", _STYLES[level])
    output().print(joined(head, plain(f"{finding.what:<14}{finding.text}")), soft_wrap=True)
    if finding.cure:
        output().print(plain(f"{'':<19}{finding.cure}"), soft_wrap=True)
