"""Man pages of all commands; ``python tests/docs/man_pages.py FOLDER`` writes them.

click-man would write no options, since typer has a click of its own.
"""

import sys
from pathlib import Path
from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from pipectl import __version__
from pipectl.cli.app import app


def commands_of(group: Any = None, path: str = "pipectl") -> dict[str, Any]:
    """A group and the commands within it, with options, by what is typed: ``pipectl plan``."""
    group = group or get_command(app)
    found: dict[str, Any] = {path: group}
    for name in group.commands:
        command = group.resolve_command(_context(group, path), [name])[1]
        inner = f"{path} {name}"
        found |= (
            commands_of(command, inner) if isinstance(command, TyperGroup) else {inner: command}
        )
    return found


def man_page(path: str, command: Any) -> str:
    """The page of a command in man's language; ``path`` is what is typed."""
    context = _context(command, path)
    paragraphs = [text for text in (command.help or "").split("\n\n") if text]
    pieces = " ".join(command.collect_usage_pieces(context))
    lines = [f'.TH "{_name(path).upper()}" 1 "" "pipectl {__version__}" "pipectl"']
    lines += [".SH NAME", f"{_name(path)} \\- {_text(paragraphs[0])}"]
    lines += [".SH SYNOPSIS", f".B {_text(path)}", _text(pieces), ".SH DESCRIPTION"]
    lines += "\n.PP\n".join(map(_text, paragraphs)).split("\n")
    parameters = [each.get_help_record(context) for each in command.get_params(context)]
    lines += _section("OPTIONS", filter(None, parameters))
    commands = getattr(command, "commands", {})
    helps = [each.help.partition("\n")[0] for each in commands.values()]
    lines += _section("COMMANDS", zip(commands, helps, strict=True))
    pages = [f"{_name(path)}-{name}" for name in commands] or [_name(path.rpartition(" ")[0])]
    return "\n".join(
        [*lines, ".SH SEE ALSO", ", ".join(f"\\fB{_text(p)}\\fP(1)" for p in pages), ""]
    )


def _section(title: str, rows: Any) -> list[str]:
    found = [f".TP\n\\fB{_text(left)}\\fP\n{_text(right)}" for left, right in rows]
    return [f".SH {title}", *found] if found else []


def _text(text: str) -> str:
    """Text that man prints as it is: a line that begins with a point would be a request."""
    lines = text.replace("\\", "\\e").replace("-", "\\-").split("\n")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in lines if line)


def _name(path: str) -> str:
    return path.replace(" ", "-")


def _context(command: Any, path: str) -> Any:
    helps = get_command(app).context_settings
    return command.context_class(command, info_name=path, **helps)


def write_man_pages(folder: Path) -> None:
    """Write all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, command in commands_of().items():
        (folder / f"{_name(path)}.1").write_text(man_page(path, command), encoding="utf-8")


if __name__ == "__main__":
    write_man_pages(Path(sys.argv[1]))
