"""The application: all commands, and how one is run.

A command is a module of `commands/` or `lab/` that is imported when it runs, so `pipectl --help`
loads none of them.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from importlib import import_module
from inspect import unwrap
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from pipectl import __version__
from pipectl.cli.console import (
    discard_unwritten,
    errors,
    labels,
    plain,
    replace_unprintable,
    say,
)
from pipectl.cli.restart import restart_for_command
from pipectl.errors import FaultError, PipectlError, SpecError, UsageError, limit_of
from pipectl.faults import fault_of, is_ours, user_line, with_details
from pipectl.files import path_of_user
from pipectl.units import printable
from pipectl.versions import hint_of_torch

_OBJECTS = 100_000
"""New objects between two collections of garbage. Modules make many that stay, and by Python's
threshold, collections would take a fifth of the time of loading them."""
COMMANDS = {
    "init": "Write a commented job for this cluster, ready to run.",
    "check": "Check a job spec and list every mistake in it.",
    "profile": "Measure the time and memory of every operator, or the links.\n\n"
    "If jobs go to a batch system from here, a job measures; --scheduler local measures here.",
    "plan": "Choose stages, ranks and schedule, and predict a step.",
    "submit": "Run a job, profiling and planning it first if necessary.",
    "status": "Show the newest runs, or everything about one.",
    "logs": "Print the logs of runs.\n\n"
    "Lines that a rank printed begin with its number: `[3] text`.",
    "report": "Compare a recorded step with its prediction, or two runs.\n\n"
    "With -o, write an HTML page: curves of all figures, both timelines, plan, memory, settings.",
    "cancel": "Cancel runs or sweeps. Finished runs are not changed.",
    "resume": "Resume a run from its last checkpoint.\n\n"
    "--set changes the number of ranks or of steps, for example.",
    "export": "Export the weights of a run for other programs.",
    "doctor": "Check that this machine can run jobs.\n\n"
    "Checks torch, MPI (two ranks exchange messages), the batch system and the file system; with "
    "--submit, what works between two ranks of a job.",
}
"""Help texts; `pipectl --help` lists the first paragraph of each."""
LAB = {
    "simulate": "Simulate one step and draw it.\n\n"
    "The chart shows the actions and the waits of every rank.",
    "plan": "Plan for other objectives, techniques or links.",
    "rehearse": "Run a plan with sleeps in place of computation.\n\n"
    "It runs on this machine unless --scheduler names a batch system.",
    "verify": "Compare a pipeline with training in one process.\n\n"
    "Both train a few steps on this machine, and all weights are compared. A model that is too "
    "large for one process is compared with another plan instead.",
}
_PACKAGES = {"pipectl": "commands", "lab": "lab"}

DEBUG_VARIABLE = "PIPECTL_DEBUG"
INTERRUPTED = 130
UNREAD = 141
"""Exit code of programs that SIGPIPE has ended."""
_UNWRITTEN = (ENOSPC, EDQUOT, EFBIG, EIO)
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Command(TyperCommand):
    """A command whose usage has the same form under every version of typer.

    Paths may begin with ``~``, which no shell expands within a word or in quotes.
    """

    allow_extra_args = True  # refused below, in more words

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the command line; what follows ``--`` are the arguments of the job's script."""
        if "--" in args and _has_job(self):
            from pipectl.spec.code_sections import setting_of

            end = args.index("--")
            args = [*args[:end], "--set", setting_of(args[end + 1 :])]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run it.

        Raises:
            UsageError: a path cannot be expanded, or there are too many arguments.
        """
        types = get_type_hints(unwrap(self.callback)) if self.callback else {}
        for name, kind in types.items():
            if Path in (kind, *get_args(kind)) and ctx.params.get(name) is not None:
                source = ctx.get_parameter_source(name)
                is_variable = source is not None and source.name == "ENVIRONMENT"
                path = path_of_user(str(ctx.params[name]), variables=is_variable)
                ctx.params[name] = path
        if ctx.args:
            raise _unexpected(ctx)
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The pieces of the usage line: ``[OPTIONS] JOB.yaml``, or ``[OPTIONS] [RUN...]``."""
        pieces = ["[OPTIONS]"]
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "argument":
                word = parameter.metavar or str(parameter.name)
                word += "..." if parameter.nargs != 1 else ""
                pieces.append(word if parameter.required else f"[{word}]")
        return [*pieces, "[-- ARGUMENTS]"] if _has_job(self) else pieces


class Commands(TyperGroup):
    """Commands whose modules are imported when they run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments name, and import it."""
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, TyperCommand):
            module = import_module(f"pipectl.cli.{_PACKAGES[str(self.name)]}.{name}")
            single = typer.Typer(rich_markup_mode=None, add_completion=False)
            single.command(name, cls=Command, help=command.help)(module.command)
            command = get_command(single)
        return name, command, rest


def _has_job(command: Any) -> bool:
    """Whether a command takes keys of a job, so that a script may have arguments."""
    return any("--set" in parameter.opts for parameter in command.params)


def _unexpected(context: Any) -> UsageError:
    """The error for arguments that a command does not take."""
    words = f"unexpected arguments: {' '.join(context.args)}"
    return UsageError(words, hint=_hint_of(context))


def _hint_of(context: Any, error: BaseException | None = None) -> str:
    """Where a command is explained, and where arguments of a script are given that it does not
    take."""
    hint = f"see: {context.command_path} --help"
    is_unknown = error is None or hasattr(error, "option_name")
    if is_unknown and _has_job(context.command):
        hint += "; all arguments of the job's script follow after `--`"
    return hint


def _group(name: str, commands: dict[str, str], help_text: str, **options: Any) -> typer.Typer:
    group = typer.Typer(name=name, cls=Commands, help=help_text, rich_markup_mode=None, **options)
    for command, text in commands.items():
        group.command(command, help=text)(lambda: None)  # resolve_command replaces it
    return group


app = _group(
    "pipectl",
    COMMANDS,
    "Train any PyTorch model in a pipeline of MPI ranks.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
lab = _group("lab", LAB, "Experiments with schedules and planners.", invoke_without_command=True)
app.add_typer(lab)


@lab.callback()
def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        say(context.get_help())


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
    _show_help(context)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; by default the process's own.

    Returns:
        The exit code.
    """
    replace_unprintable()
    gc.set_threshold(_OBJECTS)
    try:
        return _run(arguments)
    except (BrokenPipeError, SystemExit) as end:
        # The reader of a pipe has closed it, as `head` does; typer and rich turn that into an exit.
        if not any(isinstance(each, BrokenPipeError) for each in (end, end.__context__)):
            raise
        return UNREAD
    finally:
        discard_unwritten()


def _run(arguments: Sequence[str] | None) -> int:
    try:
        if arguments is None:
            restart_for_command(sys.argv[1:])
        with signals_interrupt():
            result = app(args=arguments, prog_name="pipectl", standalone_mode=False)
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        return print_error(_misplaced_option(error) or error)
    return result if isinstance(result, int) else 0


def _misplaced_option(error: BaseException) -> UsageError | None:
    """The error for an option of a command that is written before its name; else None."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None or not isinstance(context.command, TyperGroup):
        return None
    path = str(context.command_path)
    return UsageError(
        f"{path} {option}: options of a command come after its name",
        hint=f"write: {path} COMMAND {option}; see: {path} --help",
    )


def print_error(error: BaseException) -> int:
    """Print an error on standard error, with its traceback when debugging.

    Returns:
        The exit code.
    """
    if os.environ.get(DEBUG_VARIABLE):
        sys.stderr.write(printable("".join(traceback.format_exception(error))))
    code, messages, hint = _describe(error)
    console = errors()
    for message in messages:
        if console.is_terminal:
            lines = [("error:", message, "")]
            console.print(labels(lines, len("error: "), "bold red"), crop=False)
        else:
            console.print(plain(f"error: {message}"), soft_wrap=True)
    for line in (hint or "").splitlines():
        console.print(plain(f"  {line}"), soft_wrap=True)
    return code


def _describe(error: BaseException) -> tuple[int, list[str], str | None]:
    """Exit code, messages and hint of an error."""
    if isinstance(error, FaultError):
        error = with_details(error, None, write=True)
    if isinstance(error, SpecError):
        return error.exit_code, [str(problem) for problem in error.problems], error.hint
    if isinstance(error, PipectlError):
        return error.exit_code, [f"{error.message}{limit_of(error)}"], error.hint
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        hint = None if context is None else _hint_of(context, error)
        return error.exit_code, [error.format_message()], hint
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED, ["interrupted"], None
    if _is_of_torch(error):
        fault = f"{type(error).__name__}: {error}"
        return 1, [f"torch cannot be imported: {fault}"], hint_of_torch(fault)
    if isinstance(error, OSError) and error.filename is not None:
        return 1, [f"{error.filename}: {error.strerror or error}{limit_of(error)}"], None
    if isinstance(error, OSError) and error.errno in _UNWRITTEN:
        return 1, [f"output cannot be written: {error.strerror}"], "free some space"
    if is_ours(error):
        return _describe(fault_of(error))
    hint = "pipectl --debug ... shows the traceback"
    line = user_line(error.__traceback__)
    return 1, [f"{type(error).__name__}: {error}{line}{limit_of(error)}"], hint


def _is_of_torch(error: BaseException) -> bool:
    """Whether an error has ended the import of torch."""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return True
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch"
        for frame in frames
    )


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C.

    Only the first signal counts, so a second one does not interrupt the cleanup. Signals that are
    ignored (`nohup`) or have a handler stay as they are.
    """

    def interrupt(_number: int, frame: FrameType | None) -> None:
        for number in ours:
            signal.signal(number, signal.SIG_IGN)
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    ours = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
