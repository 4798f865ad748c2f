"""Runs benchmarks and writes what they print to the page of the documentation that shows it.

Every benchmark is a section, whose heading and introduction are the docstring of its program. It
says when and with what it was measured: sections can be measured one at a time, when the machine
has nothing else to do. One that fails keeps its old text, and this command then exits with 1; the
page is replaced as a whole after each section.

    python tests/benchmarks/write_page.py run [SECTION ...]         docs/benchmarks.md
    python tests/benchmarks/write_page.py planner [SECTION ...]     docs/planner-benchmarks.md
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
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pipectl.files import write_text
from pipectl.jobs.profiles import processor

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
REMARKS = "remarks"
"""The section that is written by hand, and kept: what single runs do not show."""
_MARK = re.compile(r"^<!-- (\w+) -->\n(.*?)(?=^<!-- |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Page:
    """A page and its sections.

    Args:
        path: of the page, in ``docs/``.
        prefix: of the programs' names.
        sections: in the order of the page.
        packages: whose versions count.
        opening: how the page begins.
    """

    path: Path
    prefix: str
    sections: tuple[str, ...]
    packages: tuple[str, ...]
    opening: str

    def program(self, name: str) -> Path:
        """That measures a section."""
        return HERE / f"{self.prefix}{name}.py"


RUN = Page(
    CHECKOUT / "docs" / "benchmarks.md",
    "",
    ("peer", "prediction", "rehearsal", "offload", "staleness", "compiled"),
    ("torch", "mpi4py", "mpich"),
    """# Benchmarks

This page shows how fast pipectl trains compared with torch's pipelining, how exact its predictions
are, and what its features cost. The planner is on [a page of its own](planner-benchmarks.md).

Contenders take turns within one run. Figures are medians, with the lowest and the highest value in
parentheses; a ratio above 1x means faster. *Load* is the load average of the machine before the
section. `make bench` measures all sections and writes this page, in some hours; `make bench
ONLY="peer offload"` measures two of them.
""",
)
PLANNER = Page(
    CHECKOUT / "docs" / "planner-benchmarks.md",
    "planner_",
    ("optimality", "cnns", "scale"),
    ("numpy", "llvmlite"),
    """# Planner benchmarks

This page shows how good the planner's plans are, compared with published optima and with bounds,
and how long planning takes; [the page of claims](claims.md) compares plans with those of other
planners. `make bench-planner` measures all sections and writes this page. Planning times are of one
core, after import and compilation, without reading files. The workloads of other planners are
third-party data outside this repository (`PIPECTL_WORKLOADS`).
""",
)
PAGES = {"run": RUN, "planner": PLANNER}


def measure(page: Page, name: str) -> str | None:
    """A section's text; None if its program failed."""
    print(f"{page.program(name).name}", file=sys.stderr, flush=True)
    load, begun = os.getloadavg()[0], time.monotonic()
    command = [sys.executable, "-W", "ignore", str(page.program(name))]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of the mpiexec beside it
    variables = {**os.environ, "PATH": path}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT, env=variables)
    if done.returncode:
        print(f"failed, and printed:\n{done.stdout}", file=sys.stderr, flush=True)
        return None
    printed = as_markdown(done.stdout)
    how = circumstances(page, load, (time.monotonic() - begun) / 60)
    title, text = introduction(page.program(name))
    rest = "\n".join(line for line in printed.splitlines() if not line.startswith("## "))
    return "\n\n".join(filter(None, (title, text, how, rest.strip())))


def circumstances(page: Page, load: float, minutes: float) -> str:
    """Of a measurement: when, on what, how busy that was before, and how long it took."""
    cores = f"{processor()} with {os.cpu_count()} cores"
    packages = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in page.packages)
    today = datetime.date.today().isoformat()
    before = f"load {load:.1f} before; took {max(1, round(minutes))} min"
    return f"*{today}, {cores}, Python {platform.python_version()}, {packages}; {before}.*"


def introduction(program: Path) -> tuple[str, str]:
    """Heading and text, from its docstring without the command line."""
    first, *rest = (ast.get_docstring(ast.parse(program.read_text())) or "").split("\n\n")
    paragraphs = (text.strip("\n") for text in rest if "python tests/benchmarks/" not in text)
    return f"## {first.rstrip('.')}", "\n\n".join(paragraphs)


def as_markdown(printed: str) -> str:
    """Text without a table is shown as it is."""
    lines = printed.strip("\n").splitlines()
    if not any(line.startswith("|") for line in lines):
        return "\n".join(("```text", *lines, "```"))
    return "\n".join(lines)


def write(page: Page, sections: dict[str, str]) -> None:
    """All sections there are."""
    names = [name for name in (*page.sections, REMARKS) if name in sections]
    marked = (f"<!-- {name} -->\n{sections[name].strip()}\n" for name in names)
    write_text(page.path, "\n".join([page.opening, *marked]))


def main(page: Page, names: list[str]) -> int:
    unknown = [name for name in names if name not in page.sections]
    if unknown:
        sys.exit(f"no section {', '.join(unknown)}; there are {', '.join(page.sections)}")
    sections = dict(_MARK.findall(page.path.read_text())) if page.path.exists() else {}
    failed = []
    for name in names or page.sections:
        text = measure(page, name)
        if text is None:
            failed.append(name)
        else:
            sections[name] = text
            write(page, sections)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] not in [[name] for name in PAGES]:
        sys.exit(__doc__)
    sys.exit(main(PAGES[sys.argv[1]], sys.argv[2:]))
