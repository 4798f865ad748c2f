"""Mutation testing of the pure layers.

Cosmic Ray makes one fault (a comparison, a number, a condition) in a copy of the checkout, and the
tests of that part of the package must fail. A sample of the possible faults is tried.

    pip install cosmic-ray
    python tests/benchmarks/mutants.py [--faults COUNT] [--seed NUMBER] [--jobs COUNT] [PART ...]

Faults in kernels take long, because numba compiles them again.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_item import MutationSpec

CHECKOUT = Path(__file__).resolve().parents[2]
LOWERING = ("assembly", "lowering", "memory")
"""Files of ``schedule/`` that turn actions into programs and prove them."""

LEFT_OUT = "mpi or slurm or corpus or product or torture"
SLOWER = 1.5
"""Than without a fault, and a test hangs."""
ORDERS = ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_Gt", "Gt_Lt")
EQUALS = ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")
ARITHMETIC = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Add")
OPERATORS = (
    *(f"core/ReplaceComparisonOperator_{each}" for each in ORDERS + EQUALS),
    *(f"core/ReplaceBinaryOperator_{each}" for each in ARITHMETIC),
    *(f"core/ReplaceUnaryOperator_Delete_{each}" for each in ("Not", "USub")),
    *(f"core/Replace{each}" for each in ("TrueWithFalse", "FalseWithTrue")),
    *(f"core/Replace{each}" for each in ("AndWithOr", "OrWithAnd")),
    *(f"core/Replace{each}" for each in ("BreakWithContinue", "ContinueWithBreak")),
    *(f"core/{each}" for each in ("AddNot", "NumberReplacer", "ZeroIterationForLoop")),
)
"""Those whose faults can be seen. An operator that turns the ``|`` of an annotation is not here."""


@dataclass(frozen=True)
class Part:
    """Files of the package, and the tests that have to find faults in them."""

    files: tuple[Path, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """A fault, and whether a test failed because of it."""

    fault: MutationSpec
    found: bool
    seconds: float

    def __str__(self) -> str:
        line, column = self.fault.start_pos
        place = f"{self.fault.module_path}:{line}:{column + 1}"
        what = self.fault.operator_name.removeprefix("core/")
        return f"{place}: {what} in {self.fault.definition_name}"


def parts() -> dict[str, Part]:
    """By name."""
    schedule = python_files("schedule")
    lowering = tuple(path for path in schedule if path.stem in LOWERING)
    generators = tuple(path for path in schedule if path.stem not in LOWERING)
    programs = ("tests/schedule", "tests/simulate")
    return {
        "planner": Part(python_files("planner"), ("tests/planner",)),
        "schedule": Part(generators, programs),
        "lowering": Part(lowering, programs),
        "simulate": Part(python_files("simulate"), ("tests/simulate", "tests/schedule")),
    }


def python_files(folder: str) -> tuple[Path, ...]:
    """Of the package, relative to the checkout."""
    found = sorted((CHECKOUT / "pipectl" / folder).rglob("*.py"))
    return tuple(path.relative_to(CHECKOUT) for path in found)


def faults_of(path: Path) -> Iterator[MutationSpec]:
    """Every fault that can be put into a file."""
    nodes = list(ast_nodes(get_ast_from_path(CHECKOUT / path)))
    for name in OPERATORS:
        operator = get_operator(name)()
        places = ((node, *place) for node in nodes for place in operator.mutation_positions(node))
        for occurrence, (node, start, end) in enumerate(places):
            function = ASTQuery(node).get_definition_name()
            yield MutationSpec(path, name, occurrence, start, end, {}, function)


class Copies:
    """Checkouts that are changed, one for each job that runs at a time."""

    def __init__(self, folder: Path, count: int) -> None:
        self._all = [copied(folder / str(index)) for index in range(count)]
        self._free: Queue[Path] = Queue()
        for copy in self._all:
            self._free.put(copy)

    def seconds(self, tests: Sequence[str], pool: ThreadPoolExecutor) -> float | None:
        """What the tests take in all copies at once, kernels compiled; None if any fails."""
        start = time.monotonic()
        passed = pool.map(lambda copy: tests_pass(copy, tests, 3600, None), self._all)
        return time.monotonic() - start if all(list(passed)) else None

    def try_fault(self, fault: MutationSpec, tests: Sequence[str], limit_s: float) -> Outcome:
        """Run the tests with it."""
        copy = self._free.get()
        try:
            start = time.monotonic()
            operator = get_operator(fault.operator_name)()
            with use_mutation(copy / fault.module_path, operator, fault.occurrence):
                files = likely_first(copy, tests, fault.module_path.stem)
                passed = tests_pass(copy, files, limit_s, fault.module_path)
            outcome = Outcome(fault, not passed, time.monotonic() - start)
            told = "found" if outcome.found else "missed"
            print(f"{told} in {outcome.seconds:.0f} s: {outcome}", file=sys.stderr, flush=True)
            return outcome
        finally:
            self._free.put(copy)


def copied(target: Path) -> Path:
    """The files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (CHECKOUT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, target / name)
    return target


def likely_first(copy: Path, tests: Sequence[str], name: str) -> list[str]:
    """The files of tests; those that speak of a module before the others."""
    files = sorted(path for folder in tests for path in (copy / folder).rglob("test_*.py"))
    word = re.compile(rf"\b{re.escape(name)}\b")
    files.sort(key=lambda path: not (name in path.name or word.search(path.read_text("utf-8"))))
    return [str(path.relative_to(copy)) for path in files]


def tests_pass(copy: Path, tests: Sequence[str], limit_s: float, changed: Path | None) -> bool:
    """Whether all do within a time; kernels are compiled anew where one has been changed."""
    kernels = copy.parent / f"{copy.name}-kernels"
    if changed is not None and "compiled" in (copy / changed).read_text():
        kernels = kernels.with_name(f"{copy.name}-other-kernels")
        shutil.rmtree(kernels, ignore_errors=True)
    variables = {"PYTHONPATH": str(copy), "NUMBA_CACHE_DIR": str(kernels)}
    options = ("-x", "-n0", "-p", "no:cacheprovider", "-m", f"not ({LEFT_OUT})")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=copy,
        env={**os.environ, **variables, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def measure(name: str, part: Part, count: int, seed: int, jobs: int) -> None:
    """Try a sample of a part's faults, and print how many were found and which were not."""
    every = [fault for path in part.files for fault in faults_of(path)]
    sample = random.Random(seed).sample(every, min(count, len(every)))
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(jobs) as pool:
        copies = Copies(Path(place), jobs)
        whole_s = copies.seconds(part.tests, pool)
        if whole_s is None:
            sys.exit(f"{name}: the tests fail without a fault")
        print(f"without a fault: {whole_s:.0f} s", file=sys.stderr, flush=True)
        limit_s = 60 + SLOWER * whole_s
        tried = [pool.submit(copies.try_fault, fault, part.tests, limit_s) for fault in sample]
        outcomes = [each.result() for each in tried]
    missed = [each for each in outcomes if not each.found]
    share = 1 - len(missed) / len(outcomes)
    print(f"\n### {name}: {share:.1%} of {len(outcomes)} found ({len(every)} possible)\n")
    for each in missed:
        print(f"- {each}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=100, help="tried in each part")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("parts", nargs="*", choices=[*parts(), []], help="all by default")
    given = parser.parse_args()
    for name in given.parts or parts():
        measure(name, parts()[name], given.faults, given.seed, given.jobs)


if __name__ == "__main__":
    main()
