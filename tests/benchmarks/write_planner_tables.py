"""Runs every planner benchmark and writes their tables to docs/planner-benchmarks.md.

Each ``planner_*.py`` beside this file prints one section in markdown. A section that fails keeps
its old text, and this command then exits with 1; the page is replaced as a whole at the end.

Usage: python tests/benchmarks/write_planner_tables.py [SECTION ...]    (e.g. optimality)
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from pipectl.files import write_text

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "planner-benchmarks.md"
SECTIONS = (*("optimality", "dapple", "cnns", "piper", "heterogeneous", "scale", "simulator"),)
_MARK = re.compile(r"^<!-- (\w+) -->\n(.*?)(?=^<!-- |\Z)", re.MULTILINE | re.DOTALL)


def header() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "numba"))
    return f"""# Planner benchmarks

Written by `make bench-planner`. Planning times are of one core, after import and compilation, and
without reading files; {_processor()}, Python {platform.python_version()}, {packages}. Workloads of
other planners are third-party data outside this repository, found through `PIPECTL_WORKLOADS`.
"""


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return f"{found[1] if found else platform.machine()} with {os.cpu_count()} cores"


def main() -> int:
    sections = dict(_MARK.findall(PAGE.read_text())) if PAGE.exists() else {}
    failed = []
    for name in sys.argv[1:] or SECTIONS:
        print(f"planner_{name}.py", file=sys.stderr, flush=True)
        command = [sys.executable, str(HERE / f"planner_{name}.py")]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode == 0:
            sections[name] = done.stdout
        else:
            failed.append(name)
    parts = [
        header(),
        *(f"<!-- {n} -->\n{sections[n].strip()}\n" for n in SECTIONS if n in sections),
    ]
    write_text(PAGE, "\n".join(parts))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
