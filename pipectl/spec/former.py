"""Keys of earlier versions: what to write instead, and which values still load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipectl.spec.document import resolve

_SBATCH = (
    "qos", "constraint", "reservation", "gres", "licenses", "nodelist", "exclude", "exclusive",
    "mail_type", "mail_user",
)  # fmt: skip
_ADVICE = {
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
_DEFAULTS = {"training.check_replicas": (100,), "checkpoint.on_signal": ("USR1", "USR2")}
"""Values that mean what happens without the key."""


def fault_of_former_key(path: Sequence[str | int]) -> str:
    """What to say about a key of earlier versions; empty for any other key."""
    advice = _ADVICE.get(".".join(map(str, path)))
    return f"is no longer a key; {advice}" if advice else ""


def drop_former_keys(data: dict[str, Any]) -> dict[str, Any]:
    """The sections of a spec without former keys that are empty or have their defaults.

    The job files of old runs hold such keys.
    """

    def is_kept(path: str, data: Any) -> bool:
        value = resolve(data)
        return path not in _ADVICE or (value and value not in _DEFAULTS.get(path, ()))

    return {
        name: {key: value for key, value in section.items() if is_kept(f"{name}.{key}", value)}
        if isinstance(section, dict)
        else section
        for name, section in data.items()
    }
