#!/bin/bash -l
#SBATCH --no-kill
#SBATCH --job-name=gpt-small
#SBATCH --comment=7f3a9c
#SBATCH --nodes=2-4
#SBATCH --mincpus=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --chdir=/scratch/u/runs/20261120-152233-gpt-small
#SBATCH --output=/scratch/u/runs/20261120-152233-gpt-small/logs/job.log
#SBATCH --open-mode=append
#SBATCH --export=HOME,USER,LOGNAME,SHELL,LANG
#SBATCH --signal=B:USR2@180
#SBATCH --requeue

unset SLURM_CLUSTERS # in the job, all commands are for its own cluster
unset SLURM_EXPORT_ENV # steps get the environment of this script
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
# The number of an array's last job is that of the array, by which all would start again.
job_id=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
# Slurm sends TERM when it preempts a job, as when the job is cancelled. It requeues the job only if
# that lives until the end of its time of grace.
is_preempted() {
    local found preempted_at
    found=$(SLURM_TIME_FORMAT=standard scontrol show job "$job_id") || return 1
    [[ $found =~ PreemptTime=([0-9T:-]+) ]] && preempted_at=${BASH_REMATCH[1]} &&
        [[ $found =~ StartTime=([0-9T:-]+) && ! $preempted_at < ${BASH_REMATCH[1]} ]]
}
finish() {
    local code=$?
    [[ -e "$PIPECTL_START/starting" ]] && rm -f "$PIPECTL_START/starting"
    # Before ranks can save a checkpoint, TERM ends them: there is nothing to save yet.
    if ((code != 0 && code != 75 && attempt < 4)) &&
        is_preempted 2>/dev/null && ask_again scontrol requeue "$job_id"; then
        rm -f "$PIPECTL_START/launch_error"
        code=75
    fi
    write_file exit_code "$code"
    exit "$code"
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
        exit "$2"
    fi
}
# Ranks that find this file save a checkpoint and end. A signal that is named in it
# ends the job for good.
ask_to_stop() {
    (umask 077 && printf %s "${1-}" >>"$PIPECTL_START/stop")
    signal_code=1
    asked_for_good+=${1-}
    asked=1
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
start_limit_s=308
start_looks=61
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

# The nodes that answer, and on which no rank of an earlier start is left.
ask_nodes() { # NODE...
    env -u SLURM_CPUS_PER_TASK -u SLURM_TRES_PER_TASK -u SLURM_NTASKS_PER_NODE SLURM_OVERLAP=1 \
        timeout -k 5 60 srun --nodes="$#" --ntasks="$#" --nodelist="$(IFS=, && echo "$*")" \
        --cpus-per-task=1 --cpu-bind=none --mpi=none --export=ALL /bin/bash -c '
            for ((look = 0; look < 300; look++)); do
                ranks=$(grep -lzxsF pipectl.runtime.worker /proc/[0-9]*/cmdline) || exit 0
                grep -qzxsF -f <(echo "$PIPECTL_RUN_DIRECTORY") $ranks || exit 0
                read -rt 0.1 <> <(:)
            done
            exit 1' </dev/null >/dev/null 2>&1
}
list_nodes() { # none if that is not known
    local node answers="" tries=0
    # The node of this script is there. If it does not answer, no step could be started in time.
    until [[ $answers == *" ${SLURMD_NODENAME-} "* ]]; do
        ((++tries <= 3)) || return
        ask_nodes "${all_nodes[@]}" && printf '%s\n' "${all_nodes[@]}" && return
        answers=$(
            for node in "${all_nodes[@]}"; do
                ask_nodes "$node" && echo " $node " &
            done
            wait
        )
    done
    for node in "${all_nodes[@]}"; do
        [[ $answers != *" $node "* ]] || echo "$node"
    done
}
find_nodes() {
    local asking known=()
    list_nodes >"$PIPECTL_START/answers" 2>/dev/null &
    asking=$!
    until wait "$asking" || ! kill -s 0 "$asking" 2>/dev/null; do :; done # a signal ends 'wait'
    [[ -r "$PIPECTL_START/answers" ]] && mapfile -t known <"$PIPECTL_START/answers"
    rm -f "$PIPECTL_START/answers"
    nodes=("${all_nodes[@]}")
    ((${#known[@]} == 0)) || nodes=("${known[@]}")
}
mapfile -t all_nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
nodes=("${all_nodes[@]}")
# Of a range of nodes, the job takes those that answer.
((attempt == 1)) || find_nodes
if ((${#nodes[@]} < 2)); then
    echo "pipectl: of ${all_nodes[*]}, only ${nodes[*]-none} answer, and resources.nodes is 2-4" >&2
    ((attempt < 4)) && ask_again scontrol requeue "$job_id" && exit 75
    measure_log
    report_start 1 "too few nodes answer: ${nodes[*]-none} of ${all_nodes[*]}"$'\n'
    exit 1
fi
write_file nodes "${#nodes[@]}"
run with_variables /opt/env/bin/python -m pipectl.jobs.in_job /scratch/u/runs/20261120-152233-gpt-small || exit "$?"

# The plan is for as many of them.
read -r count <"$PIPECTL_START/nodes" || exit 1
nodes=("${nodes[@]:0:count}")
nodelist=$(IFS=, && echo "${nodes[*]}")
ranks=$((count * 2))
export SLURM_NODELIST=$nodelist SLURM_JOB_NODELIST=$nodelist
export SLURM_NNODES=$count SLURM_JOB_NUM_NODES=$count
export SLURM_NTASKS=$ranks SLURM_NPROCS=$ranks SLURM_NTASKS_PER_NODE=2
export SLURM_TASKS_PER_NODE="2(x$count)"
export SLURM_OVERLAP=1 # a step that has lost a node may keep its cores until the job ends
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
export SLURM_CPU_BIND=none
cat >"$PIPECTL_START/agent" <<'AGENT'
#!/bin/bash
echo "$$" >>"$PIPECTL_START/agents"
where=
options=()
while (($#)) && [[ $1 != */hydra_pmi_proxy ]]; do options+=("$1") && shift; done
# mpiexec may kill this agent before srun has printed all that it knows.
(echo "$BASHPID" >>"$PIPECTL_START/agents" && exec srun --kill-on-bad-exit=1 "${options[@]}" /bin/bash -c '
trap "" USR1 USR2
trap : TERM INT HUP # the proxy gets these, too
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
has_begun() { # a file system that shows files late looks when one is opened
    ! { true <"$PIPECTL_START/starting"; } 2>/dev/null
}
watch_start() {
    local looks=0
    until has_begun; do
        has_lost_rank "$$" && ((++looks == 3)) && kill -s KILL "$proxy"
        read -rt 1 <> <(:)
    done
}
watch_start </dev/null >/dev/null 2>&1 &
"$0" "$@"
code=$?
for look in 1 2 3; do
    has_begun && exit "$code"
    read -rt 1 <> <(:)
done
echo "a process ended on ${SLURMD_NODENAME:-$HOSTNAME} before MPI had begun in it" >&2
exit 1' "$@")
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
[[ -n ${HYDRA_LAUNCHER-}${HYDRA_LAUNCHER_EXEC-} ]] ||
    export HYDRA_LAUNCHER_EXEC="$PIPECTL_START/agent"
trap 'ask_to_stop TERM' TERM # TERM would end the launcher, and the ranks with it
trap 'ask_to_stop INT' INT
trap ask_to_stop USR1 USR2
run_ranks /opt/env/bin/mpiexec -n "$ranks" /opt/env/bin/python -m mpi4py -m pipectl.runtime.worker --run /scratch/u/runs/20261120-152233-gpt-small
code=$?
# A job that has lost a node does not fail. Then srun sends TERM to the ranks on the others, which
# note it as if it came from a person: only what this script was sent counts.
if ((code && attempt < 4)) && [[ -z ${asked_for_good-} ]]; then
    had=" ${nodes[*]} " lost=
    for step in $(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i 2>/dev/null); do
        [[ $step == *.[0-9]* ]] && scancel --signal=KILL "$step" 2>/dev/null
    done
    find_nodes
    for node in $had; do
        [[ " ${nodes[*]-} " == *" $node "* ]] || lost+=" $node"
    done
    if [[ $lost && -z ${asked_for_good-} ]]; then
        if ((${#nodes[@]} >= 2)) && [[ -z ${asked-} ]]; then
            echo "pipectl:$lost no longer answers: the job goes on with ${nodes[*]}" >&2
            variables=() # as the job began with them
            while IFS= read -rd '' variable; do
                variables+=("$variable")
            done <"/proc/$$/environ"
            exec env -i "${variables[@]}" /bin/bash -l "$PIPECTL_RUN_DIRECTORY/job.sh"
        fi
        echo "pipectl:$lost no longer answers: the job is requeued" >&2
        if ask_again scontrol requeue "$job_id"; then
            rm -f "$PIPECTL_START/launch_error"
            exit 75
        fi
        cat "$PIPECTL_START/requeue_error" >&2
    fi
fi
if ((code == 0)) && [[ -e "$PIPECTL_START/stopped" ]]; then
    code=75
    if ((attempt < 4)) && { [[ ! -s "$PIPECTL_START/stop" ]] || is_preempted; }; then
        ask_again scontrol requeue "$job_id" || cat "$PIPECTL_START/requeue_error" >&2
    fi
fi
exit "$code"
