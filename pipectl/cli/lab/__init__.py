"""Commands for experts: `pipectl lab`."""

from __future__ import annotations

import typer

from pipectl.cli.lab import plan, rehearse, simulate, verify

app = typer.Typer(name="lab", help="Experiments with schedules and planners.", no_args_is_help=True)
for module in (simulate, plan, rehearse, verify):
    app.command(module.__name__.rpartition(".")[2])(module.command)
