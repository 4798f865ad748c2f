"""`pipectl check`: is the job spec right, and where does each value come from?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from pipectl.cli.console import output, plain, say, say_json, short
from pipectl.cli.options import Json, Overrides
from pipectl.cli.refusal import refuse
from pipectl.errors import UsageError

if TYPE_CHECKING:
    from pipectl.spec import Origin
    from pipectl.spec.document import Place


def command(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB.yaml", help="The job spec.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    show_origins: Annotated[
        bool, typer.Option("--origins", help="Show every key's value and where it comes from.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of job specs, for editors.")
    ] = False,
    output_file: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the schema to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a job spec and list every mistake in it."""
    if schema:
        about_jobs = {"JOB.yaml": job, "--set": overrides, "--origins": show_origins}
        refuse(about_jobs, "is about a job, and --schema about all of them")
        _write_schema(output_file)
        return
    refuse({"-o": output_file}, "writes the schema", cure="add --schema")
    if job is None:
        raise UsageError("nothing to check", cure="name a job: pipectl check JOB.yaml")
    if as_json and not show_origins:
        raise UsageError("--json: of what?", cure="add --origins")
    _check(job, overrides or (), show_origins=show_origins, as_json=as_json)


def _check(job: Path, overrides: Sequence[str], *, show_origins: bool, as_json: bool) -> None:
    from pipectl.jobs.request import check_script
    from pipectl.spec import load_sweep, load_with_origins

    spec, origins = load_with_origins(job, overrides)
    check_script(spec)
    points = () if spec.sweep is None else load_sweep(job, overrides)[1]
    if as_json:
        say_json(origins_json(origins))
        return
    runs = f"; a sweep of {len(points)} runs" if points else ""
    say(f"{job}: valid; {spec.resources.ranks} ranks, {spec.training.steps} steps{runs}")
    if show_origins:
        output().print(origins_table(origins))


def _write_schema(path: Path | None) -> None:
    from pipectl.files import make_directory_of, write_json
    from pipectl.spec import json_schema

    if path is None:
        say_json(json_schema())
        return
    make_directory_of(path)
    write_json(path, json_schema())
    say(f"schema: {path}")


def origins_table(origins: Sequence[Origin]) -> Table:
    """One line per key, those of a section below its name; long values are folded."""
    from pipectl.spec.document import path_text

    table = Table(box=None, pad_edge=False, show_header=False, expand=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    for section, group in groupby(origins, key=lambda origin: origin.path[0]):
        keys = list(group)
        if keys[0].path[1:]:
            table.add_row(plain(section, "bold"))
        for origin in keys:
            inner = origin.path[1:]
            key = f"  {path_text(inner)}" if inner else path_text(origin.path)
            style = "dim" if origin.place is None else ""
            cells = (key, _as_yaml(_public_value(origin)), _place_text(origin.place))
            table.add_row(*(plain(cell, style) for cell in cells))
    return table


def origins_json(origins: Sequence[Origin]) -> list[dict[str, Any]]:
    """The same for programs; ``file`` and ``line`` are null if there is none."""
    from pipectl.spec.document import path_text

    return [
        {
            "key": path_text(origin.path),
            "value": _public_value(origin),
            "origin": _kind(origin.place),
            "file": origin.place.file if origin.place and origin.place.line else None,
            "line": (origin.place.line or None) if origin.place else None,
        }
        for origin in origins
    ]


def _public_value(origin: Origin) -> Any:
    """The value, unless it may be a key or token."""
    return "(not shown)" if origin.path[:2] == ("environment", "variables") else origin.value


def _kind(place: Place | None) -> str:
    if place is None:
        return "default"
    return "file" if place.line else "--set"


def _place_text(place: Place | None) -> str:
    """``job.yaml:12``, ``~/.config/pipectl/site.yaml:3``, ``--set``, ``default``."""
    if place is None or not place.line:
        return _kind(place)
    name, home = short(Path(place.file)), str(Path.home())
    if name.startswith(f"{home}/"):
        name = f"~{name.removeprefix(home)}"
    return f"{name}:{place.line}"


def _as_yaml(value: Any) -> str:
    """A value as YAML in one line."""
    from pipectl.spec.document import parse_scalar

    if isinstance(value, str) and value.isprintable() and parse_scalar(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
