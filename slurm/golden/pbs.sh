#!/bin/bash
#PBS -P climate
#PBS -l place=scatter:excl
#PBS -l software=matlab
#PBS -M a@b.org
#PBS -h
#PBS -S /bin/bash
#PBS -N gpt-small.7f3a9c
#PBS -A 'proj 123'
#PBS -q gpu
#PBS -l select=2:ncpus=32:mpiprocs=2:ompthreads=16:ngpus=4:mem=245760mb:model=icelake
#PBS -l walltime=36:00:00
#PBS -r y
#PBS -j oe
#PBS -k doe
#PBS -o '/scratch/u/my runs/100%/logs/pbs.log'
#PBS -W depend=afterok:41.vm

exec >>'/scratch/u/my runs/100%/logs/job.log' 2>&1 # PBS may begin its own file anew
set -uo pipefail
export PIPECTL_RUN_DIRECTORY='/scratch/u/my runs/100%'
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
# A batch system that is busy or cannot be reached is asked again. TERM is for what is over.
ask_again() {
    local pause_s over='' error=$PIPECTL_START/requeue_error
    for pause_s in 5 20 60 0; do
        trap '' TERM # the batch system may end the script meanwhile
        "$@" 2>"$error" && return 0 # in a trap, `return` alone has the code before it
        trap over=1 TERM
        ((pause_s)) && grep -qiE 'busy|cannot connect|communication|connection|end of file|internal error|shutting down|standby|temporarily|timed out|unable to contact|unexpected' "$error" || return 1
        sleep "$pause_s" &
        wait "$!"
        [[ -z $over ]] || return 1
    done
}
clean_up() { # CODE of the job
    local code=$1
    local background
    background=$(jobs -p) && [[ $background ]] && kill $background 2>/dev/null # of the setup
    set +eu
    ( # an `exit` in the trap of the setup is not that of the job, whose code it may look at
        (exit "$code")
        eval "$at_exit"
    )
    set -u
}
finish() {
    local code=$?
    [[ -e "$PIPECTL_START/starting" ]] && rm -f "$PIPECTL_START/starting"
    if [[ $in_setup ]]; then # by an `exit` in a file that the setup reads, say
        echo "pipectl: the setup ended the script with exit code $code" >&2
        report_start "$((code ? code : 1))" "start failed: the setup ended the script with exit code $code"$'\n'
        code=$((code ? code : 1))
    fi
    write_file exit_code "$code"
    clean_up "$code"
    exit "$code"
}
at_exit= # the traps of the setup
at_error=
in_setup=
# In place of the builtin while the setup runs: its traps for EXIT and ERR run beside those of this
# script.
keep_traps() {
    trap() {
        local action event events=()
        if ((BASH_SUBSHELL || $# == 0)) || [[ $1 == -[lp]* ]]; then
            builtin trap ${1+"$@"}
            return
        fi
        [[ $1 == -- ]] && shift
        (($# == 1)) && set -- - "$1"
        action=$1
        for event in "${@:2}"; do
            case ${event^^} in
            EXIT | SIGEXIT | 0) at_exit=${action#-} ;;
            ERR | SIGERR) at_error=${action#-} ;;
            RETURN | SIGRETURN | DEBUG | SIGDEBUG) # not for this function itself
                [[ $1 && $1 != - ]] && action="[[ \${FUNCNAME-} == trap ]] || { $1"$'\n}'
                events+=("$event")
                ;;
            *) events+=("$event") ;;
            esac
        done
        [[ ${events[*]-} ]] || return 0
        builtin trap -- "$action" "${events[@]}"
    }
}
trap finish EXIT
trap 'exit 143' TERM # without traps, the code of the last command would be written
trap 'exit 130' INT
[[ $over ]] && exit "$over"

if ((attempt > 4)); then # by the batch system, which does not count
    write_file requeue_error "it was started 4 times, as checkpoint.max_requeues allows"
    cat "$PIPECTL_START/requeue_error" >&2
    exit 75
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
        in_setup=
        exit "$2"
    fi
}
# Ranks that find this file save a checkpoint and end. A signal that is named in it
# ends the job for good.
ask_to_stop() {
    (umask 077 && printf %s "${1-}" >>"$PIPECTL_START/stop")
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
    (
        trap '' USR1 USR2 # ranks survive these, but not all launchers
        with_variables "$@"
    ) &
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

setup_failed() { # KEY CODE, and COMMAND or its line in this script
    local command=$3 hint=
    if [[ $3 =~ ^[0-9]+$ ]]; then
        command=$(sed -n "$3p" "${BASH_SOURCE[0]}")
        hint=' (if it may fail: COMMAND || true, or environment.on_error: continue)'
    fi
    echo "pipectl: $1 failed with exit code $2: $command$hint" >&2
    report_start "$2" "$1 failed with exit code $2: $command$hint"$'\n'
    in_setup=
    exit "$2"
}
measure_log
in_setup=1
set +uo pipefail # as a script of the user has it
keep_traps
type module >/dev/null 2>&1 || source /etc/profile
module load gcc/13.2 openmpi/5.0.6 || setup_failed environment.modules 1 'module load gcc/13.2 openmpi/5.0.6'
# In a file that the setup reads, a command may fail.
builtin trap 'check_setup "$?" "$LINENO" "${#BASH_SOURCE[@]}"' ERR
check_setup() {
    (exit "$1") || eval "$at_error" || :
    (($3 > 1)) || setup_failed environment.setup "$1" "$2"
}
# environment.setup, verbatim:
source /proj/venv/bin/activate
ulimit -s unlimited
builtin trap - ERR DEBUG RETURN
unset -f trap
in_setup=
set_traps
set +efC
set -uo pipefail
cd "$PIPECTL_RUN_DIRECTORY" || exit 1

export OMP_NUM_THREADS=16
export MKL_NUM_THREADS=16
export PYTHONUNBUFFERED=1
export PYTHONHASHSEED=0

# Variables of the ranks (UCX_TLS GREETING) are in a file for its owner alone.
with_variables() {
    source "$PIPECTL_RUN_DIRECTORY/variables.sh" || exit 1
    exec "$@"
}

if ! type apptainer >/dev/null 2>&1; then
    missing="environment.container: $HOSTNAME has no apptainer: load its module, or name another runtime"
    echo "pipectl: $missing" >&2
    measure_log
    report_start 127 "$missing"$'\n'
    exit 127
fi

run with_variables apptainer exec '--bind=/scratch/u/my runs:/scratch/u/my runs' --bind=/home/u:/home/u --bind=/data:/mnt/data:ro --nv '/proj/my image.sif' /bin/sh -c '. "$0" && exec "$@"' '/scratch/u/my runs/100%/variables.sh' python3 -m pipectl.jobs.in_job '/scratch/u/my runs/100%' || exit "$?"

stop_s=129420
wait_s=$((SECONDS < stop_s ? stop_s - SECONDS : 1))
(read -rt "$wait_s" <> <(:); kill -s USR2 $$) &
helpers+=("$!")
disown "$!"
if type pbs_tmrsh >/dev/null 2>&1; then
    cat >"$PIPECTL_START/agent" <<'AGENT'
#!/bin/bash
echo "$$" >>"$PIPECTL_START/agents"
while [[ ${1-} == -* ]]; do shift; done
host=$1
where=" on $host"
shift
trap '' TERM INT USR1 USR2
# mpiexec may kill this agent before pbs_tmrsh has printed all that it knows.
(echo "$BASHPID" >>"$PIPECTL_START/agents" && exec pbs_tmrsh "$host" /bin/bash -c "$*")
code=$?
# Before MPI has begun, mpiexec would wait forever. (The daemons of Open MPI leave their agent.)
if [[ -e "$PIPECTL_START/starting" ]] && { ((code)) || [[ $* == *hydra_pmi_proxy* ]]; }; then
    ((code)) || echo "a process ended${where-} before MPI had begun in it" >&2
    for signal in 0 0 TERM TERM KILL; do
        kill -s "$signal" "$PPID" 2>/dev/null || break
        sleep 1
    done
fi
exit "$code"
AGENT
    chmod u+x "$PIPECTL_START/agent"
    export HYDRA_LAUNCHER=ssh HYDRA_LAUNCHER_EXEC="$PIPECTL_START/agent"
    export PRTE_MCA_plm_ssh_agent="$PIPECTL_START/agent"
fi
trap 'ask_to_stop TERM' TERM # TERM would end the launcher, and the ranks with it
trap 'ask_to_stop INT' INT
trap ask_to_stop USR1 USR2
run_ranks /opt/env/bin/mpiexec -n 4 --map-by ppr:2:node:PE=16 --rank-by slot --bind-to core --label apptainer exec '--bind=/scratch/u/my runs:/scratch/u/my runs' --bind=/home/u:/home/u --bind=/data:/mnt/data:ro --nv '/proj/my image.sif' /bin/sh -c '. "$0" && exec "$@"' '/scratch/u/my runs/100%/variables.sh' python3 -m mpi4py -m pipectl.runtime.worker --run '/scratch/u/my runs/100%'
code=$?
if ((code == 0)) && [[ -e "$PIPECTL_START/stopped" ]]; then
    code=75
    if ((attempt < 4)) && { [[ ! -s "$PIPECTL_START/stop" ]]; }; then
        # Users may not requeue a job on PBS: the script submits itself again, unless the server has
        # taken the job already and its answer was lost.
        submit_next() {
            qselect -N gpt-small.7f3a9c -s HQTW 2>/dev/null | grep -m 1 '^[0-9]' ||
                # What this job has waited for is over: a server without a history would not know it, and
                # drop a job that waits for it.
                sed -E "/^#PBS -W '?depend=(.*,)?(after|on:)/Id" "$PIPECTL_RUN_DIRECTORY/job.sh" | qsub -C '#PBS'
        }
        if next=$(ask_again submit_next); then
            write_file resubmitted "$next"
        else
            cat "$PIPECTL_START/requeue_error" >&2
            echo 'pipectl: this job may not submit another; pipectl resume RUN continues' >&2
        fi
    fi
fi
exit "$code"
