"""The types of the spec's fields: how values are read, checked and written.

If a function raises a ValueError without a message, the message describes the JSON Schema of the
field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    PlainValidator,
    SerializationInfo,
    StrictFloat,
    StrictInt,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import core_schema

from pipectl.directives import RESOURCES, SCHEDULERS, packaged_schedulers
from pipectl.spec import references
from pipectl.spec.document import Switch, parse_scalar, resolve
from pipectl.units import (
    NAME,
    NodeRange,
    format_clock,
    parse_bytes,
    parse_duration,
    parse_memory,
    parse_walltime,
)

VERSION = 1
SCHEDULE_SUFFIX = ".csv"
"""Suffix of the file of a user's own schedule."""

WITH_UNITS = "units"
"""The context in which ``model_dump`` gives sizes with their units."""
_MAX = 2**63 - 1
_IMAGE_SUFFIXES = (".sif", ".simg", ".img", ".sqsh", ".sqfs", ".squashfs", ".toml")
_MAX_LEAD_TIME_S = 2**16 - 1
_MIN_PLAIN_LEAD_TIME_S = 60
_REFERENCE = "./file.py:name or package.module:name"
_CHECK_MESSAGES = "PIPECTL_CHECK_MESSAGES"
_READONLY = ("BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID")
SCALAR = ["string", "number", "boolean"]
"""JSON types of a text field, which is read verbatim, with or without quotes."""


class Section(BaseModel):
    """A mapping of the spec: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        """Treat keys that are null as missing."""
        return drop_nulls(value, cls.model_fields)


def drop_nulls(value: Any, known: Iterable[str] | None = None) -> Any:
    """A mapping without keys that are null; with ``known``, only those keys are dropped."""
    if not isinstance(value, dict):
        return value
    free = set() if known is None else value.keys() - set(known)
    return {key: item for key, item in value.items() if item is not None or key in free}


class Auto:
    """``auto`` in place of a value; in Python it is None."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        write = core_schema.plain_serializer_function_ser_schema(
            lambda value: "auto" if value is None else value
        )
        return core_schema.no_info_before_validator_function(
            lambda value: None if value == "auto" else value, handler(source), serialization=write
        )

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        inner = handler(core)
        choices = [item for item in inner.get("anyOf", [inner]) if item != {"type": "null"}]
        return {"anyOf": [{"const": "auto"}, *choices]}


def check_version(data: Any) -> int:
    """The version of a spec; raises a ValueError if it is not supported."""
    value = resolve(data)
    if type(value) is not int or value != VERSION:
        raise ValueError(f"is {value!r}; this pipectl reads version {VERSION}")
    return VERSION


def _quantity(parse: Callable[[str], int]) -> BeforeValidator:
    def read(value: Any) -> int:
        with suppress(ValueError):
            return parse(str(value))
        raise ValueError

    return BeforeValidator(read)


class WithoutUnit(int):
    """Seconds that were written as a number without a unit, which was taken for minutes."""

    @property
    def ambiguity(self) -> str:
        """What it may mean, and what to write."""
        number = self // 60
        return (
            f"{number} has no unit: for PBS it would be seconds, for sbatch minutes; "
            f"write {number}s or {number}m"
        )


def _note_unit(value: Any, read: ValidatorFunctionWrapHandler) -> int:
    seconds: int = read(value)
    return WithoutUnit(seconds) if str(value).strip().isdecimal() else seconds


def _read_memory(value: Any) -> int:
    try:
        parse_bytes(str(value))
    except ValueError:
        raise ValueError from None
    return parse_memory(str(value))


def _lead_time(seconds: int) -> int:
    if seconds > _MAX_LEAD_TIME_S:
        longest = format_clock(_MAX_LEAD_TIME_S)
        raise ValueError(f"must be at most {longest}, the longest time of sbatch's --signal")
    return seconds


def _short_with_unit(value: Any) -> Any:
    text = value.strip() if isinstance(value, str) else ""
    if text.isdecimal() and 0 < int(text) < _MIN_PLAIN_LEAD_TIME_S:
        raise ValueError(f"{text} without a unit is {text} seconds; write {text}s or {text}m")
    return value


def _write_size(size_bytes: int, info: SerializationInfo) -> int | str:
    """The exact size in the largest unit that divides it, for display and in files that are read
    again, where a small number would lack its unit; plans hash the number."""
    if not (info.mode_is_json() or info.context == WITH_UNITS):
        return size_bytes
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
    name = next(name for name, unit in units.items() if size_bytes % unit == 0)
    return f"{size_bytes // units[name]}{name}"


def _whole(value: Any) -> Any:
    """A number as it is written; 3.0 becomes 3."""
    number = resolve(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _nodes(value: Any) -> int | NodeRange:
    number = _whole(value)
    if isinstance(number, NodeRange):
        return number
    if isinstance(number, str) and "-" in number[1:]:
        found = NodeRange.parse(number)
        return found if found.lowest < found.highest else found.lowest
    if isinstance(number, str) and number.isdecimal():
        raise ValueError(f"must be a number, not the text '{number}'; remove the quotes")
    if type(number) is not int or number < 1:
        raise ValueError
    if number > _MAX:
        raise ValueError(f"must be at most {_MAX}, not {number}")
    return number


def _one_line(text: str) -> str:
    if "\n" in text:
        raise ValueError("must be one line; it contains a line break")
    return text


def _nonempty_line(text: str) -> str:
    if not _one_line(text).strip():
        raise ValueError("is empty")
    return text


def base_of(info: ValidationInfo) -> Path | None:
    """The directory of the spec file; None for sections that are made in Python."""
    base: Path | None = (info.context or {}).get("base")
    return base


def _file(text: str, info: ValidationInfo) -> str:
    base = base_of(info)
    return text if base is None else str(base / text)


def _image(text: str, info: ValidationInfo) -> str:
    return _file(text, info) if is_image_file(text, info.data.get("runtime")) else text


def is_image_file(image: str, runtime: str | None) -> bool:
    """Return whether an image is a file, or a directory, not an address or a name."""
    if "://" in image or runtime in {"podman-hpc", "shifter"}:
        return False
    is_path = image.startswith(("/", "./", "../")) or image.endswith(_IMAGE_SUFFIXES)
    return is_path or runtime in {"apptainer", "singularity"}


def _mount(text: str, info: ValidationInfo) -> str:
    source, colon, target = text.partition(":")
    if colon and not target.startswith("/"):
        raise ValueError("must be DIRECTORY or DIRECTORY:TARGET, with the whole path of the target")
    return f"{_file(source, info)}{colon}{target}"


def _reference(*words: str) -> AfterValidator:
    def check(text: str, info: ValidationInfo) -> str:
        return text if text in words else str(references.parse(text, base_of(info)))

    return AfterValidator(check)


def _variable(name: str) -> str:
    if not (name.isascii() and name.isidentifier()):
        raise ValueError("is not a variable name; use letters, digits and '_'")
    if name.upper().startswith("PIPECTL_") and name != _CHECK_MESSAGES:
        raise ValueError("is reserved: the job script sets the variables that begin with PIPECTL_")
    if name in _READONLY:
        raise ValueError("cannot be set: bash forbids it")
    return name


def _option(value: Any) -> bool | str | tuple[str, ...]:
    flag = parse_scalar(value) if isinstance(value, str) else value
    if isinstance(flag, bool):
        return flag
    texts = value if isinstance(value, list | tuple) else (value,)
    if not texts:
        raise ValueError("is empty")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError
    for switch in (text for text in texts if isinstance(text, Switch)):
        raise ValueError(
            f"{switch} is a text here; write {switch.meaning}, or '{switch}' in quotes"
        )
    lines = tuple(map(_nonempty_line, texts))
    return lines if texts is value else lines[0]


def _select(value: Any) -> Literal[False] | str:
    if (parse_scalar(value) if isinstance(value, str) else value) is False:
        return False
    if not isinstance(value, str) or isinstance(value, Switch):
        raise ValueError
    if not RESOURCES.fullmatch(_nonempty_line(value)):
        raise ValueError
    return value


def _compile(value: Any) -> Any:
    if value in ("reduce-overhead", "max-autotune"):
        raise ValueError(
            f"{value} puts results into memory that the next micro-batch overwrites (CUDA graphs), "
            "while they are sent; write max-autotune-no-cudagraphs"
        )
    return True if value == "default" else value


def _schedule(name: str, info: ValidationInfo) -> str:
    from pipectl.schedule import SCHEDULES
    from pipectl.schedule.registry import packaged_names

    if name.endswith(SCHEDULE_SUFFIX):
        return _file(name, info)
    if name not in SCHEDULES and name not in packaged_names():
        raise ValueError
    return name


def _json(title: str, pattern: str = "") -> WithJsonSchema:
    """The JSON Schema of a text; ``title`` completes "must be ..."."""
    text = {"type": "string", "pattern": pattern} if pattern else {"type": SCALAR}
    return WithJsonSchema({"title": title, **text})


_YAML, _MAPPING = BeforeValidator(resolve), BeforeValidator(drop_nulls)

Version = Annotated[int, BeforeValidator(check_version), WithJsonSchema({"const": VERSION})]
Value = Annotated[Any, _YAML]
"""A value of any YAML type."""
Keywords = dict[str, Value]
Grid = Annotated[dict[str, tuple[Value, ...]], _MAPPING]
Count = Annotated[int, Field(strict=True, ge=1, le=_MAX), BeforeValidator(_whole)]
Nodes = Annotated[
    int | NodeRange,
    PlainValidator(_nodes),
    PlainSerializer(lambda nodes: str(nodes) if isinstance(nodes, NodeRange) else nodes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": _MAX},
                {"title": "a range such as 2-8", "type": "string", "pattern": r"^\d+\s*-\s*\d+$"},
            ]
        }
    ),
]
"""A number of nodes, or a range of numbers."""
Natural = Annotated[int, Field(strict=True, ge=0, le=_MAX), BeforeValidator(_whole)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False), _YAML]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False), _YAML]
Flag = Annotated[bool, Field(strict=True), _YAML]
Compile = Annotated[
    Annotated[bool, Field(strict=True)] | Literal["max-autotune-no-cudagraphs"],
    BeforeValidator(_compile),
    _YAML,
]
"""Whether ``torch.compile`` is used, or the mode in which it is."""
_Number = Annotated[StrictInt | StrictFloat, _YAML, WithJsonSchema({"type": "number"})]
Padding = Annotated[dict[str, _Number], _MAPPING]
Bytes = Annotated[
    int,
    Field(ge=1, le=_MAX),
    BeforeValidator(_read_memory),
    _json("a size such as 4GiB"),
    PlainSerializer(_write_size),
]
_Clock = Annotated[int, Field(ge=1, le=_MAX), PlainSerializer(format_clock)]
Seconds = Annotated[_Clock, _quantity(parse_duration), _json("a duration such as 01:30:00 or 90m")]
LeadTime = Annotated[Seconds, BeforeValidator(_short_with_unit), AfterValidator(_lead_time)]
Walltime = Annotated[
    _Clock,
    _quantity(parse_walltime),
    WrapValidator(_note_unit),
    _json("a time such as 01:30:00, 90m or 90 (minutes)"),
]
Text = Annotated[str, AfterValidator(_nonempty_line)]
"""One line."""
File = Annotated[Text, AfterValidator(_file)]
"""A path relative to the spec file; in Python it is absolute."""
Image = Annotated[Text, AfterValidator(_image)]
"""A path as well, or an address or name."""
Mount = Annotated[Text, AfterValidator(_mount)]
"""A directory, and the name under which a container sees it."""
JobName = Annotated[
    Text, Field(pattern=f"^{NAME.pattern}$", title="letters, digits, '.', '_' or '-', at most 64")
]
Select = Annotated[
    Literal[False] | str,
    BeforeValidator(_select),
    _json("resources such as model=icelake, or false"),
]
"""Resources of PBS's ``-l select``; false for a site that refuses it."""
Reference = Annotated[Text, _reference(), _json(_REFERENCE, ":")]
SCRIPT = "script"
"""In the place of a reference: what the script of the job has made."""
PartReference = Annotated[
    Text, _reference(SCRIPT), _json(f"{_REFERENCE}, or script", f"^{SCRIPT}$|:")
]
LossReference = Annotated[
    Text, _reference("model", SCRIPT), _json(f"model, script, {_REFERENCE}", "^(model|script)$|:")
]
SAMPLES, SUM = "samples", "sum"
"""In the place of a function that weighs micro-batches."""
WeightReference = Annotated[
    Text, _reference(SAMPLES, SUM), _json(f"samples, sum, {_REFERENCE}", "^(samples|sum)$|:")
]
_OPTION = {"type": [*SCALAR, "array"], "items": {"type": SCALAR}}
_Option = Annotated[
    bool | str | tuple[str, ...],
    BeforeValidator(_option),
    # pydantic removes the title of the values of a mapping, unless it is nested deeper.
    WithJsonSchema({"anyOf": [{"title": "text, true or a list of texts", **_OPTION}]}),
]
Options = Annotated[dict[Text, _Option], _MAPPING]
"""Options of sbatch or qsub by name; :mod:`pipectl.directives` says which may be set."""
_Variable = Annotated[Text, AfterValidator(_variable)]
_Setting = Annotated[str, AfterValidator(_one_line)]
Variables = Annotated[dict[_Variable, _Setting], _MAPPING]
Replicas = Annotated[Literal["any"] | Count | None, Auto()]


def _describe_schedules(_core: Any, _handler: Any) -> dict[str, Any]:
    from pipectl.schedule import NAMES

    own = "the name of a .csv file or of a package's schedule"
    file = {"title": own, "type": "string", "pattern": r"\.csv$"}
    return {"anyOf": [{"enum": list(NAMES)}, file]}


_NAME = "^[a-z][a-z0-9_-]*$"


def _scheduler(name: str) -> str:
    if name not in ("auto", *SCHEDULERS) and name not in packaged_schedulers():
        raise ValueError
    return name


def _describe_schedulers(_core: Any, _handler: Any) -> dict[str, Any]:
    own = {"title": "the name of a package's batch system", "type": "string", "pattern": _NAME}
    return {"anyOf": [{"enum": ["auto", *SCHEDULERS]}, own]}


Scheduler = Annotated[
    str, AfterValidator(_scheduler), GetPydanticSchema(None, _describe_schedulers)
]
"""Name of a batch system, or ``auto``."""
_Schedule = Annotated[str, AfterValidator(_schedule), GetPydanticSchema(None, _describe_schedules)]
Schedule = Annotated[_Schedule | None, Auto()]
