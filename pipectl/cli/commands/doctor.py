"""`pipectl doctor`: check that this machine can run jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipectl.cli.console import output, plain, say_json
from pipectl.cli.options import RUNS, Json, Overrides, RunsDirectory, refuse
from pipectl.jobs.doctor import Level, examine
from pipectl.runs import runs_directory
from pipectl.spec import load

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
_INDENT = 19


def command(
    job: Annotated[
        Path | None,
        typer.Argument(metavar="[JOB.yaml]", help="Job whose launch settings are tested."),
    ] = None,
    overrides: Overrides = None,
    directory: RunsDirectory = RUNS,
    as_json: Json = False,
) -> None:
    launch = None
    if job is None:
        refuse({"--set": overrides}, "needs a JOB.yaml")
    else:
        elsewhere = {"--directory": directory != runs_directory()}
        why = "cannot be used with a job, which has its own"
        refuse(elsewhere, why, cure="--set output.directory=DIRECTORY")
        spec = load(job, overrides or ())
        launch, directory = spec.launch, Path(spec.output.directory)
    findings = []
    for finding in examine(launch, directory):
        findings.append(finding)
        if as_json:
            continue
        level = plain(f"{finding.level.value:<5}", _STYLES[finding.level.value])
        text = plain(f"{finding.what:<14}{finding.text}")
        output().print(level.append_text(text), soft_wrap=True)
        if finding.cure:
            output().print(plain(f"{'':<{_INDENT}}{finding.cure}"), soft_wrap=True)
    if as_json:
        say_json([finding._asdict() for finding in findings])
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(1)
