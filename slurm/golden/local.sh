#!/bin/bash
# pipectl gpt-small 7f3a9c
set -uo pipefail
export PIPECTL_RUN_DIRECTORY=/scratch/u/runs/20261120-152233-gpt-small
cd "$PIPECTL_RUN_DIRECTORY" || exit 1

# The exit code is written whole, whatever ends the script.
rm -f "$PIPECTL_RUN_DIRECTORY"/{exit_code,stop,stopped}
finish() {
    local code=$?
    (umask 077 && echo "$code" >"$PIPECTL_RUN_DIRECTORY/exit_code.tmp") &&
        mv -f "$PIPECTL_RUN_DIRECTORY/exit_code.tmp" "$PIPECTL_RUN_DIRECTORY/exit_code"
}
trap finish EXIT

# Which start of the job this is.
attempt=0
[[ -r "$PIPECTL_RUN_DIRECTORY/attempt" ]] && read -r attempt <"$PIPECTL_RUN_DIRECTORY/attempt"
[[ $attempt =~ ^[0-9]{1,9}$ ]] || attempt=0
attempt=$((10#$attempt + 1))
(umask 077 && echo "$attempt" >"$PIPECTL_RUN_DIRECTORY/attempt.tmp") &&
    mv -f "$PIPECTL_RUN_DIRECTORY/attempt.tmp" "$PIPECTL_RUN_DIRECTORY/attempt"
export PIPECTL_ATTEMPT=$attempt
if ((attempt > 1)); then # what earlier starts reported is out of the way, not lost
    before="$PIPECTL_RUN_DIRECTORY/errors/attempt-$((attempt - 1))"
    (umask 077 && mkdir -p "$before") && mv -f "$PIPECTL_RUN_DIRECTORY"/errors/*.json "$before" 2>/dev/null
fi

# Signals go on to the running command; bash sees them only while it waits, so every command
# runs in the background, and 'wait' is repeated after a signal. Should a command end in the very
# moment of a signal, bash loses its exit code (wait gives -1): then the signal's code counts.
child=
interrupted=
forward() {
    interrupted=$2
    if [[ -n $child ]]; then
        kill -s "$1" "$child" 2>/dev/null
    elif [[ $1 == TERM || $1 == INT ]]; then
        exit "$2"
    fi
}
trap 'forward TERM 143' TERM
trap 'forward INT 130' INT
trap 'forward USR1 138' USR1
trap 'forward USR2 140' USR2
run() {
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
}

# Ranks that find this file save a checkpoint and end; the signal itself would end
# launchers that do not know it.
trap '(umask 077 && : >"$PIPECTL_RUN_DIRECTORY/stop"); interrupted=1' USR2

export OMP_NUM_THREADS=1
export MKL_NUM_THREADS=1
export PYTHONUNBUFFERED=1

export PIPECTL_SCRIPT=$$
run /opt/env/bin/mpiexec -n 4 /opt/env/bin/python -m mpi4py -m pipectl.runtime.worker --run /scratch/u/runs/20261120-152233-gpt-small
code=$?
if ((code == 0)) && [[ -e "$PIPECTL_RUN_DIRECTORY/stopped" ]]; then
    code=75
fi
exit "$code"
