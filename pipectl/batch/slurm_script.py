"""The job script for Slurm: its directives above the common body."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipectl.batch.array import render_array
from pipectl.batch.dialects import AUTO
from pipectl.batch.launchers import mpiexec_command, srun_command
from pipectl.batch.protocol import JobRequest
from pipectl.batch.quoting import checked_directive, options_of, slurm_file, slurm_value
from pipectl.batch.script import render_body
from pipectl.batch.slurm_nodes import (
    HYDRA_STARTS,
    components,
    hosts_of_components,
    options_of_components,
)
from pipectl.batch.template import assemble, interpreter, without_commands
from pipectl.errors import InvalidInputError
from pipectl.runs import REQUEUE_ERROR, RUN_VARIABLE
from pipectl.units import format_clock

# Options that pipectl writes itself; a second one from the user would silently win.
_MANAGED = {
    "--job-name": "name", "-J": "name",
    "--comment": None,
    "--account": "slurm.account", "-A": "slurm.account",
    "--partition": "slurm.partition", "-p": "slurm.partition",
    "--qos": "slurm.qos", "-q": "slurm.qos",
    "--constraint": "slurm.constraint", "-C": "slurm.constraint",
    "--reservation": "slurm.reservation",
    "--gres": "slurm.gres", "--licenses": "slurm.licenses", "-L": "slurm.licenses",
    "--nodelist": "slurm.nodelist", "-w": "slurm.nodelist",
    "--exclude": "slurm.exclude", "-x": "slurm.exclude",
    "--mail-type": "slurm.mail_type", "--mail-user": "slurm.mail_user",
    "--dependency": None, "-d": None, "--kill-on-invalid-dep": None,
    "--exclusive": "slurm.exclusive",
    "--nodes": "resources.nodes", "-N": "resources.nodes",
    "--ntasks": None, "-n": None,
    "--ntasks-per-node": "resources.tasks_per_node",
    "--cpus-per-task": "resources.cpus_per_task", "-c": "resources.cpus_per_task",
    "--gpus-per-node": "resources.gpus_per_node",
    "--mem": "resources.memory_per_node",
    "--time": "resources.walltime", "-t": "resources.walltime",
    "--chdir": None, "-D": None,
    "--output": None, "-o": None, "--error": None, "-e": None, "--open-mode": None,
    "--requeue": "checkpoint.max_requeues", "--no-requeue": "checkpoint.max_requeues",
    "--signal": "checkpoint.on_signal and checkpoint.lead_time",
    "--array": None, "-a": None, "--parsable": None, "--wrap": None, "--wait": None, "-W": None,
    "--export": None, "--test-only": None,
}  # fmt: skip

_ELSEWHERE = ("--clusters", "-M")
_FLAGS = "hHIkOQRsuvVW"
"""Letters of options without a value: others may follow in the same word."""
_COMPLETE = ("--gpus",)
"""Options that are not ours, and with which a longer one of ours begins."""

_SITE_KEYS = (
    "account", "partition", "qos", "constraint", "reservation", "gres", "licenses", "nodelist",
    "exclude", "mail_type", "mail_user",
)  # fmt: skip

# The number of an array's last job is that of the array, by which all would start again.
_OURS = "${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"

# The proxies that mpiexec starts with srun must get all cores of the job on their node, not
# the share of one task, and must not be pinned.
_FREE_PROXIES = (
    "unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK",
    "export SLURM_CPU_BIND=none",
)

# Those of MPICH do not survive USR1 and USR2 that are sent to all steps of the job.
_AGENT = f"""\
cat >"${RUN_VARIABLE}/agent" <<'AGENT'
#!/bin/bash
options=()
while (($#)) && [[ $1 != */hydra_pmi_proxy ]]; do options+=("$1") && shift; done
exec srun "${{options[@]}}" /bin/bash -c 'trap "" USR1 USR2 && exec "$0" "$@"' "$@"
AGENT
chmod u+x "${RUN_VARIABLE}/agent"
[[ -n ${{HYDRA_LAUNCHER-}}${{HYDRA_LAUNCHER_EXEC-}} ]] ||
    export HYDRA_LAUNCHER_EXEC="${RUN_VARIABLE}/agent\""""


def render_script(request: JobRequest) -> str:
    """The whole job script.

    Raises:
        InvalidInputError: a value that cannot be written down, or a directive that pipectl
            manages.
        SchedulerError: no mpiexec.
    """
    first, *others = components(request)
    parts = (_options(first), *(_resources(other) for other in others))
    header = "#SBATCH hetjob\n".join(
        "".join(f"#SBATCH {option}\n" for option in options) for options in parts
    )
    template = request.template
    if request.array is not None and others:
        raise InvalidInputError(
            "sweep: Slurm knows no job arrays whose jobs have nodes of several kinds",
            cure="submit the points one by one with --set, or leave resources.more out",
        )
    if request.array is not None:
        body = render_array(request.array, "SLURM_ARRAY_TASK_ID", interpreter(template))
        template = without_commands(template)
    elif request.alone:
        body = render_body(request, request.within(request.command))
    elif request.launcher == "srun":
        body = render_body(request, srun_command(request), again=_again())
    else:
        before = (*_FREE_PROXIES, *_agent(request), *hosts_of_components(request))
        launch = mpiexec_command(request, options_of_components(request))
        body = render_body(request, launch, before=before, again=_again())
    check = _checking(request)
    return assemble(template, header, f"\n{body}", mark="#SBATCH", directive=check)


def _options(request: JobRequest) -> Iterator[str]:
    yield f"--job-name={slurm_value(request.name, 'name')}"
    yield f"--comment={slurm_value(request.tag, 'tag')}"
    yield from _resources(request)
    directory = str(request.run_directory)
    yield f"--chdir={slurm_value(directory, 'output.directory')}"
    yield f"--output={slurm_file(f'{directory}/logs/job.log', 'output.directory')}"
    yield "--open-mode=append"
    yield from _ends(request)
    if request.after:  # without the second, a job whose wish cannot come true waits for ever
        yield f"--dependency={slurm_value(':'.join(('afterok', *request.after)), 'after')}"
        yield "--kill-on-invalid-dep=yes"
    if request.array is not None:
        limit = "" if request.array.at_once is None else f"%{request.array.at_once}"
        yield f"--array=0-{len(request.array.runs) - 1}{limit}"
    check = _checking(request)
    for directive in request.slurm.directives:
        yield check(directive, "slurm.directives")


def _ends(request: JobRequest) -> Iterator[str]:
    """What happens before the walltime is over, and when a node fails."""
    stop = request.stop
    if stop is not None:
        yield f"--signal=B:{stop.signal}@{stop.lead_time_s}"
    yield "--requeue" if stop is not None and stop.requeues else "--no-requeue"


def _agent(request: JobRequest) -> Iterator[str]:
    """For the mpiexec of MPICH, unless the job has a way of its own to start its proxies."""
    own = any(word.startswith(("-launcher", "-bootstrap")) for word in request.launch_args)
    own = own or request.has_variable(*HYDRA_STARTS)
    if request.mpi in {AUTO, "hydra"} and not request.more and not own:
        yield _AGENT


def _again() -> Iterator[str]:
    """Shell lines that put a stopped job back into the queue; Slurm ends its script meanwhile."""
    yield "trap '' TERM"
    error = f'"${RUN_VARIABLE}/{REQUEUE_ERROR}"'
    yield f'scontrol requeue "{_OURS}" 2>{error} || cat {error} >&2'


def _site_options(request: JobRequest) -> Iterator[str]:
    for key in _SITE_KEYS:
        value = getattr(request.slurm, key)
        if value is not None:
            yield f"--{key.replace('_', '-')}={slurm_value(value, f'slurm.{key}')}"
    if request.slurm.exclusive:
        yield "--exclusive"


def _resources(request: JobRequest) -> Iterator[str]:
    """What each component of a job asks for itself."""
    yield from _site_options(request)
    memory = request.memory_per_node_bytes
    values = {
        "nodes": request.nodes,
        "ntasks-per-node": request.tasks_per_node,
        "cpus-per-task": request.cpus_per_task,
        "gpus-per-node": request.gpus_per_node or None,
        "mem": None if memory is None else f"{-(-memory // 2**20)}M",
        "time": format_clock(request.walltime_s),
    }
    for name, value in values.items():
        if value is not None and name not in request.slurm.omit:
            yield f"--{name}={value}"


def _checking(request: JobRequest) -> Callable[[str, str], str]:
    """What refuses directives that pipectl writes itself; those that it is to omit are free.

    So are jobs on other clusters: squeue and scancel would not find them, or find others.
    """
    free = {_MANAGED[f"--{name}"] for name in request.slurm.omit}
    managed = {option: key for option, key in _MANAGED.items() if key not in free}

    def check(text: str, what: str) -> str:
        line = checked_directive(
            text,
            what,
            "sbatch",
            managed,
            _is_option,
            mark="#SBATCH",
            example="--switches=1",
            flags=_FLAGS,
        )
        if "\\" in line:  # within quotes Slurm takes more for an escape than shells do
            raise InvalidInputError(
                f"{what}: {line!r} holds a backslash", cure="write the option without it"
            )
        for given in options_of(line, _FLAGS):
            if any(_is_option(given, option) for option in _ELSEWHERE):
                raise InvalidInputError(
                    f"{what}: {given}: pipectl could neither see nor cancel a job that only sbatch "
                    "knows to be on another cluster",
                    cure="remove it, and set SLURM_CLUSTERS for all commands of pipectl",
                )
        return line

    return check


def _is_option(line: str, option: str) -> bool:
    """Whether a directive starts with this option, in any of sbatch's spellings.

    Long options may be abbreviated; where it is not clear to what, sbatch refuses them itself.
    """
    if not option.startswith("--"):
        return line.startswith(option)
    name = line.replace("=", " ").split()[0]
    if name in _COMPLETE or name in _MANAGED:
        return name == option
    return name.startswith("--") and option.startswith(name)
