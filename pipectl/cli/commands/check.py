"""`pipectl check`: check a job spec, and show where each value comes from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict

import typer
from rich.table import Table

from pipectl.cli import options as opt
from pipectl.cli.console import plain, say, say_json, short_path, show
from pipectl.errors import UsageError
from pipectl.files import make_directory_of, user_home, write_json
from pipectl.spec import JobSpec, Origin, SpecFile
from pipectl.spec.document import Place, parse_scalar, path_text
from pipectl.spec.schema import json_schema


def command(
    context: typer.Context,
    job: Path | None = typer.Argument(None, metavar="JOB.yaml", help="The job spec."),
    overrides: list[str] | None = opt.OVERRIDES,
    show_origins: bool = opt.flag("Show every key's value and where it comes from.", "--origins"),
    schema: bool = opt.flag("Print the JSON Schema of job specs, for editors.", "--schema"),
    output_file: Path | None = opt.value(
        "FILE", "Write the schema to this file.", "-o", "--output"
    ),
    as_json: bool = opt.JSON,
) -> None:
    if schema:
        why = "cannot be used with --schema, which is that of all jobs"
        opt.refuse(context, "JOB.yaml --set --origins", why)
        if output_file is None:
            say_json(json_schema())
            return
        opt.refuse(
            context, "--json", "prints the schema; with -o, it is written", hint="choose one"
        )
        make_directory_of(output_file)
        write_json(output_file, json_schema())
        say(f"schema: {output_file}")
        return
    opt.refuse(context, "-o", "needs --schema")
    if job is None:
        raise UsageError("nothing to check", hint="name a job: pipectl check JOB.yaml")
    if as_json and not show_origins:
        raise UsageError("--json: needs --origins")
    file = SpecFile.read(job, overrides or ())
    spec = file.spec(check_names=True)
    points, origins = file.points(spec), file.origins(spec)
    if as_json:
        say_json([_origin_json(origin) for origin in origins])
        return
    runs = f"; a sweep of {len(points)} runs" if points else ""
    say(f"{job}: valid; {_ranks_text(spec)}, {spec.training.steps} steps{runs}")
    if show_origins:
        show(_origins_table(origins))


def _ranks_text(spec: JobSpec) -> str:
    """``4 ranks``, or ``2 to 8 ranks (2-8 nodes)``."""
    resources = spec.resources
    if resources.node_range is None:
        return f"{resources.ranks} ranks"
    lowest = resources.min_nodes * resources.tasks_per_node
    return f"{lowest} to {resources.ranks} ranks ({resources.nodes} nodes)"


def _origins_table(origins: Sequence[Origin]) -> Table:
    """A table with one line per key, below the name of its section; long values wrap."""
    table = Table(box=None, pad_edge=False, show_header=False, expand=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(no_wrap=True)
    home = user_home()
    for section, group in groupby(origins, key=lambda origin: origin.path[0]):
        keys = list(group)
        if keys[0].path[1:]:
            table.add_row(plain(section, "bold"))
        for origin in keys:
            inner, place = origin.path[1:], origin.place
            key = f"  {path_text(inner)}" if inner else path_text(origin.path)
            origin_text = _kind(place)
            if place is not None and place.line:
                name = short_path(Path(place.file))
                name = name.replace(f"{home}/", "~/", 1) if name.startswith(f"{home}/") else name
                origin_text = f"{name}:{place.line}"
            value = origin.value
            is_plain = isinstance(value, str) and value.isprintable()
            if not (is_plain and parse_scalar(value) == value):
                value = json.dumps(value, ensure_ascii=False)
            style = "dim" if place is None else ""
            table.add_row(*(plain(cell, style) for cell in (key, value, origin_text)))
    return table


class OriginJson(TypedDict):
    """A key of a job.

    Args:
        key: dotted name.
        value: its value, as in a job file.
        origin: ``file``, ``default``, ``--set``, or the environment variable that sets it.
        file, line: place of the value; null if it is not from a file.
    """

    key: str
    value: Any
    origin: str
    file: str | None
    line: int | None


def _origin_json(origin: Origin) -> OriginJson:
    place = origin.place
    return {
        "key": path_text(origin.path),
        "value": origin.value,
        "origin": _kind(place),
        "file": place.file if place and place.line else None,
        "line": (place.line or None) if place else None,
    }


def _kind(place: Place | None) -> str:
    if place is None:
        return "default"
    return "file" if place.line else place.file.partition(" ")[0]  # --set, or a variable
