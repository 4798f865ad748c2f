#!/bin/bash
# The job is found by its argument, the tag.
set --
set -uo pipefail
export PIPECTL_RUN_DIRECTORY=/scratch/u/runs/20261120-152233-gpt-small
cd "$PIPECTL_RUN_DIRECTORY" || exit 1

# Files are written whole, for their owner alone: the exit code too, whatever ends the script.
write_file() {
    (umask 077 && echo "$2" >"$PIPECTL_RUN_DIRECTORY/$1.tmp") &&
        mv -f "$PIPECTL_RUN_DIRECTORY/$1.tmp" "$PIPECTL_RUN_DIRECTORY/$1"
}
rm -f "$PIPECTL_RUN_DIRECTORY"/{exit_code,stop,stopped,requeue_error}
finish() {
    local code=$?
    write_file exit_code "$code"
}
trap finish EXIT
trap 'exit 143' TERM # without traps, the code of the last command would be written
trap 'exit 130' INT

# Which start of the job this is.
attempt=0
[[ -r "$PIPECTL_RUN_DIRECTORY/attempt" ]] && read -r attempt <"$PIPECTL_RUN_DIRECTORY/attempt"
[[ $attempt =~ ^[0-9]{1,9}$ ]] || attempt=0
attempt=$((10#$attempt + 1))
write_file attempt "$attempt"
export PIPECTL_ATTEMPT=$attempt
if ((attempt > 1)); then # what earlier starts reported is out of the way, not lost
    before="$PIPECTL_RUN_DIRECTORY/errors/attempt-$((attempt - 1))"
    (umask 077 && mkdir -p "$before") && mv -f "$PIPECTL_RUN_DIRECTORY"/errors/*.json "$before" 2>/dev/null
    rm -f "$PIPECTL_RUN_DIRECTORY"/errors/*.json # they would count as failures of this start
fi

# Signals are passed on to the running command. Bash sees them only while it waits, so every
# command runs in the background, and 'wait' is repeated while it runs, after one or more signals.
# If a command ends in the very moment of a signal, bash may lose its exit code, and waits until it
# has no other process either (wait then gives -1, or 127): those are killed, and the signal's code
# counts.
child=
helpers=() # processes beside it
signal_code= # of the command, if bash loses its own: of the last signal, 1 if that asks to stop
forward() {
    signal_code=$2
    if [[ -n $child ]]; then
        kill -s "$1" "$child" 2>/dev/null
    elif [[ $1 == TERM || $1 == INT ]]; then
        exit "$2"
    fi
}
set_traps() {
    trap finish EXIT
    trap 'forward TERM 143' TERM
    trap 'forward INT 130' INT
    trap 'forward USR1 138' USR1
    trap 'forward USR2 140' USR2
}
set_traps
run() {
    "$@" &
    child=$!
    await
}
await() {
    local code last # the code is negative if it is lost
    signal_code=
    while :; do
        wait "$child"
        code=$?
        kill -s 0 "$child" 2>/dev/null || break
    done
    if ((code > 128)); then # of the command, or of a signal
        kill -s KILL "${helpers[@]-}" 2>/dev/null
        wait "$child"
        last=$?
        if ((last != 127)); then
            code=$last
        elif [[ $signal_code ]]; then
            code=-1
        fi
    fi
    child=
    if ((code < 0)); then
        code=${signal_code:-1}
        [[ -e "$PIPECTL_RUN_DIRECTORY/stopped" ]] && code=0 # ranks that stop at a checkpoint end well
    fi
    return "$code"
}

# Launchers do not survive all signals that ranks do. A launcher may wait forever for a node that
# does not answer: it is killed some time after a rank has failed.
shielded=
tick_s=5
patience=12
run_ranks() {
    local code
    (
        [[ $shielded ]] && trap '' USR1 USR2
        with_variables "$@"
    ) &
    child=$!
    guard "$child" &
    helpers+=("$!")
    disown "$!"
    await
    code=$?
    kill -s KILL "${helpers[@]}" 2>/dev/null
    return "$code"
}
guard() {
    trap '' TERM INT USR1 USR2
    trap - EXIT
    while ((patience > 0)); do
        read -rt "$tick_s" <> <(:)
        kill -s 0 "$1" 2>/dev/null || return
        compgen -G "$PIPECTL_RUN_DIRECTORY/errors/rank-*.json" >/dev/null && ((patience--))
    done
    kill -s 0 "$1" 2>/dev/null || return
    echo "pipectl: a rank failed, and the launcher has not ended: it is killed" >&2
    kill -s KILL "$1" 2>/dev/null # last: the script, once its launcher is gone, ends this guard
}

export OMP_NUM_THREADS=1
export MKL_NUM_THREADS=1
export PYTHONUNBUFFERED=1

with_variables() {
    exec "$@"
}

export PIPECTL_SCRIPT=$$
run_ranks /opt/env/bin/mpiexec -n 4 /opt/env/bin/python -m mpi4py -m pipectl.runtime.worker --run /scratch/u/runs/20261120-152233-gpt-small
exit "$?"
