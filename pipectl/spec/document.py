"""YAML as dicts, lists and texts that know where they are written.

Nothing in a file can run, or grow beyond limits. Scalars stay as they are written, since the field
that takes one decides whether ``account: 0042`` is a number or a text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml
from yaml.reader import ReaderError

from pipectl.errors import Problem, SpecError
from pipectl.units import first_harmful

KeyPath = tuple[str | int, ...]

MAX_BYTES = 2**20
MAX_DEPTH = 40
MAX_VALUES = 20_000
_UNPRINTABLE = "contains the unprintable character U+{:04X}; remove it"
_PLAIN, _QUOTED, _STRING = "pipectl:plain", "pipectl:quoted", "tag:yaml.org,2002:str"
# Bounded digits: Python refuses to convert a number of more than 4300 digits.
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}")
_OTHER_BASE = re.compile(r"0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,300}|[0-9]{1,300}(\.[0-9]{0,300})?)([eE][-+]?[0-9]{1,9})?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
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
        r"expected <block end>, but found",
        "does not fit the lines above; check the indentation, quotes and brackets",
    ),
    (r"expected ',' or '(\]|\})'", "a bracket is not closed, or a comma is missing"),
    (r"found '<stream end>'", "it ends inside a bracket that is not closed"),
    (r"expected the node content", "a value is missing, or has to be in quotes"),
    (r"found unexpected end of stream", "a quote is not closed"),
    (r"found undefined alias", "an alias (*) without an anchor (&); put the text in quotes"),
    (r"but found another document", "a second document ('---'); only one is allowed"),
    (r"cannot start any token", "a character that cannot start a value; put the text in quotes"),
    (
        r"while scanning an? (alias|anchor)|expected alphabetic or numeric character",
        "text that starts with * or & must be in quotes",
    ),
)
"""Explanations by PyYAML's message, for messages that are hard to understand."""


class Place(NamedTuple):
    """Where something is written; line and column count from 1, 0 if there is no line."""

    file: str
    line: int = 0
    column: int = 0

    def problem(self, message: str) -> Problem:
        """A fault at this place."""
        return Problem(self.file, self.line, self.column, message)


class _Located:
    """A node of a YAML document, with its place in the file.

    Attributes:
        place: where it begins.
        key_place: where its key begins; None for the document and for items of lists.
    """

    place: Place
    key_place: Place | None = None

    def at(self, place: Place, key_place: Place | None = None) -> Self:
        """Set its places; returns itself."""
        self.place, self.key_place = place, key_place
        return self


class YamlMapping(_Located, dict[str, Any]):
    """A mapping of keys, which are `YamlText`, to nodes."""


class YamlList(_Located, list[Any]):
    """A list of nodes."""


class YamlText(_Located, str):
    """A scalar as it is written. In quotes it is a text, even if it looks like a number."""


class YamlPlain(YamlText):
    """A scalar without quotes."""


YamlNode = YamlMapping | YamlList | YamlText


def locate(node: YamlNode, path: KeyPath) -> tuple[YamlNode, KeyPath]:
    """The node at ``path`` and an empty path; or its nearest ancestor and the rest of the path."""
    for depth, step in enumerate(path):
        inner: YamlNode | None = None
        if isinstance(node, YamlList) and isinstance(step, int) and step < len(node):
            inner = node[step]
        elif isinstance(node, YamlMapping):
            # ``step`` is the key as it is written, or its Python value: ``True`` for ``true``.
            matches = (node[key] for key in node if str(step) in (key, str(resolve(key))))
            inner = next(matches, None)
        if inner is None:
            return node, path[depth:]
        node = inner
    return node, ()


def put(node: YamlNode, keys: Sequence[str], value: YamlNode, place: Place) -> YamlMapping:
    """A copy of a document with ``value`` at ``keys``, making mappings on the way.

    Args:
        place: of new keys and mappings.
    """
    if not isinstance(node, YamlMapping):
        node = YamlMapping().at(place, node.key_place)
    first, *others = keys
    key_place: Place | None = place
    if others:
        inner = node.get(first, YamlMapping().at(place, place))
        value, key_place = put(inner, others, value, place), inner.key_place
    changed = YamlMapping({**node, first: value.at(value.place, key_place)})
    return changed.at(node.place, node.key_place)


def lay_over(upper: YamlMapping, lower: YamlMapping) -> YamlMapping:
    """One document over another: mappings key by key, everything else is replaced."""
    merged = YamlMapping({**lower, **upper}).at(upper.place, upper.key_place)
    for key in upper.keys() & lower.keys():
        if isinstance(upper[key], YamlMapping) and isinstance(lower[key], YamlMapping):
            merged[key] = lay_over(upper[key], lower[key])
    return merged


def is_null(value: Any) -> bool:
    """Whether nothing, or null, is written."""
    return value is None or (isinstance(value, YamlPlain) and parse_scalar(value) is None)


def describe(value: YamlNode) -> str:
    """A value as a message shows it: ``'many'``, ``3.5``, ``a list``; long text is shortened."""
    if not isinstance(value, YamlText):
        return "a mapping" if isinstance(value, YamlMapping) else "a list"
    if is_null(value):
        return "null"
    text = str(value if len(value) <= 60 else f"{value[:57]}...")
    return repr(text) if isinstance(resolve(value), str) else text


def read_file(path: Path) -> tuple[YamlNode, list[Problem]]:
    """The document in a YAML file, and its faults: duplicate keys, control characters, tags.

    Raises:
        SpecError: missing, too large, no text, or no YAML.
    """
    file = Place(str(path))
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        cure = "write a starter spec with: pipectl init"
        raise SpecError([file.problem("no such file")], cure=cure) from None
    except IsADirectoryError:
        raise SpecError([file.problem("a directory, not a file")]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "not a file name")
        raise SpecError([file.problem(f"cannot be read: {reason}")]) from None
    if len(content) > MAX_BYTES:
        raise SpecError([file.problem("larger than 1 MiB, too large for a job spec")])
    if b"\0" in content:
        raise SpecError([file.problem("a binary file; a job spec is YAML text")])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        message = f"not UTF-8 text (byte 0x{content[error.start]:02x})"
        raise SpecError([Problem(str(path), line, column, message)]) from None
    return read_text(text, str(path))


def read_text(text: str, name: str, *, lines: bool = True) -> tuple[YamlNode, list[Problem]]:
    """The document in a text, and its faults; see :func:`read_file`.

    Args:
        name: of the file, in places.
        lines: whether places have line and column.
    """
    try:
        loader = _Loader(text, name, lines)
        root = loader.get_single_node()
        node = YamlPlain().at(Place(name)) if root is None else loader.convert(root, ())
    except yaml.YAMLError as error:
        line, column, message = _explain_syntax(error, text)
        place = Place(name, line, column) if lines else Place(name)
        raise SpecError([place.problem(message)]) from None
    except (ValueError, OverflowError):  # a character or version with an impossible number
        place = loader.place(loader.get_mark())
        raise SpecError([place.problem("not valid YAML: number out of range")]) from None
    return node, loader.problems


class _Loader(yaml.SafeLoader):
    """Composes PyYAML's nodes, whose tags tell plain from quoted, and converts them to ours."""

    def __init__(self, text: str, name: str, lines: bool) -> None:
        self.problems: list[Problem] = []
        self._lines = lines
        self._depth = self._values = 0
        super().__init__(text)
        self.name = name

    def resolve(self, kind: type[yaml.Node], _value: object, implicit: object) -> str:
        if kind is yaml.ScalarNode:
            return _PLAIN if isinstance(implicit, tuple) and implicit[0] else _QUOTED
        return ""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._too_deep(self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def place(self, mark: yaml.Mark) -> Place:
        """The place of a mark."""
        return Place(self.name, mark.line + 1, mark.column + 1) if self._lines else Place(self.name)

    def convert(self, node: yaml.Node, path: KeyPath) -> YamlNode:
        """Our node for one of PyYAML, with the first of duplicate keys; notes the faults in it.

        Aliases are expanded, and so count towards the limits.
        """
        self._values += 1
        place = self.place(node.start_mark)
        if len(path) > MAX_DEPTH:
            raise self._too_deep(node.start_mark)
        if self._values > MAX_VALUES:
            message = f"more than {MAX_VALUES} values, counting aliases where they are used"
            raise SpecError([place.problem(message)])
        self._check_tag_and_text(node, path)
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node).at(place)
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return YamlList(self.convert(item, (*path, index)) for index, item in items).at(place)
        values = YamlMapping().at(place)
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._note(key, path, "a key must be text, not a list or mapping")
                continue
            self._check_tag_and_text(key, path)
            if first_harmful(key.value):
                continue
            inner = (*path, key.value)
            if key.value == "<<" and key.tag == _PLAIN:
                self._note(key, path, "merging with '<<' is not supported; write the keys out")
            elif key.value in values:
                first = f"; first on line {values[key.value].key_place.line}" * self._lines
                self._note(key, inner, f"given twice{first}")
            else:
                part = self.convert(value, inner)
                values[_scalar(key)] = part.at(part.place, self.place(key.start_mark))
        return values

    def _check_tag_and_text(self, node: yaml.Node, path: KeyPath) -> None:
        if node.tag not in (_PLAIN, _QUOTED, _STRING, ""):
            tag = repr(node.tag.replace("tag:yaml.org,2002:", "!!")[:60])
            self._note(node, path, f"the YAML tag {tag} is not supported; remove it")
        if isinstance(node, yaml.ScalarNode) and (hidden := first_harmful(node.value)):
            self._note(node, path, _UNPRINTABLE.format(ord(hidden)))

    def _note(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        where = f"{path_text(path)}: " if path else ""
        self.problems.append(self.place(node.start_mark).problem(where + message))

    def _too_deep(self, mark: yaml.Mark) -> SpecError:
        message = f"nested more than {MAX_DEPTH} levels deep"
        return SpecError([self.place(mark).problem(message)])


def _scalar(node: yaml.Node) -> YamlText:
    text = node.value.encode(errors="replace").decode()  # half a character is reported elsewhere
    return YamlPlain(text) if node.tag == _PLAIN else YamlText(text)


def _explain_syntax(error: yaml.YAMLError, text: str) -> tuple[int, int, str]:
    """Line, column (from 1) and explanation of a syntax error in ``text``."""
    if isinstance(error, ReaderError):
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        return line, column, _UNPRINTABLE.format(int(error.character))
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


def parse_scalar(text: str) -> Any:
    """What a plain scalar means: null, true, 12, 0x1f, 3e-4, .inf or a text.

    See https://yaml.org/spec/1.2.2/#1032-tag-resolution.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _OTHER_BASE.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return float(text.replace(".", "")) if _SPECIAL.fullmatch(text) else str(text)


def resolve(data: Any) -> Any:
    """Python values of YAML data by the types of YAML 1.2, if no field of the spec reads it."""
    if isinstance(data, list):
        return [resolve(item) for item in data]
    if isinstance(data, dict):
        return {resolve(key): resolve(item) for key, item in data.items()}
    if isinstance(data, YamlPlain):
        return parse_scalar(data)
    return str(data) if isinstance(data, YamlText) else data


def path_text(path: KeyPath) -> str:
    """``pipeline.warm_up[2]``; what a terminal cannot show is escaped."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{escape(step)}" for step in path)
    return "".join(steps).removeprefix(".")


def escape(text: str) -> str:
    """A key as a message shows it: shortened, and without control characters."""
    short = text if len(text) <= 100 else f"{text[:97]}..."
    return short if short.isprintable() else repr(short)[1:-1]


def to_yaml(data: Any) -> str:
    """YAML that reads as the same Python values."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.2 would read as something else; repeats instead of aliases."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(parse_scalar(text), str) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
