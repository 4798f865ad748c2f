"""Measuring a job's model in a process of its own, for programs that stay: scripts and notebooks.

Their threads, memory and modules would falsify times and peaks, code that they have imported once
would never be read again, and Python hashes texts by the seed that they were started with. A
command needs none of this, since it is such a process itself.

The process reads the job and the code from a private directory, and leaves the profile or a report
of its failure there. It tells its progress on standard output; what the user's code prints goes to
standard error, which is shown if the process ends without either.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipectl.batch import process
from pipectl.errors import PipectlError, UsageError
from pipectl.faults import ErrorReport
from pipectl.fields import read_value
from pipectl.files import read_json, write_json, write_text
from pipectl.hash_seed import seed_variables
from pipectl.jobs.profiles import measure
from pipectl.profile import Profile
from pipectl.runs import RUN_VARIABLE
from pipectl.spec import JobSpec, dump, load
from pipectl.spec.code import Snapshot, active, using
from pipectl.units import Report

MEASURING = "PIPECTL_MEASURING"
"""Environment variable of such a process and of those that it starts."""
_JOB, _CODE, _PROFILE, _ERROR = "job.yaml", "code.json", "profile.json", "error.json"
_PATIENCE_S = 10.0
_PRIVATE = 0o600


def measure_apart(
    spec: JobSpec,
    path: Path | None = None,
    progress: Report | None = None,
    effort: str | None = None,
    *,
    again: bool = False,
) -> Profile:
    """As :func:`pipectl.jobs.profiles.measure`, in a process of its own.

    Raises:
        PipectlError: as that function; or the process has ended by itself.
        KeyboardInterrupt: the user interrupted it; finished measurements are kept.
    """

    def tell(line: str) -> None:
        if progress is not None:
            progress(*json.loads(line))

    variables = {**seed_variables(spec.environment.variables), MEASURING: "1"}
    try:
        with tempfile.TemporaryDirectory(prefix="pipectl-measure-") as name:
            folder = Path(name)
            write_text(folder / _JOB, dump(spec), mode=_PRIVATE)
            write_json(folder / _CODE, _to_json(active() or Snapshot()))
            place = "" if path is None else str(path.absolute())
            words = [str(Path.cwd()), place, effort or "", "again" if again else ""]
            ended = process.run_with_progress(
                [sys.executable, "-m", __name__, *words],
                tell,
                directory=folder,  # Python searches it for modules: no file of the user is there
                env={**os.environ, **process.search_path(), **variables},
                patience_s=_PATIENCE_S,
            )
            if (folder / _ERROR).exists():
                document = read_json(folder / _ERROR, hint="")
                raise read_value(ErrorReport, document).to_error()
            if ended.returncode:
                raise PipectlError(
                    f"the process that measures the model has ended: {ended.message}",
                    hint="see what it says alone: pipectl profile JOB.yaml",
                )
            return Profile.load(folder / _PROFILE)
    except OSError as error:
        raise UsageError(
            f"no process can be started to measure the model: {error}",
            hint="is there room in the directory of temporary files (TMPDIR)?",
        ) from error


def is_in_job() -> bool:
    """Whether this process belongs to a job, or measures one: it may run the user's files."""
    return MEASURING in os.environ or RUN_VARIABLE in os.environ


def _to_json(code: Snapshot) -> dict[str, Any]:
    return {
        "contents": {str(p): b64encode(text).decode() for p, text in code.contents.items()},
        "names": {name: list(map(str, files)) for name, files in code.names.items()},
        "searched": sorted(map(str, code.searched)),
    }


def _from_json(document: dict[str, Any]) -> Snapshot:
    return Snapshot(
        {Path(p): b64decode(text) for p, text in document["contents"].items()},
        {name: tuple(map(Path, files)) for name, files in document["names"].items()},
        frozenset(map(Path, document["searched"])),
    )


def main(arguments: Sequence[str]) -> int:
    """Measure a job whose files are in the working directory.

    Args:
        arguments: the user's working directory, file for the profile, effort, and ``again``; all
            but the first may be empty.

    Returns:
        The exit code: not 0 if there is a report of a failure.
    """
    here, (directory, path, effort, again) = Path.cwd(), arguments
    os.chdir(directory)
    sys.path[:] = [entry for entry in sys.path if entry not in ("", str(here))]
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the user's code prints is no progress

    def report(done: int, total: int, what: str) -> None:
        told.write(json.dumps([done, total, what]) + "\n")
        told.flush()

    try:
        with using(_from_json(read_json(here / _CODE, hint=""))):
            file = Path(path) if path else None
            profile = measure(load(here / _JOB), file, report, effort or None, again=bool(again))
        profile.save(here / _PROFILE)
    except Exception as error:
        ErrorReport.of(error).save(here / _ERROR)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
