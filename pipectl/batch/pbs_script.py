"""The job script for PBS Pro and OpenPBS: its directives above the common body."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pipectl.batch.array import render_array
from pipectl.batch.launchers import mpiexec_command, refuse_srun
from pipectl.batch.protocol import Array, JobRequest, MoreNodes
from pipectl.batch.quoting import checked, checked_directive, pbs_path, pbs_value, shell_word
from pipectl.batch.script import render_body
from pipectl.batch.template import assemble, interpreter, without_commands
from pipectl.errors import InvalidInputError
from pipectl.runs import REQUEUE_ERROR, RESUBMITTED, RUN_VARIABLE
from pipectl.units import format_clock

_NAME_LENGTH = 200
_INDEX = "^array_index^"
"""Stands for a job's place in its array, in paths (src/include/pbs_internal.h)."""
_BAD_SELECT = re.compile(r"[^A-Za-z0-9_=:.,+*~/@-]")

# Options that pipectl writes itself: PBS takes the first of two, so that a second has no effect.
_MANAGED = {
    "-N": "name", "-A": "pbs.account", "-P": "pbs.project", "-q": "pbs.queue",
    "-m": "pbs.mail", "-M": "pbs.mail_user", "-W depend": None, "-W max_run_subjobs": None,
    "-l select": "resources, or pbs.select_extra",
    "-l nodes": "resources.nodes",
    "-l place": "pbs.place",
    "-l walltime": "resources.walltime",
    "-l ncpus": "resources.cpus_per_task", "-l mem": "resources.memory_per_node",
    "-r": "checkpoint.max_requeues",
    "-S": None, "-j": None, "-k": None, "-o": None, "-e": None, "-J": None, "-C": None,
    "-V": None, "-I": None, "-X": None, "-z": None, "-f": None,
}  # fmt: skip

_FLAGS = "fhIVXz"
"""Letters of options without a value: others may follow in the same word."""

# The task manager of PBS starts processes on other nodes if nobody may log in there. It garbles a
# command of one word, and knows no options of ssh. Signals to the whole job are for the ranks.
_AGENT = f"""\
if type pbs_tmrsh >/dev/null 2>&1; then
    cat >"${RUN_VARIABLE}/agent" <<'AGENT'
#!/bin/bash
while [[ ${{1-}} == -* ]]; do shift; done
host=$1
shift
trap '' TERM INT USR1 USR2
exec pbs_tmrsh "$host" /bin/bash -c "$*"
AGENT
    chmod u+x "${RUN_VARIABLE}/agent"
"""
_EXPORTS = {
    ("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP"): (
        f'    export HYDRA_LAUNCHER=ssh HYDRA_LAUNCHER_EXEC="${RUN_VARIABLE}/agent"\n'
    ),
    ("PRTE_MCA_plm",): f'    export PRTE_MCA_plm_ssh_agent="${RUN_VARIABLE}/agent"\n',
}
"""By beginnings of the variables with which a job reaches other nodes in a way of its own."""


def render_script(request: JobRequest) -> str:
    """The whole job script.

    Raises:
        InvalidInputError: a value that cannot be written down, or a directive that pipectl
            manages.
        SchedulerError: no mpiexec, or a launcher of Slurm.
    """
    refuse_srun(request, "jobs on PBS")
    header = "".join(f"#PBS {option}\n" for option in _options(request))
    if request.array is not None:
        body = render_array(request.array, "PBS_ARRAY_INDEX", interpreter(request.template))
        template = without_commands(request.template)
        return assemble(template, header, f"\n{body}", mark="#PBS", directive=_directive)
    launch = request.within(request.command) if request.alone else mpiexec_command(request)
    before = [*_timer(request), *_agent(request)]
    body = render_body(request, launch, before=before, after=_after(request), again=_again())
    log = shell_word(str(request.run_directory / "logs" / "job.log"), "output.directory")
    body = f"\nexec >>{log} 2>&1 # PBS may begin its own file anew\n{body}"
    return assemble(request.template, header, body, mark="#PBS", directive=_directive)


def job_name(request: JobRequest) -> str:
    """The job's name: that of the spec, and what tells this submission from all others.

    PBS has no field for comments, and allows names of more than 200 characters (15 before
    version 10).
    """
    first = "" if request.name[:1].isalpha() else "j"
    return f"{first}{request.name[:_NAME_LENGTH]}{suffix(request.tag)}"


def suffix(tag: str) -> str:
    """How the names of jobs with this tag end."""
    return f".{tag.split()[-1]}"


def _options(request: JobRequest) -> Iterator[str]:
    pbs, directory = request.pbs, str(request.run_directory)
    yield "-S /bin/bash"
    yield f"-N {pbs_value(job_name(request), 'name')}"
    for option, key, value in (
        ("-A", "account", pbs.account),
        ("-P", "project", pbs.project),
        ("-q", "queue", pbs.queue),
        ("-m", "mail", pbs.mail),
        ("-M", "mail_user", pbs.mail_user),
    ):
        if value is not None:
            yield f"{option} {pbs_value(value, f'pbs.{key}')}"
    yield f"-l select={_selection(request)}"
    if place := pbs.place or ("scatter" if request.node_count > 1 else None):
        yield f"-l place={_resource_words(place, 'pbs.place')}"
    yield f"-l walltime={format_clock(request.walltime_s)}"
    again = request.stop is not None and request.stop.requeues
    yield f"-r {'y' if again or request.array else 'n'}"  # PBS takes no array that is not
    yield "-j oe"
    yield "-k doe"
    log = f"pbs.{_INDEX}.log" if request.array else "pbs.log"
    yield f"-o {pbs_path(f'{directory}/logs/{log}', 'output.directory')}"
    if request.array is not None:
        yield from _array_options(request.array)
    if request.after:
        yield f"-W {pbs_value(':'.join(('depend=afterok', *request.after)), 'after')}"
    for directive in pbs.directives:
        yield _directive(directive)


def _array_options(array: Array) -> Iterator[str]:
    if len(array.runs) == 1:
        raise InvalidInputError(
            "sweep: PBS takes no array of a single job",
            cure="give the sweep another point, or its value to the job itself",
        )
    yield f"-J 0-{len(array.runs) - 1}"
    if array.at_once is not None:
        yield f"-W max_run_subjobs={array.at_once}"


def _selection(request: JobRequest) -> str:
    """One chunk a node; what it counts is per chunk."""
    first = MoreNodes(
        request.nodes,
        request.tasks_per_node,
        request.memory_per_node_bytes,
        select_extra=request.pbs.select_extra,
    )
    others = (
        _chunks(request, kind, f"resources.more.{number}.pbs.select_extra")
        for number, kind in enumerate(request.more)
    )
    return "+".join((_chunks(request, first, "pbs.select_extra"), *others))


def _chunks(request: JobRequest, kind: MoreNodes, what: str) -> str:
    """The chunks of nodes that are alike.

    Args:
        what: the key of what is appended to them.
    """
    parts = [
        str(kind.nodes),
        f"ncpus={kind.tasks_per_node * request.cpus_per_task}",
        f"mpiprocs={kind.tasks_per_node}",
        f"ompthreads={request.threads}",
    ]
    if request.gpus_per_node:
        parts.append(f"ngpus={request.gpus_per_node}")
    if kind.memory_per_node_bytes is not None:
        parts.append(f"mem={-(-kind.memory_per_node_bytes // 2**20)}mb")
    if kind.select_extra:
        parts.append(_resource_words(kind.select_extra, what).lstrip(":"))
    return ":".join(parts)


def _resource_words(text: str, what: str) -> str:
    """Within ``-l`` nothing is quoted: only what resources are written with may be there."""
    bad = _BAD_SELECT.search(checked(text, what))
    if bad is None:
        return text
    raise InvalidInputError(
        f"{what}: {bad[0]!r} cannot stand in a resource list of PBS",
        cure="write it as behind -l, for example model=icelake:bigmem=True",
    )


def _timer(request: JobRequest) -> Iterator[str]:
    """PBS sends no signal before the walltime is over. The script gives it to itself.

    A ``read`` that gets nothing waits without a process that would outlive the script.
    """
    stop = request.stop
    if stop is not None:
        wait_s = request.walltime_s - stop.lead_time_s
        yield f"wait_s=$((SECONDS < {wait_s} ? {wait_s} - SECONDS : 1))"
        yield f'(read -rt "$wait_s" <> <(:); kill -s {stop.signal} $$) & timer=$!'


def _agent(request: JobRequest) -> Iterator[str]:
    """For each kind of mpiexec, unless the job's variables say how it reaches other nodes."""
    exports = [export for names, export in _EXPORTS.items() if not request.has_variable(*names)]
    if exports and not request.alone and request.node_count > 1:
        yield f"{_AGENT}{''.join(exports)}fi"


def _after(request: JobRequest) -> Sequence[str]:
    return () if request.stop is None else ('kill "$timer" 2>/dev/null',)


def _again() -> Iterator[str]:
    """Shell lines that submit the script anew; users may not requeue a job themselves."""
    directory = f"${RUN_VARIABLE}"
    error = f'"{directory}/{REQUEUE_ERROR}"'
    yield f"if next=$(qsub -C '#PBS' \"{directory}/job.sh\" 2>{error}); then"
    yield f'    echo "$next" >"{directory}/{RESUBMITTED}.tmp" &&'
    yield f'        mv -f "{directory}/{RESUBMITTED}.tmp" "{directory}/{RESUBMITTED}"'
    yield "else"
    yield f"    cat {error} >&2"
    yield "    echo 'pipectl: this job may not submit another; pipectl resume goes on' >&2"
    yield "fi"


def _directive(text: str, what: str = "pbs.directives") -> str:
    return checked_directive(
        text, what, "qsub", _MANAGED, _is_option, mark="#PBS", example="-p 5", flags=_FLAGS
    )


def _is_option(line: str, option: str) -> bool:
    """Whether a directive is this option, or holds this resource, in any of qsub's spellings."""
    letter, _, resource = option.partition(" ")
    if not line.startswith(letter):
        return False
    if not resource:
        return True
    given = re.split(r"[,\s]+", line.removeprefix(letter).strip())
    return any(word.partition("=")[0].lower() == resource for word in given)  # as qsub does
