"""Bytes, durations, names and texts: parsing what people write, printing what people read."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

_BYTE_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d{1,2}):(\d{1,2})")
_DURATION = re.compile(r"(?:(\d+)d(?!\d+$))?(?:(\d+)h(?!\d+$))?(?:(\d+)m)?(?:(\d+)s?)?")
"""A number without a unit is seconds, alone or after minutes; ``1h30`` means minutes to most."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What moves the cursor, changes colours or turns text around, apart from newlines and tabs."""


def parse_bytes(text: str) -> int:
    """Bytes in ``"4GiB"``, ``"512 MB"`` or ``"1024"``; one-letter units are binary.

    Raises:
        ValueError: the text is no size.
    """
    match = _BYTES.fullmatch(text)
    unit = _BYTE_UNITS.get(match[2].upper()) if match else None
    size = float(match[1]) * unit if match and unit else inf
    if size == inf:
        raise ValueError(f"{text!r} is not a size; write for example 4GiB or 512MiB")
    return int(size)


def format_bytes(size_bytes: float) -> str:
    """A size with three significant digits and a binary unit: ``1.50 GiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.{_decimals(size)}f} {unit}"
        size /= 1024
    return f"{size:.{_decimals(size)}f} TiB"


def format_flops(flops_per_s: float) -> str:
    """Floating-point operations per second, with three significant digits: ``3.41 TFLOP/s``."""
    rate = flops_per_s / 1e6
    for unit in ("M", "G", "T"):
        if rate < 999.5:
            return f"{rate:.{_decimals(rate)}f} {unit}FLOP/s"
        rate /= 1000
    return f"{rate:.{_decimals(rate)}f} PFLOP/s"


def parse_duration(text: str) -> int:
    """Seconds in ``"00:30:00"``, ``"2-12:00:00"``, ``"3m"``, ``"1h30m"`` or ``"90"``.

    Raises:
        ValueError: the text is no duration.
    """
    stripped = text.strip()
    if clock := _CLOCK.fullmatch(stripped):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        if minutes < 60 and seconds < 60:
            return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    elif stripped and (parts := _DURATION.fullmatch(stripped)):
        days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    raise ValueError(f"{text!r} is not a duration; write for example 00:30:00, 90s or 1h30m")


def parse_walltime(text: str) -> int:
    """As :func:`parse_duration`, but a number without a unit is minutes, as for ``sbatch --time``.

    Raises:
        ValueError: the text is no duration.
    """
    stripped = text.strip()
    return 60 * int(stripped) if stripped.isdecimal() else parse_duration(text)


def format_clock(duration_s: int) -> str:
    """``H:MM:SS`` with two-digit hours, as both Slurm and PBS accept it."""
    minutes, seconds = divmod(int(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}"


def format_time(time_s: float) -> str:
    """A measured time with three significant digits: ``12.3 ms``, ``1.25 s``, ``3 min 05 s``."""
    if time_s >= 120:
        minutes, seconds = divmod(round(time_s), 60)
        return f"{minutes} min {seconds:02d} s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        value = time_s * factor
        if value >= 0.9995 or unit == "us":
            return f"{value:.{_decimals(value)}f} {unit}"
    raise AssertionError("unreachable")


def _decimals(value: float) -> int:
    """Digits after the point for three significant ones."""
    size = abs(value)
    return 2 if size < 9.995 else 1 if size < 99.95 else 0


def plural(number: int, noun: str) -> str:
    """A number with its noun in the plural if it needs one."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def shorten(items: Sequence[str], limit: int) -> list[str]:
    """The first items, and how many more there are."""
    more = len(items) - limit
    return [*items[:limit], *([f"and {more} more"] if more > 0 else [])]


def format_ranges(numbers: Iterable[int], separator: str = ", ") -> str:
    """Whole numbers with neighbours put together: ``0, 2-5`` for 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return separator.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def is_name(text: str) -> bool:
    """Whether ``text`` can name a job: letters, digits, ``. _ -``, at most 64."""
    return _NAME.fullmatch(text) is not None


def did_you_mean(word: str, known: Iterable[str], *, similarity: float = 0.6) -> str:
    """``"; did you mean 'x'?"`` for the nearest known word, or an empty string.

    Args:
        similarity: from 0 to 1; the least of a word that is named.
    """
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=similarity)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def first_harmful(text: str) -> str | None:
    """The first such character of a text."""
    if text.isascii() and text.isprintable():
        return None
    match = _HARMFUL.search(text)
    return match and match[0]


def printable(text: object) -> str:
    """A text without what a terminal would obey instead of show."""
    string = str(text)
    return string if string.isascii() and string.isprintable() else _HARMFUL.sub("", string)


def printable_json(value: Any, indent: int | None = None) -> str:
    """JSON in which such characters are escaped: programs get the very text."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    return _HARMFUL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
