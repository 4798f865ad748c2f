"""`pipectl init`: a job to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from pipectl.cli.console import say
from pipectl.errors import UsageError
from pipectl.files import make_directory, write_text

_FILES = {"job.yaml": "job.yaml", "model.py": "model.py.txt"}  # not a module of ours


def command(
    directory: Annotated[Path, typer.Argument(help="Where to write it.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write a commented job spec and a small model, ready to run."""
    targets = [directory / name for name in _FILES]
    existing = [str(path) for path in targets if path.exists()]
    if existing and not force:
        raise UsageError(
            f"{', '.join(existing)}: exists already",
            cure="choose another directory: pipectl init DIRECTORY; or replace with --force",
        )
    make_directory(directory)
    for target in targets:
        template = files("pipectl.cli") / "starter" / _FILES[target.name]
        write_text(target, template.read_text("utf-8"))
        say(f"written: {target}")
    say(f"next: pipectl submit {targets[0]} --wait")
