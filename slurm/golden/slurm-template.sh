#!/bin/bash -l
#SBATCH --switches=1
#SBATCH --job-name=gpt-small
#SBATCH --comment=7f3a9c
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --chdir=/scratch/u/runs/20261120-152233-gpt-small
#SBATCH --output=/scratch/u/runs/20261120-152233-gpt-small/logs/job.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@180
#SBATCH --requeue

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
    rm -rf "${scratch-}"

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
if ((attempt > 4)); then # by the batch system, which does not count
    write_file requeue_error "it was started 4 times, as checkpoint.max_requeues allows"
    cat "$PIPECTL_RUN_DIRECTORY/requeue_error" >&2
    exit 75
fi
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
# Ranks that find this file save a checkpoint and end. A signal that is named in it
# ends the job for good.
ask_to_stop() {
    (umask 077 && printf %s "${1-}" >>"$PIPECTL_RUN_DIRECTORY/stop")
    signal_code=1
}
set_traps() {
    trap finish EXIT
    trap 'forward TERM 143' TERM
    trap 'forward INT 130' INT
    trap 'forward USR1 138' USR1
    trap 'forward USR2 140' USR2
    trap ask_to_stop USR2
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
    (
        trap '' USR1 USR2 # ranks survive these, but not all launchers
        with_variables "$@"
    ) &
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

set +u
scratch=$(mktemp -d /scratch/gpt-small.XXXXXX)
export TMPDIR=$scratch

trap - ERR DEBUG RETURN
set_traps
set +efC
set -uo pipefail
cd "$PIPECTL_RUN_DIRECTORY" || exit 1

export OMP_NUM_THREADS=1
export MKL_NUM_THREADS=1
export PYTHONUNBUFFERED=1
export PYTHONHASHSEED=0

with_variables() {
    exec "$@"
}

unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
export SLURM_CPU_BIND=none
cat >"$PIPECTL_RUN_DIRECTORY/agent" <<'AGENT'
#!/bin/bash
options=()
while (($#)) && [[ $1 != */hydra_pmi_proxy ]]; do options+=("$1") && shift; done
exec srun "${options[@]}" /bin/bash -c 'trap "" USR1 USR2 && exec "$0" "$@"' "$@"
AGENT
chmod u+x "$PIPECTL_RUN_DIRECTORY/agent"
[[ -n ${HYDRA_LAUNCHER-}${HYDRA_LAUNCHER_EXEC-} ]] ||
    export HYDRA_LAUNCHER_EXEC="$PIPECTL_RUN_DIRECTORY/agent"
trap 'ask_to_stop TERM' TERM # TERM would end the launcher, and the ranks with it
trap 'ask_to_stop INT' INT
trap ask_to_stop USR1 USR2
run_ranks /opt/env/bin/mpiexec -n 4 /opt/env/bin/python -m mpi4py -m pipectl.runtime.worker --run /scratch/u/runs/20261120-152233-gpt-small
code=$?
if ((code == 0)) && [[ -e "$PIPECTL_RUN_DIRECTORY/stopped" ]]; then
    code=75
    if ((attempt < 4)) && [[ ! -s "$PIPECTL_RUN_DIRECTORY/stop" ]]; then
        trap '' TERM # Slurm ends the script meanwhile
        # The number of an array's last job is that of the array, by which all would start again.
        scontrol requeue "${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}" \
            2>"$PIPECTL_RUN_DIRECTORY/requeue_error" || cat "$PIPECTL_RUN_DIRECTORY/requeue_error" >&2
    fi
fi
exit "$code"
