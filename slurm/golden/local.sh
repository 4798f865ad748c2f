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

# Every command runs in the background, because bash handles signals only while it waits. Signals
# are passed on to the command.
child=
helpers=() # processes beside it
signal_code= # exit code if that of the command is lost, see await
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
# Waits for the command, and returns its exit code.
await() {
    local code last # a negative code is lost
    signal_code=
    while :; do # a signal ends 'wait'
        wait "$child"
        code=$?
        kill -s 0 "$child" 2>/dev/null || break
    done
    if ((code > 128)); then # that of a signal to this script, or of the command: ask again
        kill -s KILL "${helpers[@]-}" 2>/dev/null # bash may wait for them too
        wait "$child"
        last=$?
        if ((last != 127)); then
            code=$last
        elif [[ $signal_code ]]; then # bash loses the code if the command ends as a signal comes
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

run_ranks() {
    local code
    with_variables "$@" &
    child=$!
    kill_if_stuck "$child" &
    helpers+=("$!")
    disown "$!"
    await
    code=$?
    kill -s KILL "${helpers[@]}" 2>/dev/null
    return "$code"
}
# A launcher may wait forever for a node that does not answer: it is killed if it still runs after
# `patience` looks since a rank has reported an error.
tick_s=5
patience=12
kill_if_stuck() {
    trap '' TERM INT USR1 USR2
    trap - EXIT
    while kill -s 0 "$1" 2>/dev/null; do
        if ((patience == 0)); then
            echo "pipectl: a rank failed, and the launcher has not ended: it is killed" >&2
            kill -s KILL "$1" 2>/dev/null # last, because the script then kills this function
            return
        fi
        read -rt "$tick_s" <> <(:) # sleeps, without a process that would outlive the script
        compgen -G "$PIPECTL_RUN_DIRECTORY/errors/rank-*.json" >/dev/null && ((patience--))
    done
}

export OMP_NUM_THREADS=1
export MKL_NUM_THREADS=1
export PYTHONUNBUFFERED=1
export PYTHONHASHSEED=0

with_variables() {
    exec "$@"
}

export PIPECTL_SCRIPT=$$
run_ranks /opt/env/bin/mpiexec -n 4 /opt/env/bin/python -m mpi4py -m pipectl.runtime.worker --run /scratch/u/runs/20261120-152233-gpt-small
exit "$?"
