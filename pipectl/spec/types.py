"""The types of the spec's fields: what they accept, and how they are written.

A validator that raises a ValueError without text means "must be", followed by the words of the
field's JSON Schema (:func:`pipectl.spec.schema.words`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    Strict,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from pipectl.spec import references
from pipectl.spec.document import plain, show
from pipectl.units import format_clock, is_name, parse_bytes, parse_duration, parse_walltime

VERSION = 1
ROUND, V_SHAPED = ("interleaved", "looped-bfs"), ("zb-v", "dualpipev")
"""Schedules with several stages per rank."""
ONE_STAGE = ("gpipe", "1f1b", "zb-h1")
"""Schedules with one, and a flush after every step."""
UNFLUSHED = ("pipedream", "pipedream-2bw")
"""Schedules whose steps overlap."""
BUILT_IN = ("gpipe", "1f1b", *ROUND, "zb-h1", *V_SHAPED, *UNFLUSHED)
"""All others are the user's own, and say which rank has which stage."""
APART = ("gpipe", "1f1b", *UNFLUSHED)
"""Schedules that leave backwards to other ranks."""
SCHEDULES_GROUP = "pipectl.schedules"
"""Entry points of packages that offer schedules; see :mod:`pipectl.jobs.schedules`."""
SCHEDULE_SUFFIX = ".csv"

_MAX = 2**63 - 1
_MAX_QUANTITY = 40
_READONLY = ("BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID")
_TEXT = {"type": ["string", "number", "boolean"]}


class Section(BaseModel):
    """A mapping of the spec: immutable, unknown keys refused, null keys not given."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = cls.model_fields
        return {key: item for key, item in value.items() if item is not None or key not in known}


class Auto:
    """``auto`` in place of a value. In Python it is None, like a key that is not given."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: None if value == "auto" else value,
            handler(source),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value: "auto" if value is None else value
            ),
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        inner = handler(schema)
        choices = inner.get("anyOf", [inner])
        return {"anyOf": [{"const": "auto"}, *(item for item in choices if item != _NULL)]}


_NULL = {"type": "null"}


def without_nulls(value: Any) -> Any:
    """A mapping without its null entries: they count as not given."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item is not None}


def _number(value: Any) -> Any:
    """The number or truth value that is written; ``1e3`` is a whole one."""
    value = plain(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_version(value: Any) -> Any:
    """The version that is written; raises a ValueError if it is not ours."""
    number = _number(value)
    if number != VERSION or isinstance(number, bool):
        shown = show(value) if isinstance(value, str) else repr(value)
        raise ValueError(f"is {shown}; this pipectl reads version {VERSION}")
    return number


def _quantity(parse: Callable[[str], int]) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        text = str(value)
        if not isinstance(value, str | int | float) or len(text) > _MAX_QUANTITY:
            raise ValueError
        return parse(text)

    return read


def _line(text: str) -> str:
    if "\n" in text:
        raise ValueError("must be one line; it contains a line break")
    if not text.strip():
        raise ValueError("is empty")
    return text


def _name(text: str) -> str:
    if not is_name(text):
        shown = repr(text[:80])
        raise ValueError(f"must be letters, digits, '.', '_' or '-', at most 64, not {shown}")
    return text


def _reference(*words: str) -> AfterValidator:
    def check(text: str) -> str:
        if text not in words and (fault := references.fault_of(text)):
            raise ValueError(fault)
        return text

    return AfterValidator(check)


def _variable(name: str) -> str:
    if not (name.isascii() and name.isidentifier()):
        raise ValueError("is no variable name; use letters, digits and '_'")
    if name.upper().startswith("PIPECTL_"):
        raise ValueError("is pipectl's own: the job script sets what begins with PIPECTL_")
    if name in _READONLY:
        raise ValueError("cannot be set: bash forbids it")
    return name


def _directive(text: str) -> str:
    if text.startswith("#"):
        shown = repr(text[:60])
        raise ValueError(f"must be the option alone, without #SBATCH or #PBS, not {shown}")
    if not text.startswith("-"):
        raise ValueError
    return text


def _schedule(name: Any) -> Any:
    if name is None or name in BUILT_IN:
        return name
    if not isinstance(name, str) or not (
        name.endswith(SCHEDULE_SUFFIX) or name in entry_points(group=SCHEDULES_GROUP).names
    ):
        raise ValueError
    return name


def _replicas(value: Any) -> Any:
    number = _number(value)
    if number in (None, "any") or (type(number) is int and 1 <= number <= _MAX):
        return number
    raise ValueError


def plain_values(value: Any) -> Any:
    """A mapping whose values are typed as YAML types them."""
    if not isinstance(value, dict):
        return value
    return {str(key): plain(item) for key, item in value.items()}


Version = Annotated[int, BeforeValidator(check_version), WithJsonSchema({"const": VERSION})]
Count = Annotated[int, Strict(), Field(ge=1, le=_MAX), BeforeValidator(_number)]
Natural = Annotated[int, Strict(), Field(ge=0, le=_MAX), BeforeValidator(_number)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False), BeforeValidator(_number)]
Flag = Annotated[bool, Strict(), BeforeValidator(_number)]
Bytes = Annotated[
    int,
    Field(ge=1, le=_MAX),
    BeforeValidator(_quantity(parse_bytes)),
    WithJsonSchema({"title": "a size such as 4GiB", "type": ["string", "number"]}),
]
Seconds = Annotated[
    int,
    Field(ge=1, le=_MAX),
    BeforeValidator(_quantity(parse_duration)),
    PlainSerializer(format_clock),
    WithJsonSchema({"title": "a duration such as 01:30:00 or 90m", "type": ["string", "number"]}),
]
Walltime = Annotated[
    int,
    Field(ge=1, le=_MAX),
    BeforeValidator(_quantity(parse_walltime)),
    PlainSerializer(format_clock),
    WithJsonSchema({"title": "a time such as 01:30:00, 90m or 90", "type": ["string", "number"]}),
]
Text = Annotated[str, AfterValidator(_line), WithJsonSchema(_TEXT)]
"""One line."""
Script = Annotated[str, WithJsonSchema(_TEXT)]
"""Text of any length, also empty or of several lines."""
JobName = Annotated[Text, AfterValidator(_name), WithJsonSchema({"title": "a name", **_TEXT})]
Directive = Annotated[
    Text,
    AfterValidator(_directive),
    WithJsonSchema({"title": "an option such as --gres=gpu:1", "type": "string", "pattern": "^-"}),
]
Reference = Annotated[
    Text,
    _reference(),
    WithJsonSchema(
        {"title": "./file.py:name or package.module:name", "type": "string", "pattern": ":"}
    ),
]
LossReference = Annotated[
    Text,
    _reference("model"),
    WithJsonSchema(
        {
            "title": "model, ./file.py:name or package.module:name",
            "type": "string",
            "pattern": "^model$|:",
        }
    ),
]
WeightReference = Annotated[
    Text,
    _reference("samples"),
    WithJsonSchema(
        {
            "title": "samples, ./file.py:name or package.module:name",
            "type": "string",
            "pattern": "^samples$|:",
        }
    ),
]
Variables = Annotated[
    dict[Annotated[Text, AfterValidator(_variable)], Text], BeforeValidator(without_nulls)
]
Kwargs = Annotated[dict[str, Any], BeforeValidator(plain_values)]
AutoCount = Annotated[Count | None, Auto()]
AutoCounts = Annotated[
    tuple[Count, ...] | None,
    WithJsonSchema(
        {
            "title": "a list of whole numbers, one per stage",
            "type": "array",
            "items": {"type": "integer", "minimum": 1},
        }
    ),
    Auto(),
]
AutoReplicas = Annotated[
    int | str | None,
    BeforeValidator(_replicas),
    WithJsonSchema({"anyOf": [{"const": "any"}, {"type": "integer", "minimum": 1}]}),
    Auto(),
]
Schedule = Annotated[
    str | None,
    BeforeValidator(_schedule),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(BUILT_IN)},
                {
                    "title": "the name of a .csv file or of a package's schedule",
                    "type": "string",
                    "pattern": r"\.csv$",
                },
            ]
        }
    ),
    Auto(),
]
AutoRecompute = Annotated[Literal["none", "all", "blocks"] | None, Auto()]
AutoOffload = Annotated[Literal["none", "host", "disk"] | None, Auto()]
AutoBackward = Annotated[Literal["together", "apart"] | None, Auto()]
