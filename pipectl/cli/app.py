"""The application: all commands, and how one is run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from pipectl import __version__
from pipectl.cli import lab
from pipectl.cli.commands import (
    cancel,
    check,
    doctor,
    export,
    init,
    logs,
    plan,
    profile,
    report,
    resume,
    status,
    submit,
)
from pipectl.cli.console import discard_unwritten, nobody_reads, print_anything, say
from pipectl.cli.failure import DEBUG_VARIABLE, UNREAD
from pipectl.cli.failure import report as report_failure
from pipectl.cli.interruption import interruptible
from pipectl.cli.renamed import Commands

app = typer.Typer(
    name="pipectl",
    cls=Commands,
    help="Train any PyTorch model in a pipeline over MPI: profile, plan, submit, status.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (
    init, check, profile, plan, submit, status, logs, report, cancel,
    resume, export, doctor,
):  # fmt: skip
    app.command(module.__name__.rpartition(".")[2])(module.command)
app.add_typer(lab.app)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"pipectl {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    if debug:  # in the environment, so that what is started from here inherits it
        os.environ[DEBUG_VARIABLE] = "1"
    if context.invoked_subcommand is None:
        say(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; by default the process's own.

    Returns:
        The exit code.
    """
    print_anything()
    try:
        return _run(arguments)
    except (BrokenPipeError, SystemExit) as end:
        if not nobody_reads(end):
            raise
        return UNREAD
    finally:
        discard_unwritten()


def _run(arguments: Sequence[str] | None) -> int:
    try:
        with interruptible():
            result = app(args=arguments, prog_name="pipectl", standalone_mode=False)
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        return report_failure(error)
    return result if isinstance(result, int) else 0
