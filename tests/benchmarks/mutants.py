"""Deliberate faults, each of which the tests that it names must catch.

``faults.txt`` has a fault in three lines: the file and the tests (files or node ids), a text that
occurs once in the file, and the text in its place. The tests run in a copy of the checkout, first
all of them without a fault; those of accelerators on the pretended one of tests/accelerator. Words
choose the faults in whose lines they occur.

    python tests/benchmarks/mutants.py [WORD ...]
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
COPY = CHECKOUT / "build" / "faults"
ACCELERATOR = COPY / "build" / "accelerator"
"""A folder that makes the pretended one known to every Python that has it on its path."""
LOADED = ("hypothesis", "llvmlite.binding", "pydantic", "pytest", "torch", "yaml")
"""What takes long to import and does not import pipectl: tests run in forks that have it."""
LIMIT_S = 90
"""A test that takes longer hangs because of the fault."""
FAILED, NOT_COLLECTED = 1, 2
"""Exit codes of pytest that say that a fault was noticed: no test file fails without one."""


@dataclass(frozen=True)
class Fault:
    """A text that replaces another one, and the tests that must fail then."""

    file: str
    tests: tuple[str, ...]
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}: {self.old}  ->  {self.new}"

    @property
    def is_compiled(self) -> bool:
        """Whether it is in a kernel, which its tests then run as Python instead."""
        return "pipectl.compiled" in (CHECKOUT / self.file).read_text()

    @property
    def needs_accelerator(self) -> bool:
        """Whether its tests are for accelerators."""
        return any("_accelerators.py" in test for test in self.tests)


def read_faults(words: Sequence[str]) -> list[Fault]:
    """Those of ``faults.txt`` with one of the words; all without words."""
    lines = [line for line in (HERE / "faults.txt").read_text().splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("# ")]
    faults = []
    for head, old, new in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        assert old.startswith("- "), old
        assert new.startswith("+ "), new
        file, *tests = head.split()
        if not words or any(word in line for word in words for line in (head, old)):
            faults.append(Fault(file, tuple(tests), old[2:], new[2:]))
    return faults


def check_texts(faults: Sequence[Fault]) -> None:
    """Exit if a fault cannot be made, naming all of them."""
    errors = []
    for fault in faults:
        path = CHECKOUT / fault.file
        count = path.read_text().count(fault.old) if path.exists() else 0
        if count != 1:
            errors.append(f"occurs {count} times, must once: {fault}")
        gone = [test for test in fault.tests if not (CHECKOUT / test.partition("::")[0]).exists()]
        errors += [f"no such test: {test}" for test in gone]
    if errors:
        sys.exit("\n".join([*errors, "faults.txt must follow the code"]))


def copy_checkout() -> None:
    """The files that git does not ignore."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (CHECKOUT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, COPY / name)


@contextmanager
def made(fault: Fault) -> Iterator[None]:
    """The copy has a fault."""
    path = COPY / fault.file
    text, times = path.read_text(), path.stat()
    path.write_text(text.replace(fault.old, fault.new))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def run_tests(
    tests: Sequence[str], limit_s: float, *, compiles: bool, on_accelerator: bool
) -> int | None:
    """The exit code of pytest on tests of the copy, which prints to ``COPY/output``; None if it
    took too long."""
    pid = os.fork()
    if not pid:
        os.setsid()
        os.chdir(COPY)
        output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        path = [str(COPY), str(ACCELERATOR)] if on_accelerator else [str(COPY)]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        os.environ["PIPECTL_INTERPRET"] = "" if compiles else "1"
        sys.path[:0] = path
        if on_accelerator:
            os.environ["PRETENDED_LATE"] = "1"
            importlib.import_module("pretended").load()
        options = ("-x", "-p", "no:cacheprovider")
        os._exit(importlib.import_module("pytest").main([*options, *tests]))
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main(words: Sequence[str]) -> int:
    faults = read_faults(words)
    check_texts(faults)
    copy_checkout()
    for module in LOADED:
        importlib.import_module(module)
    if any(fault.needs_accelerator for fault in faults):
        sys.path.insert(0, str(CHECKOUT / "tests" / "gpu"))
        importlib.import_module("building").build(ACCELERATOR)
    for compiled, needs in product((False, True), repeat=2):
        alike = [f for f in faults if (f.is_compiled, f.needs_accelerator) == (compiled, needs)]
        every = list(dict.fromkeys(test for fault in alike for test in fault.tests))
        start, limit_s = time.monotonic(), LIMIT_S * len(every)
        code = every and run_tests(every, limit_s, compiles=not compiled, on_accelerator=needs)
        if code:
            sys.exit(f"the tests fail without a fault:\n{(COPY / 'output').read_text()}")
        print(f"{len(every)} tests or files pass without a fault, {time.monotonic() - start:.0f} s")
    survivors = 0
    for fault in faults:
        start = time.monotonic()
        with made(fault):
            code = run_tests(
                fault.tests,
                LIMIT_S,
                compiles=not fault.is_compiled,
                on_accelerator=fault.needs_accelerator,
            )
        is_caught = code in (FAILED, NOT_COLLECTED, None)
        survivors += not is_caught
        word = "HANGS" if code is None else "caught" if is_caught else "SURVIVED"
        print(f"{word:8} {time.monotonic() - start:5.1f} s  {fault}", flush=True)
    print(f"{len(faults) - survivors} of {len(faults)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
