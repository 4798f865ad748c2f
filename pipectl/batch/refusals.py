"""What sbatch and qsub say when they refuse a job, and what to do about it.

Only these texts are refusals of the job. After any other, the job may have been accepted:
controllers that are busy, on standby or unreachable answer in many words, and sites add their own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipectl.directives import SBATCH

_COMMAND = re.compile(r"\S*(?:sbatch|qsub)\S*: ")
_FAILED = re.compile(r"(?:error: |fatal: )?(?:batch job submission failed: |allocation failure: )?")
TROUBLES = (
    "busy",
    "cannot connect",
    "communication",
    "connection",
    "end of file",
    "internal error",
    "shutting down",
    "standby",
    "temporarily",
    "timed out",
    "unable to contact",
    "unexpected",
)
"""Parts of what their commands say, in lower case, if the batch system is in trouble."""
Advice = Sequence[tuple[str, str]]
"""Parts of what a command says, in lower case, and what to do; the first match counts."""


def is_refusal(said: str, refusals: Sequence[str], advice: Advice) -> bool:
    """Whether a line of what a command said begins with one of the texts, in lower case.

    A line of the command itself that names an option of ours is a refusal, too: by a rule of the
    site, in words of its own. If the command also met trouble, it has tried more than once, and
    what was refused may be the second of two jobs.
    """
    options = [phrase for phrase, _ in advice if phrase.startswith("-")]
    is_refused = False
    for line in said.lower().splitlines():
        own = _COMMAND.match(line)
        text = line[own.end() :] if own else line
        if own and any(trouble in text for trouble in TROUBLES):
            return False
        is_refused |= _FAILED.sub("", text, count=1).startswith(tuple(refusals))
        is_refused |= bool(own) and any(option in text for option in options)
    return is_refused


SLURM = (
    # Of the controller, as in slurm_errno.c.
    "access denied to requested reservation",
    "access/permission denied",
    "burst buffer permission denied",
    "burst buffer request invalid",
    "burst buffer resource limit exceeded",
    "cannot request more threads per core",
    "circular job dependency",
    "cpu count specification invalid",
    "duplicate generic resource (gres) specification",
    "invalid --",
    "invalid account or account/partition combination",
    "invalid cluster name",
    "invalid feature specification",
    "invalid generic resource (gres) specification",
    "invalid gres specification",
    "invalid group id",
    "invalid job array specification",
    "invalid license specification",
    "invalid mcs_label specified",
    "invalid node name specified",
    "invalid or unknown association",
    "invalid partition",
    "invalid preferred feature specification",
    "invalid qos specification",
    "invalid time specified",
    "invalid time-min specification",
    "invalid trackable resource (tres) specification",
    "invalid user id",
    "invalid wckey specification",
    "job dependency problem",
    "job size specification needs to be provided",
    "job violates accounting/qos policy",
    "memory required by task is not available",
    "memory specification can not be satisfied",
    "more processors requested than permitted",
    "multiple partition job request not supported",
    "no partition specified or system default partition",
    "node count specification invalid",
    "pathname of a file, directory or other parameter too long",
    "requested account has breached requested qos usage threshold",
    "requested node configuration is not available",
    "requested nodes not in this partition",
    "requested operation not supported on this system",
    "requested partition configuration not available",
    "requested reservation is invalid",
    "requested reservation not usable now",
    "requested time limit is invalid",
    "requested topology configuration is not available",
    "required node not available",
    "required partition not available",
    "task count specification invalid",
    "task distribution specification invalid",
    "lua: ",  # rules of the site: what they say comes with the controller's answer
    "unspecified error",
    "user's group not permitted to use this partition",
    # Of sbatch, before it sends anything.
    "batch script contains dos line breaks",
    "batch script is empty",
    "cli_filter plugin terminated with error",  # rules of the site, said before
    "invalid numeric value",
    "this does not look like a batch script",
    'try "sbatch --help"',
    "unrecognized option",
    "unable to open file",
)
SLURM_ADVICE: Advice = (
    (
        "configuration source",
        "Slurm's controller cannot be reached; check the login node or SLURM_CONF,\n"
        "or run on this machine with --scheduler local",
    ),
    (
        "job array specification",
        "the site's job arrays are smaller: `scontrol show config` says MaxArraySize;\n"
        "divide the sweep, or submit its points one by one with --set",
    ),
    (
        "maxsubmit",
        "wait until some of your jobs have ended, or divide the sweep;\n"
        "`sacctmgr show qos` lists the limits",
    ),
    (
        "accounting/qos policy",
        "lower resources or resources.walltime, or set slurm.options.qos or slurm.account\n"
        "to one with other limits; `sacctmgr show qos` lists the limits",
    ),
    (
        "invalid account",
        "set slurm.account, and a slurm.partition that it may use;\n"
        "`sacctmgr show associations user=$USER` lists yours",
    ),
    ("--comment", "set slurm.options.comment to what the site wants; false leaves it out"),
    ("partition", "set slurm.partition; `sinfo -s` lists what there is"),
    ("account", "set slurm.account; `sacctmgr show associations user=$USER` lists yours"),
    ("qos", "set slurm.options.qos; `sacctmgr show qos` lists what there is"),
    (
        "gres",
        "set resources.gpus_per_node to what `sinfo -o '%P %G'` shows; if the site has\n"
        "another name for them: slurm.options: {gpus-per-node: false, gres: NAME:COUNT}",
    ),
    (
        "memory specification",
        "lower resources.memory_per_node; `sinfo -o '%P %m'` shows MB per node",
    ),
    (
        "memory",  # a rule of the site, in its own words
        "set slurm.options.mem-per-cpu in place of resources.memory_per_node, or\n"
        "slurm.options.mem: false if the site wants no memory in a job",
    ),
    ("node configuration", "lower resources; `sinfo -o '%P %D %c %m %G'` shows the nodes"),
    ("time limit", "lower resources.walltime; `sinfo -o '%P %l'` shows the limits"),
    ("unrecognized option", "correct slurm.options"),
    *(
        (f"--{option}", f"slurm.options.{option}: false leaves it out")
        for option in SBATCH.replacements
    ),
)
PBS = (
    # Of the server, as in pbs_messages.c.
    '"-lresource=" cannot be used with',
    '"max_walltime"',
    '"min_walltime"',
    "access from host not allowed",
    "access to queue is denied",
    "array job exceeds server or queue size limit",
    "attribute value is out of range",
    "bad gid for job execution",
    "bad time specification",
    "bad uid for job execution",
    "cannot be used with select or place",
    'cannot have "place" without "select"',
    "cannot set attribute",
    "duplicate entry in list",
    "duplicated resource within a section",
    "hook rejected request",
    "illegal ",
    "invalid account",
    "invalid job dependency",
    "job and reservation have conflicting specification",
    "job rejected by all possible destinations",
    "job violates queue and/or server resource limits",
    "jobscript size exceeded",
    "maximum number of jobs already",
    "maximum number of jobs for",
    "maximum number of jobs in",
    "mutually exclusive values",
    "name is too long",
    "no default queue specified",
    "no support for requested service",
    "node(s) specification error",
    "queue is not enabled",
    "resource invalid in",
    "resource limit exceeds allowable",
    "unauthorized request",
    "undefined attribute",
    "unknown queue",
    "unknown reservation id",
    "unknown resource",
    "would exceed",
    # Of qsub, before it sends anything.
    "script contains cr, lf",
    "script file:",
    "usage: qsub",
)
_WHOLE = "all of `-l select`, such as 2:ncpus=64"
_TOTALS = (
    "set pbs.select: false; the job then asks for the totals of its nodes\n"
    "with `-l ncpus=` and `-l mem=`, and pbs.options.l overrules these"
)
PBS_ADVICE: Advice = (
    ("max_run_subjobs", "this PBS limits no arrays: leave sweep.at_once out"),
    ("-k value", "set pbs.options.k: false; PBS then writes logs/pbs.log when the job ends"),
    ("usage:", "correct pbs.options"),
    ("-l select", _TOTALS),
    ("-lselect", _TOTALS),
    ("-l ncpus", _TOTALS),
    ("-lncpus", _TOTALS),
    ("array job exceeds", "the site's job arrays are smaller: divide the sweep"),
    *(
        (
            words,
            "wait until some of your jobs have ended, or set pbs.queue to one with room;\n"
            "`qstat -Qf` shows the limits",
        )
        for words in ("maximum number of jobs", "would exceed")
    ),
    ("resource limits", "lower resources or resources.walltime; `qstat -Qf` shows the limits"),
    ("queue", "set pbs.queue; `qstat -Q` lists what there is"),
    ("account", "set pbs.account, or pbs.options.P if the site charges projects"),
    ("project", "set pbs.options.P"),
    ("ngpus", f"ask the site what it calls its accelerators, and use pbs.select: {_WHOLE}"),
    (
        "unknown resource",
        "correct pbs.select, or replace what pipectl asks for of each node:\n"
        f"{_WHOLE}; `pbsnodes -a` shows what nodes have",
    ),
    ("walltime", "lower resources.walltime; `qstat -Qf` shows the limits"),
    ("select", "lower resources; `pbsnodes -a` shows the nodes"),
    ("illegal attribute", "correct pbs.options"),
    ("cannot connect", "PBS's server cannot be reached; check the login node or PBS_SERVER"),
)
