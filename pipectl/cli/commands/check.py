"""`pipectl check`: is the job spec right?"""

from __future__ import annotations

from typing import Annotated

import typer

from pipectl.cli.console import output, say, say_json
from pipectl.cli.options import JobFile, Json, Overrides
from pipectl.errors import UsageError


def command(
    job: JobFile,
    overrides: Overrides = None,
    show_origins: Annotated[
        bool, typer.Option("--origins", help="Show every key's value and where it comes from.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a job spec and list every mistake in it."""
    from pipectl.jobs.template import read_template
    from pipectl.spec import load_sweep, load_with_origins

    if as_json and not show_origins:
        raise UsageError("--json: of what?", cure="add --origins")
    spec, origins = load_with_origins(job, overrides or ())
    read_template(spec)
    points = () if spec.sweep is None else load_sweep(job, overrides or ())[1]
    if not as_json:
        runs = f"; a sweep of {len(points)} runs" if points else ""
        say(f"{job}: valid; {spec.resources.ranks} ranks, {spec.training.steps} steps{runs}")
    if show_origins:
        from pipectl.cli.origins_view import origins_json, origins_table

        if as_json:
            say_json(origins_json(origins))
        else:
            output().print(origins_table(origins))
