"""Kernels: machine code does what Python does, and is found again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pipectl.compiled
from pipectl.arrays import Floats, Integers, Records, record
from pipectl.compiled import Kernel, compiled, compiling_s

LIMIT, STEP = 7, 0.25
ENTRY = record("number", "time_s")


class Pair(NamedTuple):
    table: Records
    factor: float


class Sums(NamedTuple):
    whole: int
    part: float


@compiled
def _halve(value: float, number: int) -> tuple[float, int]:
    return value / 2, number // 2


def mixed(numbers: Integers, values: Floats, out: Floats) -> int:
    """Every kind of arithmetic, by row of ``out``."""
    count = 0
    for place in range(len(numbers)):
        one, value = numbers[place], values[place]
        row = out[place]
        row[0] = one // 3 + one % 3 * 10 - -one // 3 % 5
        row[1] = max(value, one, STEP) - min(value, 2.0) * abs(value)
        row[2] = (one & 6) + (one | 1) + (one ^ 5) + (one >> 1) + (one << 2) + ~one
        row[3] = np.ceil(value) + int(value) + float(one) + bool(one) * value
        row[-1] = np.inf if one == 3 and value > 0 else value / (one if one else 1)
        if not one or (value < 0 and out[place - 1, 0] > 0):
            row[4] += 1
            continue
        if -1 < value <= 1 != one:
            row[4] -= LIMIT
        count += value < one
    return count


def loops(table: Records, order: Integers) -> float:
    """Loops of every kind, and records."""
    total, place = 0.0, len(order) - 1
    while True:
        if place < 0:
            break
        entry = table[order[place]]
        entry.number += place
        total += entry.time_s * entry.number
        place -= 1
    for start in range(len(order) - 1, 0, -2):
        for number in range(start):
            if number == 2:
                break
            total -= table[number].time_s
    first, second = order[:2], order[2:]
    for each in (first, second):
        total += len(each) * each[0]
    return total


def groups(pair: Pair, step: int) -> float:
    """Named tuples, calls and results of several values."""
    sums = Sums(step, pair.factor)
    half, number = _halve(sums.part, sums.whole)
    pair.table[-1].time_s = pair.table[0].number = number
    return half + pair.table.shape[0] + pair.table[1].time_s


def _table() -> Records:
    table = np.zeros(5, dtype=ENTRY)
    table["number"], table["time_s"] = np.arange(5), np.linspace(-1, 1, 5)
    return table


def _arguments(name: str) -> tuple[Any, ...]:
    numbers = np.array([-7, -3, -1, 0, 1, 2, 3, 8, 2**40])
    values = np.array([-2.5, 0.0, 0.3, 1.0, -0.1, 7.5, 4.0, math.pi, -1e30])
    return {
        "mixed": (numbers[:8], values[:8], np.zeros((8, 6))),
        "loops": (_table(), np.array([3, 1, 4, 0])),
        "groups": (Pair(_table(), 3.5), -5),
    }[name]


@pytest.mark.parametrize("function", [mixed, loops, groups], ids=lambda each: each.__name__)
def test_machine_code_does_what_python_does(function: Any, monkeypatch: Any) -> None:
    arguments = _arguments(function.__name__)
    by_code = Kernel(function)(*arguments)
    again = _arguments(function.__name__)
    monkeypatch.setitem(globals(), "_halve", getattr(_halve, "function", _halve))
    assert by_code == function(*again)
    for one, other in zip(arguments, again, strict=True):
        for each, same in zip(
            *((x if isinstance(x, tuple) else (x,)) for x in (one, other)), strict=True
        ):
            assert np.array_equal(each, same)


def test_a_kernel_is_compiled_once_and_found_on_disk_after(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(pipectl.compiled, "_folder", lambda: tmp_path)
    before = compiling_s()
    assert Kernel(loops)(*_arguments("loops"))
    spent = compiling_s()
    assert spent > before
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert Kernel(loops)(*_arguments("loops"))
    assert compiling_s() == spent
    file.write_bytes(file.read_bytes()[:-1])  # damaged
    assert Kernel(loops)(*_arguments("loops"))
    assert compiling_s() > spent
    assert list(tmp_path.iterdir()) == [file]


def test_without_a_directory_to_write_to_kernels_are_compiled(monkeypatch: Any) -> None:
    monkeypatch.setattr(pipectl.compiled, "_folder", lambda: None)
    before = compiling_s()
    assert Kernel(loops)(*_arguments("loops"))
    assert compiling_s() > before


def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "pipectl" / "kernels"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find = pipectl.compiled._folder.__wrapped__
    folder.chmod(0o777)
    assert find() is None
    folder.chmod(0o700)
    assert find() == folder


def unknown(values: Floats) -> float:
    return sorted(values)[0]


def changing(number: int) -> int:
    number += 0.5
    return number


def power(number: int) -> int:
    return number**2


def rounding(value: float) -> float:
    return value // 2


def searching(number: int) -> int:
    while number > 0:
        number -= 1
    else:
        number = 7
    return number


def naming(number: int) -> int:
    return max(number, 1, key=abs)


@pytest.mark.parametrize(
    ("function", "argument", "words"),
    [
        (power, 3, "do not compute this with a int"),
        (rounding, 3.0, "do not compute this with a float"),
        (searching, 3, "no else"),
        (naming, 3, "by position"),
        (unknown, np.zeros(3, dtype=">f8"), "byte order"),
        (unknown, np.zeros(3), "kernels do not call this: sorted"),
        (changing, 1, "line 2 of it"),
        (unknown, np.zeros((4, 4)).T, "arrays in C order"),
        (unknown, "text", "do not take a str"),
    ],
)
def test_what_no_kernel_can_do_is_said(function: Any, argument: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Kernel(function)(argument)
