"""Spellings of earlier versions, each answered with the one of today."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from pipectl.errors import UsageError

COMMANDS = {
    "schema": "check --schema",
    "simulate": "lab simulate",
    "trace": "report",
    "verify": "lab verify",
}
OPTIONS = {
    "plan": {
        "--batch-size": "--set training.batch_size=N",
        "--micro-batches": "--set pipeline.micro_batches=N",
        "--memory-limit": "--set pipeline.memory_limit=SIZE",
        **{
            option: f"pipectl lab plan {option}"
            for option in (
                *("--objective", "--planner", "--allow", "--budget"),
                *("--bandwidth", "--communication-scale"),
            )
        },
    },
    "lab plan": {
        "--batch-size": "--set training.batch_size=N",
        "--micro-batches": "--set pipeline.micro_batches=N",
    },
    "profile": {
        "--fast": "--effort fast",
        "--thorough": "--effort thorough",
        "--here": "--scheduler local",
        "--device-kind": "-o FILE",
    },
    "submit": {"--rehearse": "pipectl lab rehearse JOB.yaml"},
}
"""By command: what replaces its options."""


class Commands(TyperGroup):
    """All commands; a name of an earlier version is an error that says today's."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name.

        Raises:
            UsageError: it has another name today.
        """
        name = args[0] if args else ""
        if name in COMMANDS and name not in self.commands:
            raise UsageError(f"`pipectl {name}` is `pipectl {COMMANDS[name]}` now")
        return super().resolve_command(ctx, args)


def new_option(error: Exception) -> str:
    """A sentence on what replaces an option that a command had once; empty for other errors."""
    option = getattr(error, "option_name", None)
    context = getattr(error, "ctx", None)
    if option is None or context is None:
        return ""
    command = context.command_path.partition(" ")[2]
    instead = OPTIONS.get(command, {}).get(option)
    return f"{context.command_path} {option}: use `{instead}` instead" if instead else ""
