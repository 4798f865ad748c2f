#!/bin/bash
#SBATCH --job-name=gpt-small
#SBATCH --comment=7f3a9c
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --chdir=/scratch/u/runs/20261120-152233-gpt-small
#SBATCH --output=/scratch/u/runs/20261120-152233-gpt-small/logs/job.log
#SBATCH --open-mode=append
#SBATCH --no-requeue

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

export OMP_NUM_THREADS=1
export MKL_NUM_THREADS=1
export PYTHONUNBUFFERED=1

run srun --kill-on-bad-exit=1 --mpi=pmi2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=1 --distribution=block --export=ALL --cpu-bind=ldoms /opt/env/bin/python -m mpi4py -m pipectl.runtime.worker --run /scratch/u/runs/20261120-152233-gpt-small
exit "$?"
