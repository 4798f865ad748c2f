"""Keys of earlier versions: what to write instead, and which may stay in the jobs of old runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipectl.spec.document import resolve

_SBATCH = (
    "qos", "constraint", "reservation", "gres", "licenses", "nodelist", "exclude", "exclusive",
    "mail_type", "mail_user",
)  # fmt: skip
_FORMER_KEYS = {
    "training.check_replicas": (
        "remove it: replicas are compared every 100 steps and before every checkpoint"
    ),
    "pipeline.offload_directory": "write environment.variables: {TMPDIR: ...}",
    "resources.more": "a job has nodes of one kind; ask for what the largest stage needs",
    "launch.progress_core": "write launch.progress: core",
    "launch.check_messages": "write environment.variables: {PIPECTL_CHECK_MESSAGES: 1}",
    "checkpoint.on_signal": "remove it",
    **{
        f"slurm.{name}": f"write slurm.options: {{{name.replace('_', '-')}: ...}}"
        for name in _SBATCH
    },
    "slurm.omit": "write slurm.options: {time: false}, say, for one that is not to be written",
    "slurm.directives": "write slurm.options: {gres: gpu:1}, say, for --gres=gpu:1",
    "pbs.project": "write pbs.options: {P: ...}",
    "pbs.place": "write pbs.options: {l: [place=...]}",
    "pbs.select_extra": "write pbs.select: ...",
    "pbs.mail": "write pbs.options: {m: ...}",
    "pbs.mail_user": "write pbs.options: {M: ...}",
    "pbs.directives": "write pbs.options: {p: 5}, say, for -p 5",
}
"""Keys of earlier versions, and what to write instead."""
_FORMER_DEFAULTS = {"training.check_replicas": (100,), "checkpoint.on_signal": ("USR1", "USR2")}
"""Their values that mean what happens without the key."""


def fault_of_former_key(path: Sequence[str | int]) -> str:
    """What to say about a key of earlier versions; empty for any other key."""
    advice = _FORMER_KEYS.get(".".join(map(str, path)))
    return f"is no longer a key; {advice}" if advice else ""


def drop_former_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a spec without former keys that are empty or have their defaults.

    The job files of old runs hold such keys.
    """
    kept = dict(data)
    for path in _FORMER_KEYS:
        name, _, key = path.partition(".")
        section = kept.get(name)
        if isinstance(section, dict) and key in section:
            value = resolve(section[key])
            if not value or value in _FORMER_DEFAULTS.get(path, ()):
                kept[name] = {other: item for other, item in section.items() if other != key}
    return kept
