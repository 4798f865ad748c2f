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
    "arrays compiled control_groups faults units fields files libraries errors versions directives "
    "hash_seed older_python sorting",
    "profile profile_parts plan lanes cluster link peaks timeline rehearsal",
    "planner spec simulate schedule",
    "batch report runs watch",
    "profiler runtime capture script objects torch_api",
    "jobs",
    "__main__ __init__ api cli",
)
"""From layer 0 on; within a layer, each part comes before those that it imports."""
LAYER_OF = {part: level for level, parts in enumerate(LAYERS) for part in parts.split()}


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
        room = PACKAGE.parent.joinpath(*(node.module or "").split("."))
        names = [alias.name for alias in node.names]
        modules = [name for name in names if node.module == "pipectl" or _is_module(room / name)]
        yield from (f"{node.module}.{name}" for name in modules)
        if len(modules) < len(names):
            yield node.module or ""


def _is_module(path: Path) -> bool:
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(
        item
        for path in sorted(PACKAGE.rglob("*.py"))
        for item in imports_of(
            path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()
        )
    )


def stacked() -> list[str]:
    """All parts from the top to the bottom.

    Raises:
        ValueError: a part imports one that is above it.
    """
    order = [part for parts in reversed(LAYERS) for part in parts.split()]
    for item in all_imports():
        if item.target in order and order.index(item.target) < order.index(item.part):
            raise ValueError(f"{item}, and is below it")
    return order


def layer_table() -> str:
    """What every part is: the first paragraph of its docstring."""
    rows = ["| layer | part | what it is |", "|---|---|---|"]
    for part in stacked():
        level = LAYER_OF[part]
        is_first = LAYERS[level].split()[0] == part
        path, name = PACKAGE / f"{part}.py", part
        if not path.is_file():
            path, name = PACKAGE / part / "__init__.py", f"{part}/"
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        purpose = " ".join(text.split("\n\n")[0].split()).replace("``", "`")
        rows.append(f"| {level if is_first else ''} | `{name}` | {purpose} |")
    return "\n".join(rows)
