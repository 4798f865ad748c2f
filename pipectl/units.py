"""Parsing and formatting of bytes, durations, names and text."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

Report = Callable[[int, int, str], None]
"""Called with (done, total, what is or was done); a total of 0 says that nobody knows how long."""
_BYTE_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_LEAST_MEMORY, _MOST_MEMORY = 2**27, 2**41
"""Of a node or process, where a number has no unit."""
_CLOCKS = (
    re.compile(r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d{1,2})(:(?P<seconds>\d{1,2}))?)?"),
    re.compile(r"(?P<hours>\d+):(?P<minutes>\d{1,2}):(?P<seconds>\d{1,2})(?P<fraction>\.\d+)?"),
    re.compile(r"(?P<minutes>\d+):(?P<seconds>\d{1,2})(?P<fraction>\.\d+)?"),
)
"""The forms of ``sbatch --time``, and of PBS's walltime, whose seconds may have a fraction."""
_DURATION = re.compile(r"(?:(\d+)d(?!\d+$))?(?:(\d+)h(?!\d+$))?(?:(\d+)m)?(?:(\d+)s?)?")
"""A number without a unit is seconds, alone or after minutes. ``1h30`` is ambiguous."""
_UNIT_WORD = re.compile(
    r"(?<=\d)\s*(?:(d)ays?|(h)(?:ou)?rs?|(m)in(?:ute)?s?|(s)ec(?:ond)?s?)\b\s*", re.I
)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RANGE = re.compile(r"(\d{1,18})\s*-\s*(\d{1,18})")
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that move the cursor, change colours or reverse text, except newlines and tabs."""


@dataclass(frozen=True)
class NodeRange:
    """A number of nodes that is open between two bounds, as Slurm writes it: ``2-8``."""

    lowest: int
    highest: int

    @classmethod
    def parse(cls, text: str) -> NodeRange:
        """Parse ``2-8``.

        Raises:
            ValueError: the text is no range, or its first number is 0 or above the second.
        """
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a range of nodes; write for example 2-8")
        found = cls(int(match[1]), int(match[2]))
        if not 1 <= found.lowest <= found.highest:
            raise ValueError(f"{text!r}: must be two numbers of at least 1, the lower one first")
        return found

    @property
    def counts(self) -> range:
        """All numbers in it, the lowest first."""
        return range(self.lowest, self.highest + 1)

    def spread(self, limit: int) -> list[int]:
        """Its numbers, or ``limit`` of a longer range, with both ends, at equal distances."""
        counts, last = self.counts, limit - 1
        if len(counts) <= limit:
            return [*counts]
        return [counts[(len(counts) - 1) * index // last] for index in range(limit)]

    def nearest(self, number: int) -> int:
        """The number in it that is nearest to another one."""
        return min(max(number, self.lowest), self.highest)

    def __str__(self) -> str:
        return f"{self.lowest}-{self.highest}"


def parse_bytes(text: str) -> int:
    """Parse ``"4GiB"``, ``"512 MB"`` or ``"1024"`` as bytes; one-letter units are binary.

    Raises:
        ValueError: the text is not a size.
    """
    match = _BYTES.fullmatch(text)
    unit = _BYTE_UNITS.get(match[2].upper()) if match else None
    size = float(match[1]) * unit if match and unit else inf
    if size == inf:
        raise ValueError(f"{text!r} is not a size; write for example 4GiB or 512MiB")
    return int(size)


def parse_memory(text: str) -> int:
    """Parse the memory of a process or node; see :func:`parse_bytes`.

    Raises:
        ValueError: the text is not a size, or a number of bytes in which no process runs.
    """
    size, number = parse_bytes(text), text.strip()
    if 0 < size < _LEAST_MEMORY and number[-1:].isdigit():
        sizes = {unit: size * _BYTE_UNITS[unit.upper()] for unit in ("KiB", "MiB", "GiB")}
        units = [unit for unit in sizes if _LEAST_MEMORY <= sizes[unit] <= _MOST_MEMORY]
        meant = " or ".join(f"{number}{unit}" for unit in units or ["GiB"])
        raise ValueError(f"{number} without a unit is {format_bytes(size)}; did you mean {meant}?")
    return size


def format_bytes(size_bytes: float) -> str:
    """Format a size with three significant digits and a binary unit: ``1.50 GiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.{_decimals(size)}f} {unit}"
        size /= 1024
    return f"{size:.{_decimals(size)}f} TiB"


def format_flops(flops_per_s: float) -> str:
    """Format FLOP/s with three significant digits: ``3.41 TFLOP/s``."""
    rate = flops_per_s / 1e6
    for unit in ("M", "G", "T"):
        if rate < 999.5:
            return f"{rate:.{_decimals(rate)}f} {unit}FLOP/s"
        rate /= 1000
    return f"{rate:.{_decimals(rate)}f} PFLOP/s"


def parse_duration(text: str) -> int:
    """Parse a duration as seconds; a fraction of a second is rounded up.

    ``"30:00"`` is half an hour, ``"01:30:00"`` one and a half; ``"2-12"``, ``"2-12:30"`` and
    ``"2-12:30:00"`` begin with days; ``"3m"``, ``"1h30m"`` and ``"90 minutes"`` have units; a
    number alone is in seconds.

    Raises:
        ValueError: the text is not a duration.
    """
    stripped = _UNIT_WORD.sub(lambda unit: unit[0].strip()[0].lower(), text.strip())
    matches = (form.fullmatch(stripped) for form in _CLOCKS)
    if clock := next(filter(None, matches), None):
        named = clock.groupdict()
        counts = [int(named.get(unit) or 0) for unit in ("days", "hours", "minutes", "seconds")]
        more = 1 if (named.get("fraction") or "").strip(".0") else 0
        fits = counts[3] < 60 and (counts[2] < 60 or "hours" not in named)
    else:
        parts = _DURATION.fullmatch(stripped)
        counts, more, fits = [int(part or 0) for part in parts.groups()] if parts else [], 0, True
    if stripped and counts and fits:
        days, hours, minutes, seconds = counts
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds + more
    raise ValueError(f"{text!r} is not a duration; write for example 00:30:00, 90s or 1h30m")


def parse_walltime(text: str) -> int:
    """As :func:`parse_duration`, but a number without a unit is minutes (``sbatch --time``).

    Raises:
        ValueError: the text is not a duration.
    """
    stripped = text.strip()
    return 60 * int(stripped) if stripped.isdecimal() else parse_duration(text)


def format_clock(duration_s: int) -> str:
    """Format seconds as ``HH:MM:SS``, which both Slurm and PBS accept."""
    minutes, seconds = divmod(int(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}"


def format_time(time_s: float) -> str:
    """Format a time with three significant digits: ``12.3 ms``, ``1.25 s``, ``3 min 05 s``.

    Sums of times from damaged files may be infinite.
    """
    if time_s == inf:
        return "inf s"
    if time_s >= 120:
        minutes, seconds = divmod(round(time_s), 60)
        return f"{minutes} min {seconds:02d} s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        value = time_s * factor
        if value >= 0.9995 or unit == "us":
            return f"{value:.{_decimals(value)}f} {unit}"
    raise AssertionError("unreachable")


def format_long_time(time_s: float) -> str:
    """As :func:`format_time`, with hours and days."""
    if time_s < 7200 or time_s == inf:
        return format_time(time_s)
    hours, minutes = divmod(round(time_s / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours / 24:.1f} days"


def _decimals(value: float) -> int:
    """Return the number of decimals that gives three significant digits."""
    size = abs(value)
    return 2 if size < 9.995 else 1 if size < 99.95 else 0


def plural(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless the number is 1."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def shorten(items: Sequence[str], limit: int) -> list[str]:
    """Return the first items, followed by ``and N more`` if there are more."""
    more = len(items) - limit
    return [*items[:limit], *([f"and {more} more"] if more > 0 else [])]


def format_ranges(numbers: Iterable[int], separator: str = ", ") -> str:
    """Format whole numbers with consecutive ones joined: ``0, 2-5`` for 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return separator.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def is_name(text: str) -> bool:
    """Return whether ``text`` is a valid job name: at most 64 letters, digits and ``. _ -``."""
    return NAME.fullmatch(text) is not None


def did_you_mean(word: str, known: Iterable[str], *, similarity: float = 0.6) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known word, or an empty string.

    Args:
        similarity: minimum similarity of that word, from 0 to 1.
    """
    names = list(known)
    nearest = sorted(name for name in names if name.lower() == word.lower())  # classes first
    longer = [name for name in names if name.startswith(f"{word}_")]
    nearest = nearest or (longer if len(longer) == 1 else [])
    nearest = nearest or difflib.get_close_matches(word, names, n=1, cutoff=similarity)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def first_harmful(text: str) -> str | None:
    """Return the first character that could control a terminal, or None."""
    if text.isascii() and text.isprintable():
        return None
    match = _HARMFUL.search(text)
    return match and match[0]


def printable(text: object) -> str:
    """Return a text without the characters that could control a terminal."""
    string = str(text)
    return string if string.isascii() and string.isprintable() else _HARMFUL.sub("", string)


def printable_json(value: Any, indent: int | None = None) -> str:
    """Return JSON with escaped control characters, from which programs read the exact text."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    return _HARMFUL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
