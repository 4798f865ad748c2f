"""Reading YAML: every fault with its place in plain words; nothing in a file can run or explode."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from pipectl.errors import Problem
from pipectl.spec.document import Items, KeyPath, Place, Plain, Table, parse_scalar, path_text

MAX_BYTES = 2**20
MAX_DEPTH = 40
MAX_VALUES = 20_000
_PLAIN, _QUOTED, _STRING = "pipectl:plain", "pipectl:quoted", "tag:yaml.org,2002:str"
# Line and paragraph separators, and marks that reorder what a person reads.
_INVISIBLE = re.compile("[\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_UNREADABLE: dict[type[Exception], str] = {
    FileNotFoundError: "no such file",
    IsADirectoryError: "a directory, not a file",
    PermissionError: "cannot be read: permission denied",
    ValueError: "not a file name",
}
_EXPLANATIONS = (
    (r"found character '\\t'", "a tab cannot indent or start a value; use spaces"),
    (
        r"mapping values are not allowed here",
        "a ':' is out of place; check the indentation, or put the text in quotes",
    ),
    (r"could not find expected ':'", "a key without ':'; check this line and the one above"),
    (
        r"expected <block end>, but found '<(block mapping start|block sequence start)>'",
        "indented further than the lines above",
    ),
    (
        r"expected <block end>, but found '(\?|-|<scalar>|,|\]|\}|<.*>)'",
        "does not fit the lines above; check the indentation, quotes and brackets",
    ),
    (r"expected ',' or '(\]|\})'", "a bracket is not closed, or a comma is missing"),
    (r"found '<stream end>'", "it ends inside a bracket that is not closed"),
    (r"codec can't decode", "a tag (!) with a broken % escape; put the text in quotes"),
    (r"expected the node content", "a value is missing, or has to be in quotes"),
    (r"found unexpected end of stream", "a quote is not closed"),
    (r"found undefined alias", "an alias (*) without an anchor (&); put the text in quotes"),
    (r"found duplicate anchor", "an anchor (&) is defined twice"),
    (r"found unknown escape character", "an unknown escape; in double quotes write \\\\ for \\"),
    (r"but found another document", "a second document ('---'); a file holds one"),
    (r"cannot start any token", "a character that cannot start a value; put the text in quotes"),
    (
        r"while scanning an? (alias|anchor)|expected alphabetic or numeric character",
        "text that starts with * or & must be in quotes",
    ),
)


class UnreadableError(Exception):
    """The file has no document at all.

    Args:
        missing: whether there is no such file.
    """

    def __init__(self, problem: Problem, *, missing: bool = False) -> None:
        super().__init__(str(problem))
        self.problem = problem
        self.missing = missing


def read_file(path: Path, problems: list[Problem]) -> Any:
    """The document in a YAML file (see :mod:`pipectl.spec.document`); None if it is empty.

    Args:
        problems: gets the faults that leave a document: duplicate keys, control characters, tags.

    Raises:
        UnreadableError: missing, too large, no text, or no YAML.
    """
    file = str(path)
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {getattr(error, 'strerror', '')}"
        fault = Problem(file, 0, 0, _UNREADABLE.get(type(error), reason))
        raise UnreadableError(fault, missing=isinstance(error, FileNotFoundError)) from None
    if len(content) > MAX_BYTES:
        raise UnreadableError(Problem(file, 0, 0, "larger than 1 MiB; this is no job spec"))
    if b"\0" in content:
        raise UnreadableError(Problem(file, 0, 0, "a binary file; a job spec is YAML text"))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        message = f"not UTF-8 text (byte 0x{content[error.start]:02x})"
        raise UnreadableError(Problem(file, line, column, message)) from None
    return read_text(text, file, problems)


def read_text(text: str, file: str, problems: list[Problem], *, lines: bool = True) -> Any:
    """The document in a text; see :func:`read_file`.

    Args:
        file: its name in places.
        lines: whether places have line and column.
    """
    try:
        loader = _Loader(text, file, problems, lines)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        line, column, message = _explain(error, text)
        raise UnreadableError(
            Problem(file, line if lines else 0, column if lines else 0, message)
        ) from None
    except (ValueError, OverflowError):  # a character or version with an impossible number
        place = loader.place(loader.get_mark())
        raise UnreadableError(place.problem("not valid YAML: number out of range")) from None
    return None if node is None else loader.value(node, ())


class _Loader(yaml.SafeLoader):
    """Composes nodes of limited depth whose tags tell plain from quoted; nodes to documents."""

    def __init__(self, text: str, file: str, problems: list[Problem], lines: bool) -> None:
        super().__init__(text)
        self._file, self._problems, self._lines = file, problems, lines
        self._depth = self._values = 0

    def resolve(self, kind: type[yaml.Node], _value: object, implicit: object) -> str:
        if kind is yaml.ScalarNode:
            return _PLAIN if isinstance(implicit, tuple) and implicit[0] else _QUOTED
        return ""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise self._too_deep(Place(self._file, mark.line + 1, mark.column + 1))
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def place(self, mark: Any) -> Place:
        """The place of a mark."""
        if not self._lines:
            return Place(self._file)
        return Place(self._file, mark.line + 1, mark.column + 1)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        """The document of a node. Aliases are expanded, and so count towards the limits."""
        place = self.place(node.start_mark)
        self._values += 1
        if len(path) > MAX_DEPTH:
            raise self._too_deep(place)
        if self._values > MAX_VALUES:
            message = f"more than {MAX_VALUES} values, counting aliases where they are used"
            raise UnreadableError(place.problem(message))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, place, path)
        if node.tag:
            self._refuse_tag(node, place, path)
        if isinstance(node, yaml.SequenceNode):
            items = Items(place)
            for index, item in enumerate(node.value):
                items.append(self.value(item, (*path, index)))
                items.places.append(self.place(item.start_mark))
            return items
        return self._mapping(node, place, path)

    def _scalar(self, node: yaml.ScalarNode, place: Place, path: KeyPath) -> str | None:
        if node.tag not in (_PLAIN, _QUOTED, _STRING):
            self._refuse_tag(node, place, path)
        text: str = node.value
        if hidden := _unprintable(text):
            self._fault(place, path, f"contains the unprintable character {hidden}; remove it")
        value = parse_scalar(text) if node.tag == _PLAIN else text
        if value is None:
            return None
        return text if isinstance(value, str) else Plain(text)

    def _mapping(self, node: yaml.Node, place: Place, path: KeyPath) -> Table:
        mapping = Table(place)
        for key_node, value_node in node.value:
            key_place = self.place(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault(key_place, path, "a key must be text, not a list or mapping")
                continue
            key = self._scalar(key_node, key_place, path)
            key = Plain(key_node.value) if key is None else key
            if _unprintable(key):
                continue
            if key == "<<" and key_node.tag == _PLAIN:
                message = "merging with '<<' is not supported; write the keys out"
                self._fault(key_place, path, message)
            elif key in mapping:
                line = mapping.key_places[key].line or 1
                self._fault(key_place, (*path, key), f"given twice; first on line {line}")
            else:
                value = self.value(value_node, (*path, key))
                mapping.put(key, value, key_place, self.place(value_node.start_mark))
        return mapping

    def _fault(self, place: Place, path: KeyPath, message: str) -> None:
        where = f"{path_text(path)}: " if path else ""
        self._problems.append(place.problem(where + message))

    def _refuse_tag(self, node: yaml.Node, place: Place, path: KeyPath) -> None:
        tag = repr(str(node.tag).replace("tag:yaml.org,2002:", "!!")[:60])
        self._fault(place, path, f"the YAML tag {tag} is not supported; remove it")

    @staticmethod
    def _too_deep(place: Place) -> UnreadableError:
        return UnreadableError(place.problem(f"nested more than {MAX_DEPTH} levels deep"))


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


def _explain(error: yaml.YAMLError, text: str) -> tuple[int, int, str]:
    """Line, column (from 1) and explanation of a syntax error in ``text``."""
    if isinstance(error, ReaderError):
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        hidden = f"U+{int(error.character):04X}"
        return line, column, f"contains the unprintable character {hidden}; remove it"
    if not isinstance(error, yaml.MarkedYAMLError):
        return 1, 1, "not valid YAML"
    end = error.problem_mark or error.context_mark
    line, column = (1, 1) if end is None else (end.line + 1, end.column + 1)
    full = f"{error.context or ''}, {error.problem or ''}"
    words = next((words for pattern, words in _EXPLANATIONS if re.search(pattern, full)), None)
    message = f"not valid YAML: {words or error.problem or 'it cannot be parsed'}"
    start = error.context_mark
    in_quotes = re.search(r"quoted scalar|flow (mapping|sequence)", error.context or "")
    if in_quotes and start is not None and start.line + 1 != line:
        message += f" (opened on line {start.line + 1})"
    return line, column, message
