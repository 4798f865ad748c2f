"""The body that the job scripts of all batch systems share, as a pure function."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pipectl.batch.protocol import JobRequest
from pipectl.batch.quoting import checked, shell_command, shell_word, variable_name
from pipectl.batch.template import AFTER_FRAME, BEFORE_BODY
from pipectl.runs import ATTEMPT, REQUEUE_ERROR, RUN_VARIABLE, VARIABLES

CHECKPOINTED = 75
"""Exit code of a script whose ranks stopped at a checkpoint before they were done."""

_FRAME = f"""\
# The exit code is written whole, whatever ends the script.
rm -f "${RUN_VARIABLE}"/{{exit_code,stop,stopped,{REQUEUE_ERROR}}}
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
    rm -f "${RUN_VARIABLE}"/errors/*.json # they would count as failures of this start
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
    "$@" &
    child=$!
    await
}}
await() {{
    local code signalled=1
    while :; do
        interrupted=
        wait "$child"
        code=$?
        [[ -z $interrupted ]] && break
        signalled=$interrupted
    done
    child=
    if ((code < 0)); then
        code=$signalled
        [[ -e "${RUN_VARIABLE}/stopped" ]] && code=0 # ranks that stop at a checkpoint end well
    fi
    return "$code"
}}

# Launchers do not survive all signals that ranks do. One may wait for ever for a node that does not
# answer: it is killed some time after a rank has failed.
shielded=
tick_s=5
patience=12
run_ranks() {{
    local code guard
    (
        [[ $shielded ]] && trap '' USR1 USR2
        with_variables "$@"
    ) &
    child=$!
    guard "$child" &
    guard=$!
    disown "$guard"
    await
    code=$?
    kill -s KILL "$guard" 2>/dev/null
    return "$code"
}}
guard() {{
    trap '' TERM INT USR1 USR2
    trap - EXIT
    while ((patience > 0)); do
        read -rt "$tick_s" <> <(:)
        kill -s 0 "$1" 2>/dev/null || return
        compgen -G "${RUN_VARIABLE}/errors/rank-*.json" >/dev/null && ((patience--))
    done
    kill -s 0 "$1" 2>/dev/null || return
    echo "pipectl: a rank failed, and the launcher has not ended: it is killed" >&2
    kill -s KILL "$1" 2>/dev/null # last: the script, once its launcher is gone, ends this guard
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
        after: and just after it, if ranks can be stopped.
        again: shell lines of the batch system that have the job started again, run when ranks
            stopped before they were done, if it may.

    Raises:
        InvalidInputError: a value that cannot be written into a script.
    """
    start = "run with_variables" if request.alone else "run_ranks"
    words = shell_command(launch, "launch")
    blocks = [
        *((BEFORE_BODY,) if request.template else ()),
        "\n".join(_enter(request)),
        _FRAME,
        *((AFTER_FRAME,) if request.template else ()),
        *_stop(request),
        *_environment(request),
        "\n".join(_exports(request)),
        *_variables(request),
        *(_prepare(request.within(words)) for words in request.prepare),
        "\n".join((*before, *_traps(request), f"{start} {words}", *_end(request, after, again))),
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


def _prepare(words: tuple[str, ...]) -> str:
    return f'run with_variables {shell_command(words, "prepare")} || exit "$?"'


def _variables(request: JobRequest) -> Iterator[str]:
    """In the process of what is run alone: none of them is one of this script's own."""
    render_variables(request)  # refused before there is a run
    names = ", ".join(request.variables)
    lines = [f"# environment.variables ({names}) are in a file for its owner alone."] * bool(names)
    lines.append("with_variables() {")
    if names:
        lines.append(f'    source "${RUN_VARIABLE}/{VARIABLES}" || exit 1')
    yield "\n".join([*lines, '    exec "$@"', "}"])


def _stop(request: JobRequest) -> Iterator[str]:
    if request.stop is not None:
        yield (
            "# Ranks that find this file save a checkpoint and end. A signal that is named in it\n"
            "# ends the job for good.\n"
            "ask_to_stop() {\n"
            f'    (umask 077 && printf %s "${{1-}}" >>"${RUN_VARIABLE}/stop")\n'
            "    interrupted=1\n"
            "}\n"
            f"trap ask_to_stop {request.stop.signal}"
        )


def _traps(request: JobRequest) -> Iterator[str]:
    """The signals from the launch on: TERM would end launchers, and the ranks with them."""
    if request.stop is not None:
        yield "trap 'ask_to_stop TERM' TERM"
        yield "trap 'ask_to_stop INT' INT"
        yield "trap ask_to_stop USR1 USR2"
        yield "shielded=1"


def _end(request: JobRequest, after: Sequence[str], again: Iterable[str]) -> Iterator[str]:
    """The script's end, after the launch."""
    if request.stop is None:
        yield 'exit "$?"'
        return
    yield "code=$?"
    yield from after
    yield f'if ((code == 0)) && [[ -e "${RUN_VARIABLE}/stopped" ]]; then'
    yield f"    code={CHECKPOINTED}"
    if request.stop.requeues and (commands := list(again)):
        wanted = f'[[ ! -s "${RUN_VARIABLE}/stop" ]]'
        yield f"    if ((attempt <= {request.stop.requeues})) && {wanted}; then"
        yield from (f"        {line}" for line in commands)
        yield "    fi"
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
