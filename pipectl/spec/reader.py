"""From a YAML file to a tree, with every fault's place; nothing in the file can run or explode."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import yaml

from pipectl.errors import Problem
from pipectl.spec.syntax import explain
from pipectl.spec.tree import Entry, Items, Place, Scalar, Table, Tree, path_text
from pipectl.spec.tree import Path as KeyPath

MAX_BYTES = 2**20
MAX_DEPTH = 40
MAX_VALUES = 20_000
_PLAIN = "pipectl:plain"
_QUOTED = "pipectl:quoted"
_STRING = "tag:yaml.org,2002:str"
# Line and paragraph separators, and marks that reorder what a person reads.
_INVISIBLE = re.compile("[\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class UnreadableError(Exception):
    """The file yields no tree at all.

    Args:
        missing: whether there is no such file.
    """

    def __init__(self, problem: Problem, *, missing: bool = False) -> None:
        super().__init__(str(problem))
        self.problem = problem
        self.missing = missing


def read_file(path: Path, problems: list[Problem]) -> Tree | None:
    """The tree of a YAML file, or None where nothing is written in it.

    Args:
        problems: gets the faults that leave a tree: keys given twice, control characters, tags.

    Raises:
        UnreadableError: missing, too large, no text, or no YAML.
    """
    return read_text(_decoded(path), str(path), problems)


def read_text(text: str, file: str, problems: list[Problem], *, lines: bool = True) -> Tree | None:
    """The tree of a YAML document; see :func:`read_file`.

    Args:
        file: its name in places.
        lines: whether places have line and column.
    """
    try:
        node = _composed(text, file)
    except yaml.YAMLError as error:
        line, column, message = explain(error, text)
        place = (line, column) if lines else (0, 0)
        raise UnreadableError(Problem(file, *place, message)) from None
    return None if node is None else _Converter(file, problems, lines).tree(node, ())


def _composed(text: str, file: str) -> yaml.Node | None:
    """The node of a document; numbers that no character or version has are syntax errors too."""
    composer = _Composer(text, file)
    try:
        return composer.get_single_node()
    except (ValueError, OverflowError):
        mark = composer.get_mark()
        raise yaml.MarkedYAMLError(problem="number out of range", problem_mark=mark) from None


class _Composer(yaml.SafeLoader):
    """Composes nodes whose tag only tells plain from quoted scalars; limits the depth."""

    def __init__(self, text: str, file: str) -> None:
        super().__init__(text)
        self._file = file
        self._depth = 0

    def resolve(self, kind: type[yaml.Node], _value: object, implicit: object) -> str:
        if kind is yaml.ScalarNode:
            return _PLAIN if isinstance(implicit, tuple) and implicit[0] else _QUOTED
        return ""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise UnreadableError(_too_deep(Place(self._file, mark.line + 1, mark.column + 1)))
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Converter:
    """Nodes to a tree. Aliases are expanded, and so count towards the limits."""

    def __init__(self, file: str, problems: list[Problem], lines: bool) -> None:
        self._file = file
        self._problems = problems
        self._lines = lines
        self._values = 0

    def tree(self, node: yaml.Node, path: KeyPath) -> Tree:
        """The tree of a node."""
        place = self._place(node)
        self._count(place, path)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, place, path)
        if node.tag:
            self._fault(place, path, f"the YAML tag {_tag(node)} is not supported; remove it")
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return Items(tuple(self.tree(item, (*path, index)) for index, item in items), place)
        return Table({entry.key.text: entry for entry in self._entries(node, path)}, place)

    def _scalar(self, node: yaml.ScalarNode, place: Place, path: KeyPath) -> Scalar:
        if node.tag not in (_PLAIN, _QUOTED, _STRING):
            self._fault(place, path, f"the YAML tag {_tag(node)} is not supported; remove it")
        text = node.value
        if hidden := _unprintable(text):
            self._fault(place, path, f"contains the unprintable character {hidden}; remove it")
        return Scalar(text, node.tag == _PLAIN, place)

    def _entries(self, node: yaml.Node, path: KeyPath) -> Iterator[Entry]:
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault(place, path, "a key must be text, not a list or mapping")
                continue
            key = self._scalar(key_node, place, path)
            here = (*path, key.text)
            if _unprintable(key.text):
                continue
            if key.text == "<<" and key.plain:
                self._fault(place, path, "merging with '<<' is not supported; write the keys out")
            elif key.text in lines:
                self._fault(place, here, f"given twice; first on line {lines[key.text]}")
            else:
                lines[key.text] = key_node.start_mark.line + 1
                yield Entry(key, self.tree(value_node, here))

    def _count(self, place: Place, path: KeyPath) -> None:
        self._values += 1
        if len(path) > MAX_DEPTH:
            raise UnreadableError(_too_deep(place))
        if self._values > MAX_VALUES:
            message = f"more than {MAX_VALUES} values, counting aliases where they are used"
            raise UnreadableError(place.problem(message))

    def _place(self, node: yaml.Node) -> Place:
        if not self._lines:
            return Place(self._file)
        return Place(self._file, node.start_mark.line + 1, node.start_mark.column + 1)

    def _fault(self, place: Place, path: KeyPath, message: str) -> None:
        where = f"{path_text(path)}: " if path else ""
        self._problems.append(place.problem(where + message))


def _decoded(path: Path) -> str:
    """The text of a file, refused where it is none."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        message = _REASONS.get(type(error), f"cannot be read: {getattr(error, 'strerror', '')}")
        missing = isinstance(error, FileNotFoundError)
        raise UnreadableError(Problem(str(path), 0, 0, message), missing=missing) from None
    if len(content) > MAX_BYTES:
        raise UnreadableError(Problem(str(path), 0, 0, "larger than 1 MiB; this is no job spec"))
    if b"\0" in content:
        raise UnreadableError(Problem(str(path), 0, 0, "a binary file; a job spec is YAML text"))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        column = error.start - (before.rfind(b"\n") + 1) + 1
        fault = f"not UTF-8 text (byte 0x{content[error.start]:02x})"
        line = before.count(b"\n") + 1
        raise UnreadableError(Problem(str(path), line, column, fault)) from None


_REASONS: dict[type[Exception], str] = {
    FileNotFoundError: "no such file",
    IsADirectoryError: "a directory, not a file",
    PermissionError: "cannot be read: permission denied",
    ValueError: "not a file name",
}


def _too_deep(place: Place) -> Problem:
    return place.problem(f"nested more than {MAX_DEPTH} levels deep")


def _unprintable(text: str) -> str | None:
    """``U+001B`` for the first character that could mislead a terminal, script or reader."""
    if text.isascii() and text.isprintable():
        return None
    for character in text:
        category = unicodedata.category(character)
        hidden = category == "Cs" or (category == "Cc" and character not in "\n\t")
        if hidden or _INVISIBLE.match(character):
            return f"U+{ord(character):04X}"
    return None


def _tag(node: yaml.Node) -> str:
    return repr(str(node.tag).replace("tag:yaml.org,2002:", "!!")[:60])
