"""YAML as nodes of PyYAML, whose marks say where every key and value is written.

Nothing in a file can run, or grow beyond limits. Nodes hold scalars as they are written, since the
field that reads it decides whether ``account: 0042`` is a number or a text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.reader import ReaderError

from pipectl.errors import Problem, SpecError

KeyPath = tuple[str | int, ...]
Pairs = dict[str, tuple[yaml.ScalarNode, yaml.Node]]
"""Keys of a mapping, with their nodes and those of their values."""

MAX_BYTES = 2**20
MAX_DEPTH = 40
MAX_VALUES = 20_000
_PLAIN, _QUOTED, _STRING = "pipectl:plain", "pipectl:quoted", "tag:yaml.org,2002:str"
# Line and paragraph separators, and marks that reorder what a person reads.
_INVISIBLE = re.compile("[\u2028\u2029\u202a-\u202e\u2066-\u2069]")
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


class Place(NamedTuple):
    """Where something is written; line and column count from 1, 0 if there is no line."""

    file: str
    line: int = 0
    column: int = 0

    @classmethod
    def of(cls, mark: yaml.Mark) -> Place:
        """The place of a mark."""
        return cls(mark.name, mark.line + 1, mark.column + 1)

    def problem(self, message: str) -> Problem:
        """A fault at this place."""
        return Problem(self.file, self.line, self.column, message)


def read_file(path: Path, problems: list[Problem]) -> yaml.Node:
    """The document in a YAML file.

    Args:
        problems: gets the faults that leave a document: duplicate keys, control characters, tags.

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
        raise SpecError([file.problem("larger than 1 MiB; this is no job spec")])
    if b"\0" in content:
        raise SpecError([file.problem("a binary file; a job spec is YAML text")])
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        message = f"not UTF-8 text (byte 0x{content[error.start]:02x})"
        raise SpecError([Problem(str(path), line, column, message)]) from None
    return read_text(text, str(path), problems)


def read_text(text: str, name: str, problems: list[Problem], *, lines: bool = True) -> yaml.Node:
    """The document in a text; see :func:`read_file`.

    Args:
        name: of the file, in places.
        lines: whether places have line and column.
    """
    try:
        loader = _Loader(text, name, problems, lines)
        node = loader.get_single_node()
        if node is not None:
            loader.check(node, ())
    except yaml.YAMLError as error:
        line, column, message = _explain(error, text)
        place = Place(name, line, column) if lines else Place(name)
        raise SpecError([place.problem(message)]) from None
    except (ValueError, OverflowError):  # a character or version with an impossible number
        place = Place.of(loader.get_mark())
        raise SpecError([place.problem("not valid YAML: number out of range")]) from None
    return scalar(None, Place(name)) if node is None else node


class _Loader(yaml.SafeLoader):
    """Composes nodes of limited depth whose tags tell plain from quoted, and checks them."""

    def __init__(self, text: str, name: str, problems: list[Problem], lines: bool) -> None:
        self._problems, self._lines = problems, lines
        self._depth = self._values = 0
        super().__init__(text)
        self.name = name

    def get_mark(self) -> yaml.Mark:
        return super().get_mark() if self._lines else _mark(Place(self.name))

    def resolve(self, kind: type[yaml.Node], _value: object, implicit: object) -> str:
        if kind is yaml.ScalarNode:
            return _PLAIN if isinstance(implicit, tuple) and implicit[0] else _QUOTED
        return ""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _too_deep(self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def check(self, node: yaml.Node, path: KeyPath) -> None:
        """Note the faults of a node, and keep the first of duplicate keys.

        Aliases are expanded, and so count towards the limits.
        """
        self._values += 1
        if len(path) > MAX_DEPTH:
            raise _too_deep(node.start_mark)
        if self._values > MAX_VALUES:
            message = f"more than {MAX_VALUES} values, counting aliases where they are used"
            raise SpecError([Place.of(node.start_mark).problem(message)])
        self._check_tag_and_text(node, path)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.check(item, (*path, index))
        elif isinstance(node, yaml.MappingNode):
            node.value = list(self._distinct(node.value, path))
            for key, value in node.value:
                self.check(value, (*path, key.value))

    def _distinct(
        self, pairs: list[tuple[yaml.Node, yaml.Node]], path: KeyPath
    ) -> Iterator[tuple[yaml.Node, yaml.Node]]:
        lines: dict[str, int] = {}
        for key, value in pairs:
            if not isinstance(key, yaml.ScalarNode):
                self._note(key, path, "a key must be text, not a list or mapping")
                continue
            self._check_tag_and_text(key, path)
            if _unprintable(key.value):
                continue
            if key.value == "<<" and key.tag == _PLAIN:
                self._note(key, path, "merging with '<<' is not supported; write the keys out")
            elif key.value in lines:
                message = f"given twice; first on line {lines[key.value]}"
                self._note(key, (*path, key.value), message)
            else:
                lines[key.value] = max(key.start_mark.line + 1, 1)
                yield key, value

    def _check_tag_and_text(self, node: yaml.Node, path: KeyPath) -> None:
        if node.tag not in (_PLAIN, _QUOTED, _STRING, ""):
            tag = repr(node.tag.replace("tag:yaml.org,2002:", "!!")[:60])
            self._note(node, path, f"the YAML tag {tag} is not supported; remove it")
        if isinstance(node, yaml.ScalarNode) and (hidden := _unprintable(node.value)):
            self._note(node, path, f"contains the unprintable character {hidden}; remove it")

    def _note(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        where = f"{path_text(path)}: " if path else ""
        self._problems.append(Place.of(node.start_mark).problem(where + message))


def _too_deep(mark: yaml.Mark) -> SpecError:
    return SpecError([Place.of(mark).problem(f"nested more than {MAX_DEPTH} levels deep")])


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
    return float(text.replace(".", "")) if _SPECIAL.fullmatch(text) else text


def scalar_value(node: yaml.Node) -> Any:
    """What a scalar means without a field that reads it."""
    return parse_scalar(node.value) if node.tag == _PLAIN else node.value


def is_null(node: yaml.Node) -> bool:
    """Whether nothing, or null, is written."""
    return isinstance(node, yaml.ScalarNode) and scalar_value(node) is None


def is_quoted(node: yaml.Node) -> bool:
    """Whether a scalar is a text whatever is in it."""
    return node.tag != _PLAIN


def scalar(text: str | None, place: Place) -> yaml.ScalarNode:
    """A node for a text, or null, that stands at ``place``."""
    mark = _mark(place)
    return yaml.ScalarNode(_PLAIN if text is None else _QUOTED, text or "", mark, mark)


def mapping(place: Place, **items: yaml.Node) -> yaml.MappingNode:
    """A node for a mapping at ``place``, with its keys there too."""
    mark = _mark(place)
    return yaml.MappingNode("", [(scalar(key, place), items[key]) for key in items], mark, mark)


def _mark(place: Place) -> yaml.Mark:
    return yaml.Mark(place.file, 0, place.line - 1, place.column - 1, None, 0)


def with_pairs(node: yaml.MappingNode, pairs: Pairs) -> yaml.MappingNode:
    """The same mapping with other keys and values."""
    return yaml.MappingNode("", list(pairs.values()), node.start_mark, node.end_mark)


def pairs_of(node: yaml.Node | None) -> Pairs:
    """Of a mapping; none of anything else."""
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {key.value: (key, value) for key, value in node.value}


def merge(lower: yaml.MappingNode, upper: yaml.MappingNode) -> yaml.MappingNode:
    """``upper`` laid over ``lower``: mappings key by key, everything else is replaced."""
    pairs = pairs_of(lower)
    for name, (key, value) in pairs_of(upper).items():
        below = pairs[name][1] if name in pairs else None
        if isinstance(below, yaml.MappingNode) and isinstance(value, yaml.MappingNode):
            value = merge(below, value)
        pairs[name] = key, value
    return with_pairs(upper, pairs)


def locate(tree: yaml.Node, path: KeyPath) -> tuple[yaml.Node, yaml.Node, KeyPath]:
    """What is written at ``path``, or the nearest thing around it.

    Returns:
        the node of its key, or of the item of a list; the node of its value; and what is left of
        the path.
    """
    key, node = tree, tree
    for depth, step in enumerate(path):
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            key = node = node.value[step]
        elif pair := next((p for p in pairs_of(node).values() if _is_key(p[0], step)), None):
            key, node = pair
        else:
            return key, node, path[depth:]
    return key, node, ()


def _is_key(node: yaml.Node, step: str | int) -> bool:
    """Whether a key is written so, or so as Python shows it: ``True`` for ``true``."""
    return str(step) in (node.value, str(scalar_value(node)))


def path_text(path: KeyPath) -> str:
    """``pipeline.warm_up[2]``; what a terminal cannot show is escaped."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{escape(step)}" for step in path)
    return "".join(steps).removeprefix(".")


def escape(text: str) -> str:
    """A key as a message shows it: shortened, and without control characters."""
    short = text if len(text) <= 100 else f"{text[:97]}..."
    return short if short.isprintable() else repr(short)[1:-1]


def show(node: yaml.Node) -> str:
    """A value as a message shows it: ``'many'``, ``3.5``, ``a list``; long text is shortened."""
    if not isinstance(node, yaml.ScalarNode):
        return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"
    value = scalar_value(node)
    if value is None:
        return "null"
    text = node.value if len(node.value) <= 60 else f"{node.value[:57]}..."
    return repr(text) if isinstance(value, str) else str(text)


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
