"""Tables of one-line cells: as rich draws them, only faster."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from pipectl.cli.rows import Rows


def drawn(rows: Rows, width: int, *, colour: bool = False) -> list[str]:
    stream = io.StringIO()
    system = "standard" if colour else None
    Console(file=stream, width=width, color_system=system, force_terminal=colour).print(rows)
    return stream.getvalue().splitlines()


def cells(*texts: str) -> list[Text]:
    return [Text(text) for text in texts]


def test_columns_stand_side_by_side() -> None:
    rows = Rows(
        {"run": cells("a", "long"), "step": cells("1", "100"), "on": cells("x", "y")}, "step"
    )
    assert [line.rstrip() for line in drawn(rows, 80)] == [
        "run   step  on",
        "a        1  x",
        "long   100  y",
    ]


def test_what_takes_two_cells_counts_as_two() -> None:
    rows = Rows({"run": cells("模型", "abcd"), "on": cells("x", "y")})
    assert [line.rstrip() for line in drawn(rows, 80)] == ["run   on", "模型  x", "abcd  y"]


def test_optional_columns_go_until_it_fits() -> None:
    columns = {
        "run": cells("name"), "empty": cells(""), "a": cells("a" * 10), "b": cells("b" * 10),
    }  # fmt: skip
    optional = ("a", "b", "empty")
    assert Rows(columns, optional=optional).heads == ("run", "a", "b")
    assert Rows(columns, optional=optional, room=20).heads == ("run", "b")
    assert Rows(columns, optional=optional, room=5).heads == ("run",)


def test_the_first_is_shortened_and_no_line_is_wider_than_the_screen() -> None:
    rows = Rows({"run": cells("n" * 30, "short"), "on": cells("x" * 10, "y")})
    lines = drawn(rows, 25)
    assert lines[1] == "n" * 12 + "…  " + "x" * 10
    assert all(len(line) <= 25 for line in lines)
    assert all(len(line) <= 9 for line in drawn(rows, 9))


def test_a_cell_keeps_its_style_and_no_text_is_markup() -> None:
    rows = Rows({"run": [Text("[red]x"), Text("y", style="green")]})
    text = "\n".join(drawn(rows, 40, colour=True))
    assert "[red]x" in text
    assert "\x1b[32my" in text
