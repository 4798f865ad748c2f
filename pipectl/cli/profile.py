"""`pipectl profile`: measure the model's operators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipectl.cli.console import say
from pipectl.cli.options import JobFile, Overrides
from pipectl.cli.progress import progress_bar
from pipectl.profile import Profile
from pipectl.units import format_bytes, format_time


def command(
    job: JobFile,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Instead of runs/NAME.profile.json.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Measure time and memory of every operator, forward and backward."""
    from pipectl.jobs.places import profile_path
    from pipectl.jobs.profile import measure
    from pipectl.spec import load

    spec = load(job, overrides or ())
    path = output or profile_path(spec)
    with progress_bar() as progress:
        profile = measure(spec, path, progress)
    say(_summary(profile))
    say(f"profile: {path}")


def _summary(profile: Profile) -> str:
    forward_s = sum(operator.forward_s for operator in profile.operators)
    backward_s = sum(operator.backward_s for operator in profile.operators)
    parameters = dict(pair for operator in profile.operators for pair in operator.parameters)
    return (
        f"{profile.name}: {len(profile.operators)} operators, "
        f"{format_bytes(sum(parameters.values()))} of parameters; forward {format_time(forward_s)}"
        f", backward {format_time(backward_s)} for {profile.micro_batch_size} samples"
    )
