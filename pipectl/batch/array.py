"""The script of a job array, whose jobs go on as the scripts of their own runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipectl.batch.protocol import Array
from pipectl.batch.quoting import shell_command, shell_word


def render_array(array: Array, index: str, bash: Sequence[str]) -> str:
    """What follows the directives.

    The run's own script takes the place of this one in the same process, so that signals, the exit
    code and what the script does at its end are those of a run on its own. The directives cannot
    know where the run's log is: what fails before that is in the log of the array.

    Args:
        index: the variable in which the batch system gives the place in the array, from 0.
        bash: what runs the scripts of the runs.

    Raises:
        InvalidInputError: a directory that cannot be written into a script.
    """
    return "\n".join(_lines(array, index, bash)) + "\n"


def _lines(array: Array, index: str, bash: Sequence[str]) -> Iterator[str]:
    yield "set -uo pipefail"
    yield "runs=("
    for run in array.runs:
        yield f"    {shell_word(str(run), 'output.directory')}"
    yield ")"
    yield f"run=${{runs[${index}]}}"
    yield 'exec >>"$run/logs/job.log" 2>&1'
    yield f'exec {shell_command(bash, "launch.template")} "$run/job.sh"'
