"""The documentation's commands, made into shell scripts.

What a reader may type stands in fenced blocks: ``sh``, or ``console`` with ``$`` before commands
and what they print below. The word after it says what they need: nothing, ``site`` (a batch
system), ``lab`` (the Slurm of slurm/lab), ``walk`` (an empty directory), or ``setup``
(they install, or run tests). A command whose comment says that it fails must do so.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

CHECKOUT = Path(__file__).parents[2]
PAGES = [
    CHECKOUT / "README.md",
    CHECKOUT / "CONTRIBUTING.md",
    CHECKOUT / "slurm" / "README.md",
    *sorted((CHECKOUT / "docs").glob("*.md")),
]
_BLOCK = re.compile(r"^( *)```(sh|console)(?: (\w+))?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_ON_A_TERMINAL = re.compile(r"pipectl .*(--watch|-w\b)")
_TERMINAL_S = 4


@dataclass(frozen=True)
class Block:
    """Commands of a page.

    Args:
        needs: empty, ``site``, ``lab``, ``walk`` or ``setup``.
        line: where they begin.
        output: what they print, as far as the page shows it.
    """

    needs: str
    line: int
    commands: tuple[str, ...]
    output: tuple[str, ...] = ()


def commands_of(group: Any, before: str = "") -> dict[str, Any]:
    """All commands by name, those of groups by both words, with their options."""
    commands = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            commands |= commands_of(command, f"{before}{name} ")
        else:
            commands[f"{before}{name}"] = group.resolve_command(typer.Context(group), [name])[1]
    return commands


def anchor_of(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def blocks(text: str) -> Iterator[Block]:
    for match in _BLOCK.finditer(text):
        lines = [line.removeprefix(match[1]) for line in match[4].splitlines()]
        output: list[str] = []
        if match[2] == "console":
            output = [line for line in lines if line and not line.startswith(("$ ", "..."))]
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        start = text[: match.start()].count("\n") + 2
        yield Block(match[3] or "", start, tuple(lines), tuple(output))


def shown(page: Path, *needs: str) -> list[str]:
    """What the commands of such blocks print, as the page has it."""
    every = blocks(page.read_text(encoding="utf-8"))
    return [line for block in every if block.needs in needs for line in block.output]


def script(page: Path, *needs: str) -> str:
    """All blocks of a page that need one of these, for bash; empty if there are none."""
    every = blocks(page.read_text(encoding="utf-8"))
    parts = [_block(page, block) for block in every if block.needs in needs]
    return "\n".join(["set -euo pipefail", *parts]) if parts else ""


def _block(page: Path, block: Block) -> str:
    place = f"{page.parent.name}/{page.name}:{block.line}"
    return "\n".join([f"echo '@@ {place}' >&2", *map(_line, block.commands)])


def _line(line: str) -> str:
    command, _, comment = line.partition(" #")
    if "fails" in comment:
        return f"if {command}; then echo 'did not fail' >&2; exit 1; fi"
    if _ON_A_TERMINAL.search(command):
        program = [sys.executable, str(Path(__file__).with_name("terminal.py")), str(_TERMINAL_S)]
        ours = shlex.join([*program, sys.executable])
        return command.replace("pipectl", f"{ours} -m pipectl", 1)
    return line
