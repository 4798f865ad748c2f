"""Runs benchmarks and writes what they print to ``docs/benchmarks.md``.

Every benchmark is a section, whose heading and introduction are the docstring of its program. It
says when and with what it was measured: sections can be measured one at a time, when the machine
has nothing else to do. One that fails keeps its old text, and this command then exits with 1; the
page is replaced as a whole after each section.

    python tests/benchmarks/write_page.py [SECTION ...]
"""

from __future__ import annotations

import ast
import datetime
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from pipectl.files import write_text
from pipectl.jobs.profiles import processor

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
PAGE = CHECKOUT / "docs" / "benchmarks.md"
SECTIONS = ("peer", "prediction", "memory", "staleness", "planner_cnns", "planner_scale")
REMARKS = "remarks"
"""The section that is written by hand, and kept: what single runs do not show."""
PACKAGES = ("torch", "mpi4py", "mpich", "numpy", "llvmlite")
_MARK = re.compile(r"^<!-- (\w+) -->\n(.*?)(?=^<!-- |\Z)", re.MULTILINE | re.DOTALL)
OPENING = """# Benchmarks

This page shows how fast pipectl trains compared with torch's pipelining, how exact its predictions
are, what its features cost, and how long it plans. [The page of claims](claims.md) compares plans
with those of other planners; that they reach the published optima, a test proves again
(`tests/planner/test_published_plans.py`).

Contenders take turns within one run. Figures are medians, with the lowest and the highest value in
parentheses; a ratio above 1x means faster. *Load* is the load average of the machine before the
section. Planning times are of one core, after import and compilation, without reading files. `make
bench` measures all sections and writes this page, in some hours; `make bench ONLY="peer memory"`
measures two of them.
"""


def program(name: str) -> Path:
    """That measures a section."""
    return HERE / f"{name}.py"


def measure(name: str) -> str | None:
    """A section's text; None if its program failed."""
    print(f"{program(name).name}", file=sys.stderr, flush=True)
    load, begun = os.getloadavg()[0], time.monotonic()
    command = [sys.executable, "-W", "ignore", str(program(name))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT)
    if done.returncode:
        print(f"failed, and printed:\n{done.stdout}", file=sys.stderr, flush=True)
        return None
    how = circumstances(load, (time.monotonic() - begun) / 60)
    title, text = introduction(program(name))
    return "\n\n".join((title, text, how, done.stdout.strip()))


def circumstances(load: float, minutes: float) -> str:
    """Of a measurement: when, on what, how busy that was before, and how long it took."""
    cores = f"{processor()} with {os.cpu_count()} cores"
    packages = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in PACKAGES)
    today = datetime.date.today().isoformat()
    before = f"load {load:.1f} before; took {max(1, round(minutes))} min"
    return f"*{today}, {cores}, Python {platform.python_version()}, {packages}; {before}.*"


def introduction(program: Path) -> tuple[str, str]:
    """Heading and text, from its docstring without the command line."""
    first, *rest = (ast.get_docstring(ast.parse(program.read_text())) or "").split("\n\n")
    paragraphs = (text.strip("\n") for text in rest if "python tests/benchmarks/" not in text)
    return f"## {first.rstrip('.')}", "\n\n".join(paragraphs)


def write(sections: dict[str, str]) -> None:
    """All sections there are."""
    names = [name for name in (*SECTIONS, REMARKS) if name in sections]
    marked = (f"<!-- {name} -->\n{sections[name].strip()}\n" for name in names)
    write_text(PAGE, "\n".join([OPENING, *marked]))


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        sys.exit(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    sections = dict(_MARK.findall(PAGE.read_text()))
    failed = []
    for name in names or SECTIONS:
        text = measure(name)
        if text is None:
            failed.append(name)
        else:
            sections[name] = text
            write(sections)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
