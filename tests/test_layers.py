"""The layer table: imports go down only, and slow or impure libraries stay where they belong."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest

from tests.docs.layers import (
    LAYER_OF,
    PACKAGE,
    Import,
    all_imports,
    imports_of,
    layer_table,
    stacked,
)

# Library to the parts of the package that may import it, even within a function.
ONLY_IN = {
    "torch": {"capture", "objects", "profiler", "runtime", "script", "torch_api"},
    "safetensors": {"capture", "profiler", "runtime", "script"},
    "mpi4py": {"runtime"},
    "llvmlite": {"compiled"},
    "typer": {"cli"},
    "rich": {"cli"},
    "subprocess": {"batch/process.py"},
    "multiprocessing": {"capture", "profiler", "runtime"},
}
PURE_LAYER = 2
PAGE = PACKAGE.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- layers: made by make golden -->\n", "<!-- end of layers -->\n"
CLOCKS = {"time", "datetime"}


def faults(imports: Iterable[Import]) -> list[str]:
    """Every import that the table forbids."""
    return [f"{found}: {why}" for found in imports for why in _why(found)]


def _why(found: Import) -> Iterator[str]:
    level, target = LAYER_OF.get(found.part, 0), found.target
    if target in LAYER_OF and LAYER_OF[target] > level:
        yield f"layer {level} may not import layer {LAYER_OF[target]}"
    if target in ONLY_IN["torch"] and level > 4 and found.at_module_level:
        yield "loads torch; import it where it is used"
    places = ONLY_IN.get(found.library)
    if places is not None and found.part not in places and found.file not in places:
        yield f"only {', '.join(sorted(places))} may"
    if level == PURE_LAYER and found.library in CLOCKS and found.part != "planner":
        yield "this layer has no clock"


def test_imports_go_down_and_libraries_stay_in_their_place():
    assert faults(all_imports()) == []


MODULES = """
import sys
import pipectl.cli, pipectl.jobs.prepare, pipectl.jobs.submit, pipectl.jobs.sweep
import pipectl.jobs.in_job, pipectl.jobs.profiles, pipectl.profiler.job
assert "mpi4py" not in sys.modules
import pipectl.runtime.worker
assert "llvmlite" not in sys.modules
"""


def test_what_measures_loads_no_mpi_and_neither_it_nor_a_rank_the_compiler_of_the_planner():
    """MPI takes a thread to start, and fails on some login nodes; what a measuring process holds
    counts as memory of a rank."""
    subprocess.run([sys.executable, "-c", MODULES], check=True)


def test_the_page_on_the_architecture_has_the_table(snapshot):
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    tail = rest.partition(END)[2]
    snapshot(PAGE, f"{head}{BEGIN}\n{layer_table()}\n\n{END}{tail}")


def test_no_parts_of_a_layer_import_each_other_in_a_circle():
    stacked()


def test_no_files_import_each_other_in_a_circle():
    """Imports within functions and those for type hints count, too."""
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    after: dict[str, set[str]] = {file: set() for file in files}
    for found in all_imports():
        target = "/".join(found.name.split(".")[1:])
        after[found.file] |= {f"{target}.py", f"{target}/__init__.py"} & files
    for _ in files:  # drop files that import none of those left, until only circles remain
        after = {file: {t for t in targets if after.get(t)} for file, targets in after.items()}
        importers = set().union(*after.values())
        after = {file: after[file] if file in importers else set() for file in after}
    assert {file: targets for file, targets in after.items() if targets} == {}


def test_no_rank_receives_by_a_matched_probe():
    """Some MPIs find messages with these that they then cannot receive; `recv` uses them, too."""
    sources = {path.name: path.read_text("utf-8") for path in (PACKAGE / "runtime").rglob("*.py")}
    matched = re.compile(r"\.(im|m|Im|M)probe\(|\.i?recv\(")
    assert not [name for name, text in sources.items() if matched.search(text)]


HASHES = {"capture/python_state.py", "schedule/actions.py"}
"""Where the hash of an object never leaves the process."""


def test_no_file_hashes_what_may_meet_another_process():
    """``hash`` of equal values differs from process to process, also of None and of a range."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    calls = {
        name
        for name, path in files.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hash"
    }
    assert calls <= HASHES, "take a digest of hashlib"


def test_every_part_of_the_package_has_a_layer():
    parts = {path.stem for path in PACKAGE.glob("*.py")}
    parts |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert parts == set(LAYER_OF)


def test_layer_2_reads_the_clock_only_for_the_planning_time():
    found = [i for i in all_imports() if LAYER_OF.get(i.part) == PURE_LAYER and i.library == "time"]
    assert len({i.file for i in found}) <= 1, "one file measures planning_s"


@pytest.mark.parametrize(
    ("file", "source", "why"),
    [
        (
            "plan.py",
            "import torch",
            "only capture, objects, profiler, runtime, script, torch_api may",
        ),
        (
            "plan.py",
            "def f():\n    import torch.nn",
            "only capture, objects, profiler, runtime, script, torch_api may",
        ),
        ("units.py", "from pipectl.plan import Plan", "layer 0 may not import layer 1"),
        ("units.py", "from pipectl import plan", "layer 0 may not import layer 1"),
        ("schedule/x.py", "def f():\n    import pipectl.runs", "layer 2 may not import layer 3"),
        ("simulate/x.py", "from time import sleep", "this layer has no clock"),
        ("batch/slurm.py", "import subprocess", "only batch/process.py may"),
        ("runs/find.py", "from rich.text import Text", "only cli may"),
        ("jobs/x.py", "import pipectl.runtime.worker", "import it where it is used"),
    ],
)
def test_a_forbidden_import_is_found(file, source, why):
    found = faults(list(imports_of(source, file)))
    assert len(found) == 1
    assert why in found[0]
