"""`pipectl schema`: the JSON Schema of the job spec, for editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipectl.cli.console import say, say_json
from pipectl.files import make_directory_of, write_json


def command(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write a file.")] = None,
) -> None:
    """Print the JSON Schema of the job spec, for editors."""
    from pipectl.spec import json_schema

    if output is None:
        say_json(json_schema())
        return
    make_directory_of(output)
    write_json(output, json_schema())
    say(f"schema: {output}")
