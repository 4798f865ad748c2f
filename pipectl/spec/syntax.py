"""YAML syntax errors in plain words, with the line and column of the mistake."""

from __future__ import annotations

import re

import yaml
from yaml.reader import ReaderError

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


def explain(error: yaml.YAMLError, text: str) -> tuple[int, int, str]:
    """Line, column (from 1) and explanation of a syntax error in ``text``."""
    if isinstance(error, ReaderError):
        hidden = f"U+{int(error.character):04X}"
        place = _line_column(text, error.position)
        return *place, f"contains the unprintable character {hidden}; remove it"
    if not isinstance(error, yaml.MarkedYAMLError):
        return 1, 1, "not valid YAML"
    mark = error.problem_mark or error.context_mark
    line, column = (1, 1) if mark is None else (mark.line + 1, mark.column + 1)
    return line, column, f"not valid YAML: {_explanation(error)}{_opened(error)}"


def _explanation(error: yaml.MarkedYAMLError) -> str:
    full = f"{error.context or ''}, {error.problem or ''}"
    for pattern, words in _EXPLANATIONS:
        if re.search(pattern, full):
            return words
    return error.problem or "it cannot be parsed"


def _opened(error: yaml.MarkedYAMLError) -> str:
    """Where an unclosed quote or bracket was opened, if that is on another line."""
    start, end = error.context_mark, error.problem_mark
    opening = re.search(r"quoted scalar|flow (mapping|sequence)", error.context or "")
    if opening is None or start is None or end is None or start.line == end.line:
        return ""
    return f" (opened on line {start.line + 1})"


def _line_column(text: str, position: int) -> tuple[int, int]:
    before = text[:position]
    return before.count("\n") + 1, position - before.rfind("\n")
