"""Which share of lines and branches the tests have run, for the pure layers and for the others.

Reads what ``make coverage`` has gathered, prints every file below the goal, and exits with 1 if
layers 0 to 3 or the others are below theirs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coverage import Coverage
from docs.layers import LAYER_OF, PACKAGE

PURE = 3
"""The last of the layers that neither torch nor MPI is needed for."""
GOALS = {"layers 0 to 3": 95, "layers 4 to 6": 85}


@dataclass(frozen=True)
class Taken:
    """Of so many lines and branches, so many were run."""

    lines: int
    branches: int
    all_lines: int
    all_branches: int

    def reaches(self, percent: float) -> bool:
        """Whether both shares do."""
        enough_lines = 100 * self.lines >= percent * self.all_lines
        return enough_lines and 100 * self.branches >= percent * self.all_branches

    def __str__(self) -> str:
        lines, branches = self.lines, self.branches
        return (
            f"branches {branches / max(1, self.all_branches):.1%} of {self.all_branches}, "
            f"lines {lines / max(1, self.all_lines):.1%} of {self.all_lines}"
        )


def measured() -> dict[Path, Taken]:
    """By file of the package."""
    with tempfile.NamedTemporaryFile() as report:
        gathered = Coverage(config_file=str(PACKAGE.parent / "pyproject.toml"))
        gathered.load()
        gathered.json_report(outfile=report.name)
        files = json.loads(Path(report.name).read_text())["files"]
    return {
        Path(name).resolve().relative_to(PACKAGE): Taken(
            found["covered_lines"],
            found["covered_branches"],
            found["num_statements"],
            found["num_branches"],
        )
        for name, found in ((name, each["summary"]) for name, each in files.items())
    }


def total(each: Iterable[Taken]) -> Taken:
    rows = [(one.lines, one.branches, one.all_lines, one.all_branches) for one in each]
    return Taken(*map(sum, zip(*rows, strict=True)))


def group_of(file: Path) -> str:
    part = file.parts[0].removesuffix(".py")
    return list(GOALS)[LAYER_OF.get(part, 0) > PURE]


def main() -> int:
    files = measured()
    for file, taken in sorted(files.items()):
        if not taken.reaches(GOALS[group_of(file)]):
            print(f"{file}: {taken}")
    totals = {
        name: total(taken for file, taken in files.items() if group_of(file) == name)
        for name in GOALS
    }
    for name, taken in totals.items():
        print(f"{name}: {taken} (goal {GOALS[name]} %)")
    return int(not all(taken.reaches(GOALS[name]) for name, taken in totals.items()))


if __name__ == "__main__":
    sys.exit(main())
