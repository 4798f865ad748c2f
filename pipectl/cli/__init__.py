"""The command line: `commands/` has one file per command, which is imported when it runs."""

from pipectl.cli.app import app, main

__all__ = ["app", "main"]
