#!/bin/bash
# The job is found by its argument, the tag.
set --
set -uo pipefail
export PIPECTL_RUN_DIRECTORY=/scratch/u/runs/20261120-152233-gpt-small
cd "$PIPECTL_RUN_DIRECTORY" || exit 1

# This start of the job has a directory of its own: that of the submission, or else the next one.
# It belongs to the script that makes the file `begun` in it, which only one can do.
over= # exit code of a signal that comes before the traps below
trap over=143 TERM
trap over=130 INT
attempt=1
for start in starts/*; do
    start=${start#starts/}
    [[ $start =~ ^[1-9][0-9]{0,8}$ ]] && ((start > attempt)) && attempt=$start
done
until (umask 077 && mkdir -p "starts/$attempt/errors" && set -C && : >"starts/$attempt/begun") 2>/dev/null; do
    if [[ ! -e starts/$attempt/begun ]]; then
        echo "pipectl: $PIPECTL_RUN_DIRECTORY/starts/$attempt: cannot be written; is the disk full?" >&2
        exit "${over:-1}"
    fi
    ((attempt++))
done
export PIPECTL_START=$PIPECTL_RUN_DIRECTORY/starts/$attempt

# Files are written whole, for their owner alone: the exit code too, whatever ends the script.
write_file() {
    (umask 077 && echo "$2" >"$PIPECTL_START/$1.tmp") && mv -f "$PIPECTL_START/$1.tmp" "$PIPECTL_START/$1"
}
finish() {
    local code=$?
    [[ -e "$PIPECTL_START/starting" ]] && rm -f "$PIPECTL_START/starting"
    write_file exit_code "$code"
}
trap finish EXIT
trap 'exit 143' TERM # without traps, the code of the last command would be written
trap 'exit 130' INT
[[ $over ]] && exit "$over"


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
    begin
    "$@" &
    child=$!
    await
    settle "$?"
    local code=$?
    # A process that is killed cannot say so.
    ((code > 128)) && [[ -z $signal_code && ! -e "$PIPECTL_START/starting" ]] &&
        report_start "$code begun"
    return "$code"
}
# What a command starts removes the file `starting`, and makes `finished` when its work is done.
begin() {
    echo >"$PIPECTL_START/starting"
    [[ -e "$PIPECTL_START/finished" ]] && rm -f "$PIPECTL_START/finished"
    measure_log
}
measure_log() {
    log_bytes=$(stat -Lc %s "$PIPECTL_RUN_DIRECTORY/logs/job.log" 2>/dev/null) || log_bytes=0
}
# The exit code of a command, given that of its process: a process that fails while it ends does
# not undo its work. If the work never began, the output of the command says why.
settle() {
    local code=$1 waited_s=
    [[ -r "$PIPECTL_START/starting" ]] && read -r waited_s <"$PIPECTL_START/starting"
    if ((code)) && [[ -e "$PIPECTL_START/finished" ]]; then
        write_file exit_warning "all work was done and saved; then a process failed while it ended (exit code $code)"
        echo "pipectl: $(<"$PIPECTL_START/exit_warning")" >&2
        code=0
    elif ((code)) && [[ -e "$PIPECTL_START/starting" && (-z $signal_code || $waited_s) ]]; then
        await_agents
        report_start "$code $waited_s"
    fi
    return "$code"
}
# A launcher may end before its agents do, by which it starts processes on other nodes: these have
# more to say.
await_agents() {
    local agent looks=100
    for agent in $(cat "$PIPECTL_START/agents" 2>/dev/null); do
        while [[ -e "/proc/$agent/exe" ]] && ((looks-- > 0)); do # no zombie
            read -rt 0.1 <> <(:)
        done
    done
}
# Says why no rank has begun: an exit code, and what was printed.
report_start() {
    write_file launch_error "${SLURMD_NODENAME:-$HOSTNAME}"$'\n'"$1"$'\n'"${2-}$(
        tail -c "+$((log_bytes + 1))" "$PIPECTL_RUN_DIRECTORY/logs/job.log" 2>/dev/null |
            head -c 16384 | tr -d '\0'
    )"
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
        [[ -e "$PIPECTL_START/stopped" ]] && code=0 # ranks that stop at a checkpoint end well
    fi
    return "$code"
}

run_ranks() {
    local code
    begin
    with_variables "$@" &
    child=$!
    guard "$child" &
    helpers+=("$!")
    disown "$!"
    await
    code=$?
    kill -s KILL "${helpers[@]}" 2>/dev/null
    # A launcher that starts nothing, because of an option of the user, say, may end without an error.
    if ((code == 0)) && { true <"$PIPECTL_START/starting"; } 2>/dev/null; then
        report_start 0
        return 1
    fi
    settle "$code"
}
# MPICH waits forever for a process that ends before MPI has begun in it. One has ended if its proxy
# on this node has waited for a process: see proc(5), cminflt.
has_lost_rank() { # PARENT of the proxy
    local stat
    for proxy in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do
        read -ra stat 2>/dev/null <"/proc/$proxy/stat"
        [[ ${stat[1]-} == "(hydra_pmi_proxy)" ]] && ((stat[10])) && return
    done
    return 1
}
# A launcher may wait forever for a node that does not answer. It is ended if it still runs after
# `patience` looks since a rank has reported an error, after `start_looks` looks without a rank, or
# after `end_looks` looks since all ranks are done.
tick_s=5
patience=12
start_limit_s=304
start_looks=60
end_looks=60
guard() {
    trap '' TERM INT USR1 USR2
    trap - EXIT
    local looks=0 why=
    while kill -s 0 "$1" 2>/dev/null; do
        if ((patience == 0)); then
            echo "pipectl: $why, and the launcher has not ended: it is killed" >&2
            kill -s KILL "$1" 2>/dev/null # last, because the script then kills this function
            return
        fi
        read -rt "$tick_s" <> <(:) # sleeps, without a process that would outlive the script
        if [[ $why ]] || compgen -G "$PIPECTL_START/errors/rank-*.json" >/dev/null; then
            : "${why:=a rank failed}"
            ((patience--))
        elif [[ -e "$PIPECTL_START/starting" ]] && ((--start_looks == 0)); then
            why="no rank has appeared in $start_limit_s s" patience=2
            write_file starting "$start_limit_s"
            kill -s TERM "$1" 2>/dev/null
        elif [[ -e "$PIPECTL_START/starting" ]] && has_lost_rank "$1" && ((++looks == 2)); then
            why="a process ended on ${SLURMD_NODENAME:-$HOSTNAME} before MPI had begun in it" patience=2
            echo "$why" >&2
            kill -s TERM "$1" 2>/dev/null
        elif [[ -e "$PIPECTL_START/finished" ]] && ((--end_looks == 0)); then
            why='all ranks are done' patience=2
            kill -s TERM "$1" 2>/dev/null
        fi
    done
}

export OMP_NUM_THREADS=1
export MKL_NUM_THREADS=1
export PYTHONUNBUFFERED=1
export PYTHONHASHSEED=0
# Makes glibc join freed memory at once: else ranks hold more than predicted.
export GLIBC_TUNABLES=glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0${GLIBC_TUNABLES:+:$GLIBC_TUNABLES}

with_variables() {
    exec "$@"
}

export PIPECTL_SCRIPT=$$
# In a job of a batch system, mpiexec would start the ranks on the nodes of that job.
for name in $(compgen -e); do
    case $name in
    *_TMPDIR|*_SUBMIT_DIR|SLURM_CONF*|SLURM_JWT|PBS_O_*|PMIX_MCA_*) ;;
    SLURM*|PBS_*|PALS_*|LSB_*|LOADL*|COBALT_*|FLUX_*|PE_HOSTFILE|HYDRA_LAUNCHER*|HYDRA_BOOTSTRAP*|HYDRA_RMK|HYDRA_HOST_FILE|HYDI_*|I_MPI_HYDRA_BOOTSTRAP*|I_MPI_HYDRA_RMK|I_MPI_HYDRA_HOST_FILE|I_MPI_PMI_LIBRARY|PMI_*|PMI2_*|PMIX_*|MPI_LOCAL*|OMPI_COMM_*|OMPI_UNIVERSE*|OMPI_MCA_orte_*|OMPI_MCA_ess*|PRTE_LAUNCHED) unset "$name" ;;
    esac
done
run_ranks /opt/env/bin/mpiexec -n 4 /opt/env/bin/python -m mpi4py -m pipectl.runtime.worker --run /scratch/u/runs/20261120-152233-gpt-small
exit "$?"
