"""The command line: `commands/` has one file per command; slow imports wait for their use."""

from pipectl.cli.app import app, main

__all__ = ["app", "main"]
