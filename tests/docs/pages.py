"""The documentation's commands, made into shell scripts, and a shell that runs them.

What a reader may type stands in fenced blocks: ``sh``, or ``console`` with ``$`` before commands
and what they print below. The word after it says what they need: nothing, ``site`` (a batch
system), ``lab`` (the Slurm of slurm/lab), ``walk`` (an empty directory), or ``setup``
(they install, or run tests).
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

CHECKOUT = Path(__file__).parents[2]
PAGES = [
    CHECKOUT / "README.md",
    CHECKOUT / "CONTRIBUTING.md",
    CHECKOUT / "slurm" / "README.md",
    *sorted((CHECKOUT / "docs").glob("*.md")),
]
BASICS = "bash sh env cat ls cp mv rm ln mkdir mktemp sleep sed grep head tail tr date id hostname"
"""Commands that are everywhere; a batch system is not."""
SMALLER = {"layers": 2, "width": 64, "megabytes": 0.3, "windows": 16}
"""What models and data of jobs are made with, where they have more of it."""
_BLOCK = re.compile(r"^( *)```(sh|console)(?: (\w+))?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_ON_A_TERMINAL = re.compile(r"pipectl .*(--watch|-w\b)")
_TERMINAL_S = 4
"""After which Ctrl-C ends a view."""


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


def blocks(page: Path, *needs: str) -> Iterator[Block]:
    """Those that need one of these; without any, all."""
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        lines = [line.removeprefix(match[1]) for line in match[4].splitlines()]
        output: list[str] = []
        if match[2] == "console":
            output = [line for line in lines if line and not line.startswith(("$ ", "..."))]
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        start = text[: match.start()].count("\n") + 2
        if not needs or (match[3] or "") in needs:
            yield Block(match[3] or "", start, tuple(lines), tuple(output))


def script(page: Path, needs: str) -> str:
    """All blocks of a page that need this, for bash; empty if there are none."""
    parts = []
    for block in blocks(page, needs):
        place = f"{page.parent.name}/{page.name}:{block.line}"
        parts += [f"echo '@@ {place}' >&2", *map(_line, block.commands)]
    return "\n".join(["set -euo pipefail", *parts]) if parts else ""


def _line(line: str) -> str:
    command = line.partition(" #")[0]
    if _ON_A_TERMINAL.search(command):
        ended = shlex.quote(f"/usr/bin/timeout --foreground -s INT {_TERMINAL_S} {command}")
        return f"/usr/bin/script -qec {ended} /dev/null || [[ $? == 124 ]]"
    return line


def shortened(source: Path, target: Path, **keys: object) -> None:
    """Copy a job that ends earlier."""
    job = yaml.safe_load(source.read_text())
    job["training"].update(steps=6)
    for made in (job["model"], job["data"], (job.get("evaluation") or {}).get("data", {})):
        given = made.get("kwargs") or {}
        given.update({name: min(given[name], v) for name, v in SMALLER.items() if name in given})
    job["checkpoint"] = {**(job.get("checkpoint") or {}), "every": 3}
    target.write_text(yaml.safe_dump({**job, **keys}))


def install(folder: Path, **programs: str) -> None:
    """Put the basic commands, and scripts of one line, into ``folder / "bin"``."""
    (folder / "bin").mkdir(parents=True)
    for name in BASICS.split():
        (folder / "bin" / name).symlink_to(f"/bin/{name}")
    for name, line in programs.items():
        (folder / "bin" / name).write_text(f'#!/bin/sh\n{line} "$@"\n')
        (folder / "bin" / name).chmod(0o755)


def directory_of_a_reader(folder: Path, python: str) -> None:
    """Make it: with pipectl, which ``python`` runs, and the jobs of the checkout."""
    install(folder, pipectl=f"exec {python} -m pipectl")
    (folder / "configs").mkdir()
    (folder / "configs" / "models").symlink_to(CHECKOUT / "configs" / "models")
    for source in sorted((CHECKOUT / "configs").glob("*.yaml")):
        shortened(source, folder / "configs" / source.name)


def bash(text: str, folder: Path, *elsewhere: str) -> list[str]:
    """Run it in ``folder``; the lines that it printed.

    Args:
        elsewhere: directories at the end of PATH.
    """
    environment = {key: value for key, value in os.environ.items() if key != "SLURM_CONF"}
    path = ":".join([str(folder / "bin"), str(Path(sys.executable).parent), *elsewhere])
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env={**environment, "PATH": path, "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return f"{done.stdout}\n{done.stderr}".splitlines()
