"""`pipectl check`: is the job spec right?"""

from __future__ import annotations

from pipectl.cli.console import say
from pipectl.cli.options import JobFile, Overrides


def command(job: JobFile, overrides: Overrides = None) -> None:
    """Check a job spec and list every mistake in it."""
    from pipectl.spec import load

    spec = load(job, overrides or ())
    say(f"{job}: valid; {spec.resources.ranks} ranks, {spec.training.steps} steps")
