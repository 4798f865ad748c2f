"""A job that measures a model, and nothing else.

Started as ``python -m pipectl.jobs.profile_in_job RUN_DIRECTORY --output FILE``. It tells what it
does in the same way as :mod:`pipectl.jobs.prepare`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipectl.files import write_json
from pipectl.jobs.measuring_run import PERCENT
from pipectl.jobs.profile import Wish, measure
from pipectl.jobs.reporting import Heartbeat, reporting_failure
from pipectl.runs import RunDirectory
from pipectl.spec import load


def arguments_for(run: RunDirectory, output: Path, wish: Wish) -> tuple[str, ...]:
    """The command's arguments.

    Args:
        output: where the finished profile goes, besides the run directory.
    """
    kind = () if wish.device_kind is None else ("--device-kind", wish.device_kind)
    again = ("--again",) if wish.again else ()
    where = (str(run.path), "--output", str(output.absolute()))
    return (*where, "--effort", wish.effort, *kind, *again)


def main(arguments: Sequence[str]) -> int:
    """Measure for one run; the exit code is the one that commands have."""
    given = _parser().parse_args(arguments)
    run = RunDirectory(given.run)
    wish = Wish(given.effort, given.device_kind, given.again)
    return reporting_failure(run, lambda: _measure(run, given.output, wish))


def _measure(run: RunDirectory, output: Path, wish: Wish) -> None:
    spec = load(run.job)
    heartbeat = Heartbeat(run, PERCENT, measuring_only=True)
    heartbeat.beat("capturing")
    found = measure(spec, run.profile, heartbeat.profiling, wish, base=run.path.parent)
    write_json(run.measurement, found.to_json())
    found.profile.save(output)
    heartbeat.beat("profiled", PERCENT)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--device-kind")
    parser.add_argument("--again", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
