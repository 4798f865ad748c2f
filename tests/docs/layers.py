"""The layers of the package, and what imports what.

The layers stand here and nowhere else: ``tests/test_layers.py`` holds every import against them,
and the table in ``docs/architecture.md`` is made from them (``make golden``).
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "pipectl"

LAYERS = (
    (
        "errors",
        "units",
        "files",
        "fields",
        "arrays",
        "compiled",
        "versions",
        "faults",
        "directives",
    ),
    ("graph", "profile", "link", "cluster", "plan", "timeline", "rehearsal"),
    ("schedule", "spec", "planner", "simulate"),
    ("batch", "runs", "report", "watch"),
    ("capture", "profiler", "runtime"),
    ("jobs",),
    ("cli", "__main__"),
)
LAYER_OF = {part: level for level, parts in enumerate(LAYERS) for part in parts}


@dataclass(frozen=True)
class Import:
    """One import statement: where it stands and the dotted name it asks for."""

    file: str
    line: int
    name: str
    at_module_level: bool

    @property
    def part(self) -> str:
        """The part of the package that imports: ``errors`` of ``errors.py`` or ``errors/x.py``."""
        return self.file.split("/")[0].removesuffix(".py")

    @property
    def library(self) -> str:
        return self.name.split(".")[0]

    @property
    def target(self) -> str | None:
        """The part of this package that is imported, if it is one."""
        names = self.name.split(".")
        return names[1] if names[0] == "pipectl" and len(names) > 1 else None

    def __str__(self) -> str:
        return f"pipectl/{self.file}:{self.line}: imports {self.name}"


def imports_of(source: str, file: str) -> Iterator[Import]:
    """All imports of a file, those within functions included."""
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(source), True)]
    while waiting:
        node, at_module_level = waiting.pop()
        for name in _names(node):
            yield Import(file, getattr(node, "lineno", 0), name, at_module_level)
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.If)
        waiting += [
            (child, at_module_level and not inner)
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        ]


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        if node.module == "pipectl":  # each name may be a module
            yield from (f"pipectl.{alias.name}" for alias in node.names)
        else:
            yield node.module or ""


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(
        item
        for path in sorted(PACKAGE.rglob("*.py"))
        for item in imports_of(
            path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()
        )
    )


def imported_parts() -> dict[str, set[str]]:
    """The parts that every part imports."""
    imports: dict[str, set[str]] = {part: set() for part in LAYER_OF}
    for item in all_imports():
        if item.part in imports and item.target in LAYER_OF and item.target != item.part:
            imports[item.part].add(item.target)
    return imports


def stacked() -> list[str]:
    """All parts from the top to the bottom, each above those of its layer that it imports.

    Raises:
        ValueError: parts of a layer import each other in a circle.
    """
    imported, order = imported_parts(), []
    for parts in reversed(LAYERS):
        left = list(parts)
        while left:
            free = [part for part in left if not any(part in imported[other] for other in left)]
            if not free:
                raise ValueError(f"{', '.join(left)} import each other in a circle")
            order.append(free[0])
            left.remove(free[0])
    return order


def layer_table() -> str:
    """What every part is."""
    parts = stacked()
    rows = [f"| {_level(parts, part)} | `{_name(part)}` | {_purpose(part)} |" for part in parts]
    return "\n".join(["| layer | part | what it is |", "|---|---|---|", *rows])


def _level(parts: list[str], part: str) -> str:
    """The layer of a part where its row is the first of the layer."""
    above = parts[parts.index(part) - 1] if part != parts[0] else None
    same = above is not None and LAYER_OF[above] == LAYER_OF[part]
    return "" if same else str(LAYER_OF[part])


def _name(part: str) -> str:
    return part if (PACKAGE / f"{part}.py").is_file() else f"{part}/"


def _purpose(part: str) -> str:
    """The first paragraph of the part's docstring."""
    path = PACKAGE / f"{part}.py"
    path = path if path.is_file() else PACKAGE / part / "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`")
