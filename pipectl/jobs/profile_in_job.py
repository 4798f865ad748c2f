"""A job that measures a model, and nothing else.

Started as ``python -m pipectl.jobs.profile_in_job RUN_DIRECTORY --output FILE``. It reports what it
does in the same way as :mod:`pipectl.jobs.prepare`. It loads no more than a rank does, since the
memory of the process is part of the profile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipectl.files import write_json
from pipectl.jobs.profiles import MeasureOptions, measure
from pipectl.jobs.reporting import Heartbeat, report_failure
from pipectl.runs import RunDirectory
from pipectl.spec import load

PERCENT = 100
"""Steps of such a run: it reports its progress in percent."""


def main(arguments: Sequence[str]) -> int:
    """Measure the model of one run; the exit code is the one that commands have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--again", action="store_true")
    values = parser.parse_args(arguments)
    run = RunDirectory(values.run)
    options = MeasureOptions(values.effort, values.again)
    return report_failure(run, lambda: _measure(run, values.output, options))


def _measure(run: RunDirectory, output: Path, options: MeasureOptions) -> None:
    spec = load(run.job)
    heartbeat = Heartbeat(run, PERCENT, measuring_only=True)
    heartbeat.beat("capturing")
    measurement = measure(spec, run.profile, heartbeat.profiling, options, base=run.path.parent)
    write_json(run.measurement, measurement.to_json())
    measurement.profile.save(output)
    heartbeat.beat("profiled", PERCENT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
