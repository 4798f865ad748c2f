"""`pipectl profile`: measure the model's operators."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipectl.cli.console import warn
from pipectl.cli.interruption import resumable
from pipectl.cli.options import JobFile, Json, Overrides, SchedulerOption
from pipectl.cli.progress import progress_bar
from pipectl.cli.refusal import choose_one, refuse
from pipectl.errors import UsageError
from pipectl.units import is_name

if TYPE_CHECKING:
    from pipectl.jobs.profile import Wish
    from pipectl.spec import JobSpec


_Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", help="Instead of runs/NAME.profile.json, or runs/NAME.cluster.json."
    ),
]
_Fast = Annotated[bool, typer.Option("--fast", help="Measure briefly.")]
_Thorough = Annotated[bool, typer.Option("--thorough", help="Measure at length.")]
_Again = Annotated[bool, typer.Option("--again", help="Measure even what was measured before.")]
_DeviceKind = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of this kind of device, for a profile of its own."),
]
_Submit = Annotated[bool, typer.Option("--submit", help="Measure in a job of its own.")]
_Wait = Annotated[bool, typer.Option("--wait", help="Follow that job to its end.")]
_Here = Annotated[bool, typer.Option("--here", help="Measure even on a login node.")]
_Links = Annotated[
    bool, typer.Option("--links", help="Measure the links between the ranks instead.")
]


def command(
    job: JobFile,
    output: _Output = None,
    fast: _Fast = False,
    thorough: _Thorough = False,
    again: _Again = False,
    device_kind: _DeviceKind = None,
    submit: _Submit = False,
    wait: _Wait = False,
    here: _Here = False,
    links: _Links = False,
    scheduler: SchedulerOption = None,
    as_json: Json = False,
    overrides: Overrides = None,
) -> None:
    """Measure the time and memory of every operator; or the links."""
    from pipectl.jobs.places import profile_path, scheduler_name
    from pipectl.jobs.profile import Wish, require_compute_node
    from pipectl.jobs.trust import warning_of_code
    from pipectl.spec import load

    _check(fast, thorough, submit, wait, here, device_kind)
    spec = load(job, overrides or ())
    warn(warning_of_code(spec, job))
    path = output or profile_path(spec, device_kind)
    name = scheduler_name(spec, None if scheduler is None else scheduler.value)
    effort = "fast" if fast else "thorough" if thorough else "normal"
    if links:
        from pipectl.cli.links import measure_links

        _check_links(again, device_kind, here)
        measure_links(spec, name, output, effort, wait=wait or not submit, as_json=as_json)
        return
    wish = Wish(effort, device_kind, again)
    if submit:
        from pipectl.cli.profile_job import submit_and_tell

        submit_and_tell(spec, name, path, wish, wait=wait, as_json=as_json)
        return
    if not here:
        require_compute_node(name)
    _measure(spec, path, wish, as_json=as_json)


def _check(
    fast: bool, thorough: bool, submit: bool, wait: bool, here: bool, device_kind: str | None
) -> None:
    choose_one(fast=fast, thorough=thorough)
    choose_one(here=here, submit=submit)
    if wait and not submit:
        raise UsageError("--wait: there is no job to wait for", cure="add --submit")
    if device_kind is not None and not is_name(device_kind):
        raise UsageError(
            f"--device-kind: {device_kind!r} cannot be part of a file's name",
            cure="use letters, digits, '.', '_' and '-'",
        )


def _check_links(again: bool, device_kind: str | None, here: bool) -> None:
    about_model = {"--again": again, "--device-kind": device_kind, "--here": here}
    refuse(about_model, "has no meaning with --links", cure="links are always measured anew")


def _measure(spec: JobSpec, path: Path, wish: Wish, *, as_json: bool) -> None:
    from pipectl.cli.profile_view import show
    from pipectl.jobs.profile import measure

    with resumable(), progress_bar("profiling") as progress:
        found = measure(spec, path, progress, wish)
    show(found, path, time.time(), as_json=as_json)
