"""`pipectl plan`: cut the model into stages and show what to expect."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli.console import note, output, say, say_json
from pipectl.cli.options import JobFile, Json, Overrides, SchedulerOption
from pipectl.files import make_directory, write_text

if TYPE_CHECKING:
    from pipectl.profile import Profile
    from pipectl.spec import JobSpec


def command(
    job: JobFile,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", help="Instead of runs/NAME.profile.json.")
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("-o", "--output", help="Instead of runs/NAME.plan.json.")
    ] = None,
    scheduler: SchedulerOption = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the predicted step here.")] = None,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    """Choose stages, ranks and schedule, and predict a step."""
    from pipectl.cli.plan_view import headline, plan_view, prediction_lines
    from pipectl.jobs.machines import find_machines
    from pipectl.jobs.places import plan_path, scheduler_name
    from pipectl.jobs.plan import find_plan, predicted
    from pipectl.report.gantt_svg import gantt_svg
    from pipectl.spec import load

    spec = load(job, overrides or ())
    profile = _profile(spec, job, profile_file, overrides or ())
    machines = find_machines(spec, scheduler_name(spec, scheduler))
    if machines.warning:
        note(f"warning: {machines.warning}")
    cluster = machines.cluster
    plan = find_plan(spec, profile, cluster)
    timeline = predicted(plan, cluster)
    path = output_file or plan_path(spec)
    make_directory(path.parent)
    plan.save(path)
    if svg is not None:
        make_directory(svg.parent)
        write_text(svg, gantt_svg(timeline, headline(plan), *prediction_lines(plan)))
    if as_json:
        say_json(plan.to_json())
        return
    names = {operator.id: operator.name for operator in profile.operators}
    console = output()
    console.print(plan_view(plan, timeline, console.width, names))
    if machines.file is not None:
        say(f"cluster: {machines.file} ({cluster.source})")
    say(f"plan: {path}")


def _profile(spec: JobSpec, job: Path, path: Path | None, overrides: Sequence[str]) -> Profile:
    """The profile to plan with; a stale one is used, and said to be stale."""
    from pipectl.jobs.places import profile_path
    from pipectl.jobs.profile import is_fresh
    from pipectl.profile import Profile

    path = path or profile_path(spec)
    profile = Profile.load(path)
    if not is_fresh(spec, profile):
        again = shlex.join(["pipectl", "profile", str(job), *_options(overrides)])
        note(
            f"warning: {path} was measured for other settings (model, data, optimizer, batch or "
            f"ranks a node); measure again with: {again}"
        )
    return profile


def _options(overrides: Sequence[str]) -> Iterator[str]:
    for override in overrides:
        yield from ("--set", override)
