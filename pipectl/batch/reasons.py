"""What the reasons mean for which jobs wait, and what their users can do."""

from __future__ import annotations

import re

_HELD = re.compile(r"JobHeld|JobHoldMaxRequeue|RequeueExitHold|(.*[ _])?held([ _]|$)")
_RELEASE = "`scontrol {where}release {job}` lets it start"
_OTHER = "it never starts: cancel it, and submit it with"
_IF_NONE = ";\nif there are none, it never starts: cancel it, and lower resources"
_SLURM = {
    "JobHeldAdmin": "an administrator holds it, and alone can release it",
    "launch[ _]failed": f"a node could not start it: see `sinfo -R`; {_RELEASE}",
    _HELD.pattern: _RELEASE,
    "PartitionTimeLimit": f"{_OTHER} less resources.walltime;\n`sinfo -o '%P %l'` shows the limits",
    "PartitionNodeLimit": "it needs more nodes than its partition allows, or than are up:\n"
    "`sinfo -o '%P %s %F'` shows them; resources.nodes asks for fewer",
    "PartitionDown|PartitionInactive": "the site has closed its partition; `sinfo -s` shows others",
    "ReqNodeNotAvail|Nodes[ _]required": "nodes that it needs are down, drained or reserved:\n"
    "`sinfo -R` and `scontrol show reservation` say why",
    "ReservationDeleted": f"{_OTHER} another slurm.options.reservation",
    "BadConstraints": f"{_OTHER} other resources or slurm.options:\nno node has what it asks for",
    "DependencyNeverSatisfied": "it never starts: a job that it waits for has failed",
    "InvalidAccount|AccountNotAllowed|AccountingPolicy": f"{_OTHER} another slurm.account;\n"
    "`sacctmgr show associations user=$USER` lists yours",
    "InvalidQOS|QOSNotAllowed": f"{_OTHER} another slurm.options.qos;\n"
    "`sacctmgr show qos` lists them",
    r"(QOS|Assoc)Grp\w*(Minutes|Wall)|QOSUsageThreshold": "the allowance of its account or QOS "
    "does not suffice;\nask who manages it, or lower resources.walltime",
    "(QOS|Assoc)GrpJobs": "it waits until other jobs of its account or QOS end",
    "(QOS|Assoc)Grp": f"it waits until other jobs of its account or QOS end{_IF_NONE}",
    r"QOSMin|(QOS|Assoc)Max\w*(PerJob|PerNode)": f"{_OTHER} other resources,\nor another "
    "slurm.options.qos; `sacctmgr show qos` shows the limits",
    "(QOS|Assoc)MaxJobs|MaxJobs": "it waits until other jobs of its user or account end",
    "QOSMax|Max.*PerAccount": f"it waits until other jobs of its user or account end{_IF_NONE}",
}
"""What to do about the reasons of Slurm that begin like a pattern; the first one counts."""


def is_held(reason: str) -> bool:
    """Return whether a job of Slurm that waits for this reason starts only once it is released."""
    return bool(_HELD.match(reason))


def slurm_hint(reason: str, job_id: str, cluster: str, *, held: bool) -> str:
    """Return what to do about a job of Slurm that waits for this reason; empty if nothing.

    Args:
        cluster: of the job; empty for the default.
    """
    found = (hint for pattern, hint in _SLURM.items() if re.match(pattern, reason))
    where = f"-M {cluster} " if cluster else ""
    return next(found, _RELEASE if held else "").format(job=job_id, where=where)


def pbs_hint(reason: str, hold: str, job_id: str) -> str:
    """Return what to do about a job of PBS that waits; empty if nothing.

    Args:
        reason: its comment.
        hold: its types of hold, such as ``u`` or ``n``; empty if it waits for another job.
    """
    if "o" in hold or "s" in hold:
        return "an administrator or PBS holds it, and the administrators can release it"
    if "u" in hold:
        return f"`qrls {job_id}` lets it start"
    if reason.lower().startswith("can never run"):
        return "cancel it, and submit with less resources, or another pbs.queue or pbs.select"
    return ""
