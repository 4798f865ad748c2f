"""The command line: `commands/` has one file per command, which is imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipectl.versions import NEWEST_TYPER, tested, untested

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, as :func:`pipectl.cli.app.main` does.

    If a release of typer that was not tested lacks something, the error says so.
    """
    try:
        from pipectl.cli import app
    except (ImportError, AttributeError, TypeError) as error:
        if not (warning := untested("typer")):
            raise
        hint = f"install {tested('typer')}: pip install 'typer=={NEWEST_TYPER}.*'"
        sys.stderr.write(f"error: typer cannot be used ({error}): {warning}\n  {hint}\n")
        return 1
    return app.main(arguments)
