"""The body that the job scripts of all batch systems share, as a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pipectl.batch.protocol import JobRequest
from pipectl.batch.quoting import checked, shell_command, shell_word, variable_name
from pipectl.batch.template import AFTER_FRAME, BEFORE_BODY
from pipectl.runs import ATTEMPT, RUN_VARIABLE, VARIABLES

CHECKPOINTED = 75
"""Exit code of a script whose ranks stopped at a checkpoint before they were done."""

_FRAME = f"""\
# The exit code is written whole, whatever ends the script.
rm -f "${RUN_VARIABLE}"/{{exit_code,stop,stopped}}
finish() {{
    local code=$?
    (umask 077 && echo "$code" >"${RUN_VARIABLE}/exit_code.tmp") &&
        mv -f "${RUN_VARIABLE}/exit_code.tmp" "${RUN_VARIABLE}/exit_code"
}}
trap finish EXIT

# Which start of the job this is.
attempt=0
[[ -r "${RUN_VARIABLE}/attempt" ]] && read -r attempt <"${RUN_VARIABLE}/attempt"
[[ $attempt =~ ^[0-9]{{1,9}}$ ]] || attempt=0
attempt=$((10#$attempt + 1))
(umask 077 && echo "$attempt" >"${RUN_VARIABLE}/attempt.tmp") &&
    mv -f "${RUN_VARIABLE}/attempt.tmp" "${RUN_VARIABLE}/attempt"
export {ATTEMPT}=$attempt
if ((attempt > 1)); then # what earlier starts reported is out of the way, not lost
    before="${RUN_VARIABLE}/errors/attempt-$((attempt - 1))"
    (umask 077 && mkdir -p "$before") && mv -f "${RUN_VARIABLE}"/errors/*.json "$before" 2>/dev/null
fi

# Signals go on to the running command; bash sees them only while it waits, so every command
# runs in the background, and 'wait' is repeated after a signal. Should a command end in the very
# moment of a signal, bash loses its exit code (wait gives -1): then the signal's code counts.
child=
interrupted=
forward() {{
    interrupted=$2
    if [[ -n $child ]]; then
        kill -s "$1" "$child" 2>/dev/null
    elif [[ $1 == TERM || $1 == INT ]]; then
        exit "$2"
    fi
}}
trap 'forward TERM 143' TERM
trap 'forward INT 130' INT
trap 'forward USR1 138' USR1
trap 'forward USR2 140' USR2
run() {{
    local code signalled=1
    "$@" &
    child=$!
    while :; do
        interrupted=
        wait "$child"
        code=$?
        [[ -z $interrupted ]] && break
        signalled=$interrupted
    done
    child=
    ((code >= 0)) || code=$signalled
    return "$code"
}}"""


def render_body(
    request: JobRequest,
    launch: Sequence[str],
    *,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
    again: Iterable[str] = (),
) -> str:
    """Everything below the scheduler's directives.

    Args:
        launch: the command that starts all ranks.
        before: shell lines of the batch system, run just before the launch.
        after: and just behind it, where ranks can be stopped.
        again: shell lines of the batch system, run when ranks stopped before they were done.

    Raises:
        InvalidInputError: a value that cannot be written into a script.
    """
    blocks = [
        *((BEFORE_BODY,) if request.template else ()),
        "\n".join(_enter(request)),
        _FRAME,
        *((AFTER_FRAME,) if request.template else ()),
        *_stop(request),
        *_environment(request),
        "\n".join(_exports(request)),
        *_variables(request),
        *(
            f'{_run(request, request.within(words), "prepare")} || exit "$?"'
            for words in request.prepare
        ),
        "\n".join((*before, _run(request, launch), *_end(request, after, again))),
    ]
    return "\n\n".join(blocks) + "\n"


def render_variables(request: JobRequest) -> str:
    """The file from which the script reads the job's variables: they may be keys and tokens.

    Raises:
        InvalidInputError: a name or value that bash cannot export.
    """
    return "".join(
        f"export {name}={shell_word(value, f'environment.variables.{variable_name(name)}')}\n"
        for name, value in request.variables.items()
    )


def _prepare(request: JobRequest, words: tuple[str, ...]) -> str:
    return f'{_run(request, request.within(words), "prepare")} || exit "$?"'


def _run(request: JobRequest, words: Sequence[str], what: str = "launch") -> str:
    within = "with_variables " if request.variables else ""
    return f"run {within}{shell_command(words, what)}"


def _variables(request: JobRequest) -> Iterator[str]:
    """In the process of what is run alone: none of them is one of this script's own."""
    render_variables(request)  # refused before there is a run
    if request.variables:
        yield (
            f"# environment.variables ({', '.join(request.variables)}) are in a file for its owner "
            "alone.\n"
            "with_variables() {\n"
            f'    source "${RUN_VARIABLE}/{VARIABLES}" || exit 1\n'
            '    exec "$@"\n'
            "}"
        )


def _stop(request: JobRequest) -> Iterator[str]:
    if request.stop is not None:
        signal = request.stop.signal
        yield (
            "# Ranks that find this file save a checkpoint and end; the signal itself would end\n"
            "# launchers that do not know it.\n"
            f"trap '(umask 077 && : >\"${RUN_VARIABLE}/stop\"); interrupted=1' {signal}"
        )


def _end(request: JobRequest, after: Sequence[str], again: Iterable[str]) -> Iterator[str]:
    """The script's end, behind the launch."""
    if request.stop is None:
        yield 'exit "$?"'
        return
    yield "code=$?"
    yield from after
    yield f'if ((code == 0)) && [[ -e "${RUN_VARIABLE}/stopped" ]]; then'
    yield f"    code={CHECKPOINTED}"
    yield from (f"    {line}" for line in again)
    yield "fi"
    yield 'exit "$code"'


def _enter(request: JobRequest) -> Iterator[str]:
    directory = shell_word(str(request.run_directory), "output.directory")
    yield "set -uo pipefail"
    yield f"export {RUN_VARIABLE}={directory}"
    yield f'cd "${RUN_VARIABLE}" || exit 1'


def _environment(request: JobRequest) -> Iterator[str]:
    """Modules and the user's own lines; neither is expected to survive ``set -u``.

    What traps they set for commands that fail or begin would end or disturb what follows.
    """
    if not (request.modules or request.setup):
        return
    lines = ["set +u"]
    if request.modules:
        lines.append("type module >/dev/null 2>&1 || source /etc/profile")
        modules = shell_command(request.modules, "environment.modules")
        lines.append(f"module load {modules} || exit 1")
    if request.setup:
        lines.append("# environment.setup, verbatim:")
        lines.extend(_setup_lines(request))
    lines.append(
        f'trap - ERR DEBUG RETURN\nset +e\nset -uo pipefail\ncd "${RUN_VARIABLE}" || exit 1'
    )
    yield "\n".join(lines)


def _setup_lines(request: JobRequest) -> Iterator[str]:
    """Shell by design: only what would break the script as a file is refused."""
    for text in request.setup:
        for line in text.split("\n"):
            checked(line.replace("\t", ""), "environment.setup")
            yield line


def _exports(request: JobRequest) -> Iterator[str]:
    threads = str(request.threads)
    yield f"export OMP_NUM_THREADS={threads}"
    yield f"export MKL_NUM_THREADS={threads}"
    yield "export PYTHONUNBUFFERED=1"
