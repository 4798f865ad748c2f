"""Kernels: machine code does what Python does, and is found again."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from copy import deepcopy
from enum import IntEnum
from pathlib import Path
from runpy import run_path
from textwrap import indent
from typing import Any, NamedTuple

import numpy as np
import pytest

import pipectl.compiled
from pipectl.arrays import Floats, Integers, Records, Words, record
from pipectl.compiled import Kernel, compiled, compiling_s
from pipectl.errors import PipectlError

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


@compiled
def _take(numbers: Integers) -> int:
    numbers[0] += 1
    return int(numbers[0])


def orders(numbers: Integers, out: Integers) -> None:
    """Effects of operands happen once and in Python's order."""
    out[_take(numbers)] += 5
    out[numbers[0]] += _take(numbers)
    out[4], out[3] = out[3:5]
    for number in (numbers[0], numbers[0] + 1, 40, 50):
        numbers[0] = -7
        if number == numbers[1]:
            continue
        if number == 50:
            break
        out[5] += number


def bounds(values: Floats, words: Words, out: Floats) -> None:
    """Slices end with the array, and later comparisons are not looked at; words have no sign."""
    count = len(values)
    for begin in range(-count - 2, count + 3):
        for end in range(-count - 2, count + 3):
            out[0] = out[0] * 1.5 + len(values[begin:end])
    for place in range(100_000_000):
        if not 0 <= place < count != values[place] >= 0:
            break
        out[1] += 1
    out[2] = len((count, count, count))
    if words[0] >> np.uint64(60) == np.uint64(15) and values[0]:
        out[3] = 1
    out[4] = bool(words[0]) + bool(values[0]) + (True << True)


def quotients(numbers: Integers, values: Floats, out: Floats) -> None:
    """NumPy's numbers divide by 0."""
    out[0] = numbers[0] // numbers[1]
    out[1] = numbers[0] % numbers[1]
    out[2] = values[0] / values[1]
    out[3] = -values[0] / values[1]
    out[4] = values[1] / values[1]


NUMBERS = np.array([-7, -3, -1, 0, 1, 2, 3, 8])
VALUES = np.array([-2.5, 0.0, 0.3, 1.0, -0.1, 7.5, 4.0, math.pi])
TABLE = np.zeros(5, dtype=ENTRY)
TABLE["number"], TABLE["time_s"] = np.arange(5), np.linspace(-1, 1, 5)
OVER_TABLE = (TABLE, np.array([3, 1, 4, 0]))


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered")
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (mixed, (NUMBERS, VALUES, np.zeros((8, 6)))),
        (loops, OVER_TABLE),
        (groups, (Pair(TABLE, 3.5), -5)),
        (orders, (np.array([0, 3]), np.arange(6))),
        (bounds, (VALUES[1:5], np.array([2**64 - 1], dtype=np.uint64), np.zeros(5))),
        (quotients, (np.array([7, 0]), np.array([7.5, 0.0]), np.zeros(5))),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_machine_code_does_what_python_does(
    function: Any, arguments: tuple[Any, ...], monkeypatch: Any
) -> None:
    written, expected = deepcopy(arguments), deepcopy(arguments)
    by_code = Kernel(function)(*written)
    for called in (_halve, _take):
        function_of = getattr(called, "function", called)
        monkeypatch.setitem(globals(), function_of.__name__, function_of)
    assert by_code == function(*expected)
    np.testing.assert_equal(written, expected)


def test_a_kernel_is_compiled_once_and_found_on_disk_after(
    tmp_path: Path, monkeypatch: Any
) -> None:
    def compiles() -> bool:
        before = compiling_s()
        assert Kernel(loops)(*deepcopy(OVER_TABLE))
        return compiling_s() > before

    monkeypatch.setattr(pipectl.compiled, "_folder", lambda: tmp_path)
    assert compiles()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert not compiles()
    file.write_bytes(file.read_bytes()[:-1])  # damaged
    assert compiles()
    assert [*tmp_path.iterdir()] == [file]
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
        assert compiles()  # the file is somebody else's
    monkeypatch.setattr(pipectl.compiled, "_folder", lambda: None)
    assert compiles()


def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "pipectl" / "kernels"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = []
    for mode in (0o777, 0o700):
        folder.chmod(mode)
        found.append(pipectl.compiled._folder.__wrapped__())
    assert found == [None, folder]


def whole(value: float) -> int:
    return int(value)


def test_integers_of_what_is_none_are_defined_and_arguments_may_be_numpys() -> None:
    values = math.inf, -math.inf, math.nan, 1e300, -2.7, np.float64(2.5), np.int64(2)
    largest = 2**63 - 1
    found = [largest, -largest - 1, 0, largest, -2, 2, 2]
    assert [Kernel(whole)(each) for each in values] == found


LENGTH = np.int64(3)


class Color(IntEnum):
    RED = 4


def _constants() -> int:
    return int(LENGTH) + Color.RED


def test_code_is_not_found_again_once_its_meaning_has_changed(monkeypatch: Any) -> None:
    def meanings() -> list[object]:
        return list(pipectl.compiled._meanings(_constants, set()))

    first = meanings()
    assert first == meanings()
    monkeypatch.setitem(_constants.__annotations__, "return", "float")
    second = meanings()
    monkeypatch.setattr("tests.test_compiled.LENGTH", np.int64(5))
    third = meanings()
    monkeypatch.setattr("tests.test_compiled.Color", IntEnum("Color", {"RED": 5}))
    fourth = meanings()
    assert len(set(map(str, (first, second, third, fourth)))) == 4


READ_ONLY = np.broadcast_to(0.0, 3).copy()
READ_ONLY.flags.writeable = False
WRITTEN = """\
from __future__ import annotations
from tests.test_compiled import Sums
shadowed = 3

def function(given) -> int:
"""


@pytest.mark.parametrize(
    ("body", "argument", "words"),
    [
        ("return sorted(given)[0]", np.zeros(3), "kernels do not call this: sorted"),
        ("given += 0.5\nreturn given", 1, "line 2 of it"),
        ("return len(given)", np.zeros((4, 4)).T, "arrays in C order"),
        ("return len(given)", READ_ONLY, "can be written"),
        ("return given", "text", "do not take a str"),
        ("flag = given > 0\nif flag:\n    flag = given\nreturn flag", 1, "is not Scalar"),
        ("if given:\n    other = 1\nreturn other", 1, "may have no value yet: other"),
        ("for i in range(given):\n    last = i\nreturn last", 1, "may have no value yet: last"),
        ("given += shadowed\nshadowed = 1\nreturn given", 1, "may have no value yet: shadowed"),
        ("return given or 5", 1, "given or 5|: given"),
        ("while given > 0:\n    return given", 1, "may end without a result"),
        ("for _ in range(given):\n    pass\nelse:\n    given = 0\nreturn given", 1, "have no else"),
        ("for each in given:\n    return 1\nreturn 0", np.zeros(3), "over ranges and tuples"),
        ("return +given", 1, "do not compute this"),
        ("return given**2", 1, "do not compute this with an? int"),
        ("return given // 2", 3.0, "do not compute this with an? float"),
        ("sums = Sums(part=given, whole=2)\nreturn sums.whole", 1, "by position"),
        ("return len(given[::2])", np.zeros(3), "without steps"),
        ("return given[0]", np.zeros(3, dtype=">f8"), "elements of type >f8"),
        ("return int(given[0] < given[1])", np.zeros(3, dtype=np.uint64), "is no number"),
        ("return given & 0x1_0000_0000_0000_0000", 1, "64 bits"),
        ("return given", 2**63, "64 bits"),
    ],
)
def test_what_no_kernel_can_do_is_said(
    body: str, argument: Any, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "written.py"
    path.write_text(WRITTEN + indent(body, "    "))
    with pytest.raises(TypeError, match=words):
        Kernel(run_path(str(path))["function"])(argument)


def test_a_kernel_takes_all_arguments_by_position() -> None:
    with pytest.raises(TypeError, match="by position"):
        Kernel(whole)(value=1.5)
    with pytest.raises(TypeError, match="takes 1 arguments, not 2"):
        Kernel(whole)(1.5, 2)  # type: ignore[call-arg]


def test_an_installation_without_source_files_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(pipectl.compiled, "__file__", str(tmp_path / "compiled.pyc"))
    with pytest.raises(PipectlError, match="source files of pipectl are missing"):
        pipectl.compiled._translator.__wrapped__()


def test_ranks_list_the_actions_of_a_small_program_without_llvm() -> None:
    """LLVM takes 46 MiB per rank. Machine code gives the same turns."""
    script = """
import sys
import numpy as np
from pipectl.schedule import sequences
from pipectl.schedule.actions import Kind

rows = [
    np.array([(kind, stage, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(4)])
    for stage in range(3)
]
small = sequences.execute(rows, 3, 4)
print("llvmlite" in sys.modules)
sequences._MAX_SMALL = 0
large = sequences.execute(rows, 3, 4)
print("llvmlite" in sys.modules)
turns = [
    [run.order.backward(stage, np.arange(4)).tolist() for stage in range(3)]
    for run in (small, large)
]
print(turns[0] == turns[1], small.is_done.all(), large.is_done.all())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True", "True", "False", "False"]  # no weight halves
