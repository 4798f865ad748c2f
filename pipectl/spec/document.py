"""YAML as plain data, and where every value is written.

Nothing in a file can run, or grow beyond limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.reader import ReaderError

from pipectl.errors import Problem, SpecError
from pipectl.units import first_harmful

KeyPath = tuple[str | int, ...]
Finding = tuple[KeyPath, str]
"""The path of a key, and its fault."""

MAX_BYTES = 2**20
MAX_DEPTH = 40
MAX_VALUES = 20_000
_UNPRINTABLE = "contains the unprintable character U+{:04X}; remove it"
_PLAIN, _TEXT = "pipectl:plain", "tag:yaml.org,2002:str"
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
# Bounded digits: Python refuses to convert a number of more than 4300 digits.
_INTEGER = r"[-+]?[0-9]{1,300}|0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}"
_FLOAT = r"[-+]?(\.[0-9]{1,300}|[0-9]{1,300}(\.[0-9]{0,300})?)([eE][-+]?[0-9]{1,9})?"
_SPECIAL = r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_TYPES: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    "null": (re.compile(r"(~|null|Null|NULL)?\Z"), lambda _: None),
    "bool": (re.compile(r"([tT]rue|TRUE|[fF]alse|FALSE)\Z"), lambda text: text[0] in "tT"),
    "int": (
        re.compile(rf"({_INTEGER})\Z"),
        lambda text: int(text, 0 if text[1:2] in ("o", "x") else 10),
    ),
    "float": (
        re.compile(rf"({_FLOAT}|{_SPECIAL})\Z"),
        lambda text: float(re.sub(r"\.(?=[infaINFA])", "", text)),
    ),
}
"""How a scalar without quotes is read, https://yaml.org/spec/1.2.2/#1032-tag-resolution."""
_SWITCH = re.compile("yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")
_EXPLANATIONS = {
    r"found character '\\t'": "a tab cannot indent or start a value; use spaces",
    "mapping values are not allowed here": (
        "a ':' is out of place; check the indentation, or put the text in quotes"
    ),
    "could not find expected ':'": "a key without ':'; check this line and the one above",
    "expected <block end>, but found '<block (mapping|sequence) start>'": (
        "indented further than the lines above"
    ),
    "expected <block end>, but found": (
        "does not fit the lines above; check the indentation, quotes and brackets"
    ),
    r"expected ',' or '(\]|\})'": "a bracket is not closed, or a comma is missing",
    "found '<stream end>'": "it ends inside a bracket that is not closed",
    "expected the node content": "a value is missing, or has to be in quotes",
    "found unexpected end of stream": "a quote is not closed",
    "found undefined alias": "an alias (*) without an anchor (&); put the text in quotes",
    "but found another document": "a second document ('---'); only one is allowed",
    "cannot start any token": "a character that cannot start a value; put the text in quotes",
    "while scanning an? (alias|anchor)|expected alphabetic or numeric character": (
        "text that starts with * or & must be in quotes"
    ),
}
"""Explanations of PyYAML's messages that are hard to understand."""


IN_PYTHON = "Job()"
"""In place of a file: the values that are given in Python."""


class Plain(str):
    """The text of a number, true or false without quotes.

    The type of its field decides whether ``0042`` is a number or a text.
    """


class Switch(str):
    """``yes``, ``no``, ``on`` or ``off`` without quotes: a text, but true or false in YAML 1.1, in
    which the user may have thought."""

    @property
    def meaning(self) -> str:
        """What it is in YAML 1.1."""
        return "true" if self.lower() in ("yes", "on") else "false"


class Place(NamedTuple):
    """File, line and column, both from 1; 0 if there is no line."""

    file: str
    line: int = 0
    column: int = 0

    def problem(self, message: str) -> Problem:
        """A fault at this place."""
        return Problem(self.file, self.line, self.column, message)


@dataclass(frozen=True)
class Node:
    """A value as it is written, with its place and that of its key.

    Args:
        value: a dict or list of nodes, a text, a :class:`Plain` scalar, a :class:`Switch`, or None.
        key_place: None in a list, and for a whole file.
    """

    value: Any
    place: Place
    key_place: Place | None = None

    @property
    def data(self) -> Any:
        """The value with plain data in place of nodes."""
        if isinstance(self.value, dict):
            return {key: node.data for key, node in self.value.items()}
        return [node.data for node in self.value] if isinstance(self.value, list) else self.value

    def nodes(self, path: Sequence[str | int]) -> list[Node]:
        """The nodes on a path, from this one to the last that exists."""
        nodes = [self]
        for step in path:
            value = nodes[-1].value
            in_list = isinstance(value, list) and isinstance(step, int) and step < len(value)
            if not in_list and not (isinstance(value, dict) and step in value):
                break
            nodes.append(value[step])
        return nodes

    def places(self) -> Iterator[Place]:
        """The places of all values and keys."""
        yield from filter(None, (self.place, self.key_place))
        inner = self.value.values() if isinstance(self.value, dict) else self.value
        for node in inner if isinstance(self.value, dict | list) else ():
            yield from node.places()

    def problem(self, path: KeyPath, message: str, *, at_key: bool = False) -> Problem:
        """A fault at a path, or at the nearest enclosing value that exists."""
        node, where = self.nodes(path)[-1], path_text(path)
        place = (at_key and node.key_place) or node.place
        if place.file == IN_PYTHON:
            return Problem(where or IN_PYTHON, 0, 0, message)
        return place.problem(message if place.file == f"--set {where}" else f"{where}: {message}")

    def put(self, path: Sequence[str | int], node: Node) -> Node:
        """A copy with ``node`` at a path. Mappings that it adds are at the place of its key."""
        if not path:
            return node
        assert node.key_place is not None
        is_mapping = isinstance(self.value, dict)
        outer = self if is_mapping else Node({}, node.key_place, self.key_place)
        inner = outer.value.get(path[0]) or Node(None, node.key_place, node.key_place)
        return replace(outer, value={**outer.value, path[0]: inner.put(path[1:], node)})

    def merge(self, lower: Node) -> Node:
        """This layer over another: mappings are merged key by key, other values replaced."""
        if not (isinstance(self.value, dict) and isinstance(lower.value, dict)):
            return self
        both = self.value.keys() & lower.value.keys()
        merged = {key: self.value[key].merge(lower.value[key]) for key in both}
        return replace(self, value={**lower.value, **self.value, **merged})


def describe(value: Any) -> str:
    """A value for messages: ``'many'``, ``3.5``, ``a list``; long text is shortened."""
    if not isinstance(value, str):
        return "null" if value is None else "a list" if isinstance(value, list) else "a mapping"
    text = value if len(value) <= 60 else f"{value[:57]}..."
    return str(text) if isinstance(value, Plain) else repr(text)


def read_file(path: Path, problems: list[Problem]) -> Node:
    """Read a YAML file.

    Args:
        problems: gets the faults of its values: duplicate keys, control characters, tags.

    Raises:
        SpecError: the file is missing, too large, not text, or not YAML.
    """
    place = Place(str(path))
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        hint = "write a starter spec with: pipectl init"
        raise SpecError([place.problem("no such file")], hint=hint) from None
    except IsADirectoryError:
        raise SpecError([place.problem("a directory, not a file")]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "not a file name")
        raise SpecError([place.problem(f"cannot be read: {reason}")]) from None
    if len(content) > MAX_BYTES:
        raise SpecError([place.problem("larger than 1 MiB, too large for a job spec")])
    if b"\0" in content:
        raise SpecError([place.problem("a binary file; a job spec is YAML text")])
    try:
        return read_text(content.decode("utf-8-sig"), str(path), problems)
    except UnicodeDecodeError as error:
        before = content[: error.start]
        place = Place(str(path), before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        message = f"not UTF-8 text (byte 0x{content[error.start]:02x})"
        raise SpecError([place.problem(message)]) from None


def read_text(text: str, name: str, problems: list[Problem], *, lines: bool = True) -> Node:
    """Read a YAML text; see :func:`read_file`.

    Args:
        name: of the file, in places.
        lines: whether places have line and column.
    """
    try:
        loader = _Loader(text, name, problems, lines)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        line, column, message = _explain_syntax(error, text)
        place = Place(name, line, column) if lines else Place(name)
        raise SpecError([place.problem(message)]) from None
    except (ValueError, OverflowError):  # a character or version with an impossible number
        place = loader.place(loader.get_mark())
        raise SpecError([place.problem("not valid YAML: number out of range")]) from None
    return Node(None, Place(name)) if root is None else loader.convert(root, ())


class _Loader(yaml.SafeLoader):
    """Composes PyYAML's nodes, whose tags distinguish quoted scalars, and converts them to ours."""

    yaml_implicit_resolvers = {None: [(_PLAIN, re.compile(""))]}  # noqa: RUF012

    def __init__(self, text: str, name: str, problems: list[Problem], lines: bool) -> None:
        self._problems, self._lines = problems, lines
        self._depth = self._values = 0
        super().__init__(text)
        self.name = name

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._check_depth(self._depth, self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def place(self, mark: yaml.Mark) -> Place:
        """The place of a mark."""
        return Place(self.name, mark.line + 1, mark.column + 1) if self._lines else Place(self.name)

    def convert(self, node: yaml.Node, path: KeyPath, key_place: Place | None = None) -> Node:
        """Our node for PyYAML's, with the first of duplicate keys.

        Aliases are expanded, so they count towards the limits.
        """
        self._values += 1
        place = self.place(node.start_mark)
        self._check_depth(len(path), node.start_mark)
        if self._values > MAX_VALUES:
            message = f"more than {MAX_VALUES} values, counting aliases where they are used"
            raise SpecError([place.problem(message)])
        self._check_tag_and_text(node, path)
        if isinstance(node, yaml.ScalarNode):
            text = _scalar(node)
            is_switch = node.tag == _PLAIN and text is not None and _SWITCH.fullmatch(text)
            return Node(Switch(text) if is_switch else text, place, key_place)
        if isinstance(node, yaml.SequenceNode):
            items = [self.convert(item, (*path, index)) for index, item in enumerate(node.value)]
            return Node(items, place, key_place)
        inner: dict[str, Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._note(key, path, "a key must be text, not a list or mapping")
                continue
            self._check_tag_and_text(key, path)
            if first_harmful(key.value):
                continue
            at_key = self.place(key.start_mark)
            if key.value == "<<" and key.tag == _PLAIN:
                self._note(key, path, "merging with '<<' is not supported; write the keys out")
            elif key.value in inner:
                first = inner[key.value].key_place or place
                where = f"; first on line {first.line}" * self._lines
                self._note(key, (*path, key.value), f"given twice{where}")
            else:
                name = _scalar(key)
                inner[Plain(key.value) if name is None else name] = self.convert(
                    value, (*path, key.value), at_key
                )
        return Node(inner, place, key_place)

    def _check_depth(self, depth: int, mark: yaml.Mark) -> None:
        if depth > MAX_DEPTH:
            message = f"nested more than {MAX_DEPTH} levels deep"
            raise SpecError([self.place(mark).problem(message)])

    def _check_tag_and_text(self, node: yaml.Node, path: KeyPath) -> None:
        if node.tag not in (_PLAIN, _TEXT, *_COLLECTIONS):
            tag = repr(node.tag.replace("tag:yaml.org,2002:", "!!")[:60])
            self._note(node, path, f"the YAML tag {tag} is not supported; remove it")
        if isinstance(node, yaml.ScalarNode) and (hidden := first_harmful(node.value)):
            self._note(node, path, _UNPRINTABLE.format(ord(hidden)))

    def _note(self, node: yaml.Node, path: KeyPath, message: str) -> None:
        where = f"{path_text(path)}: " if path else ""
        self._problems.append(self.place(node.start_mark).problem(where + message))


def _scalar(node: yaml.Node) -> str | None:
    text: str = node.value.encode(
        errors="replace"
    ).decode()  # an incomplete character is reported elsewhere
    if node.tag != _PLAIN or (value := parse_scalar(text)) == text:
        return text
    return None if value is None else Plain(text)


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
    words = (words for pattern, words in _EXPLANATIONS.items() if re.search(pattern, full))
    message = f"not valid YAML: {next(words, error.problem) or 'it cannot be parsed'}"
    start = error.context_mark
    in_quotes = re.search(r"quoted scalar|flow (mapping|sequence)", error.context or "")
    if in_quotes and start is not None and start.line + 1 != line:
        message += f" (opened on line {start.line + 1})"
    return line, column, message


def parse_scalar(text: str) -> Any:
    """The value of a scalar without quotes: None, true, 12, 0x1f, 3e-4, .inf or a text."""
    for pattern, convert in _TYPES.values():
        if pattern.match(text):
            return convert(text)
    return str(text)


def resolve(data: Any) -> Any:
    """Data with numbers, true and false as YAML 1.2 reads them, for values of any type."""
    if isinstance(data, list):
        return [resolve(item) for item in data]
    if isinstance(data, dict):
        return {resolve(key): resolve(item) for key, item in data.items()}
    if isinstance(data, Switch):
        return str(data)
    return parse_scalar(data) if isinstance(data, Plain) else data


def path_text(path: KeyPath) -> str:
    """``pipeline.warm_up[2]``; what a terminal cannot show is escaped."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{escape(step)}" for step in path)
    return "".join(steps).removeprefix(".")


def escape(text: str) -> str:
    """A key for messages: shortened, and without control characters."""
    short = text if len(text) <= 100 else f"{text[:97]}..."
    return short if short.isprintable() else repr(short)[1:-1]


def to_yaml(data: Any) -> str:
    """YAML that loads as the same Python values."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that are not text in YAML 1.1 or 1.2; writes no aliases."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        **yaml.SafeDumper.yaml_implicit_resolvers,
        None: [(f"tag:yaml.org,2002:{name}", pattern) for name, (pattern, _) in _TYPES.items()],
    }

    def ignore_aliases(self, _data: Any) -> bool:
        return True
