"""Names of batch systems, and options of sbatch and qsub that a spec may set."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

SCHEDULERS = ("local", "here", "slurm", "pbs")
"""Names of pipectl's own batch systems; ``local`` is this machine, and ``here`` the allocation in
which the command runs."""
SCHEDULER_GROUP = "pipectl.schedulers"
"""Entry points of packages that add batch systems."""
Value = str | bool | tuple[str, ...]
"""Value of an option: text; true for an option without a value; false for an option that is not
written; several texts for an option that is written several times."""

RESOURCES = re.compile(r"[A-Za-z0-9_=:.,+*~/@-]*")
"""Characters allowed in ``-l`` of qsub, which is not quoted."""
GPUS = re.compile(r"(?:gres[/:])?gpu(?:[:/](?![0-9]+(?:[:=]|$))([^:=]+))?(?:[:=]([0-9]{1,9}))?")
"""GPUs in a list of resources of Slurm, with type and number: ``gpu:1g.5gb:4``, ``gres/gpu=2``."""
PBS_GPUS = re.compile(r"\b(n?gpus?|n?accelerators?)=([0-9]{1,9})\b")
"""GPUs in a list of resources of PBS, with the name that the site gives them."""
SELECT_COUNT = re.compile(r"([0-9]{1,9})(?::|$)")
"""The number of chunks at the begin of all of ``-l select``."""
_LETTERS = {"D": "chdir", "c": "cpus-per-task", "t": "time"}
_LOG = "remove it; output and errors are in logs/job.log"


class Syntax(NamedTuple):
    """How a batch system reads options.

    Args:
        command: command that reads the options.
        name: pattern of an option name without dashes.
        flags: letters of options without a value; other letters may follow in the same word.
        taken: options that no job may set, and what to do instead.
        dependencies: options that pipectl writes if a job waits for other jobs.
        replacements: options of pipectl that a job can do without. One is not written if the job's
            options contain a name on the right, even with the value false.
        spells: takes an option as written and a table entry; whether they are the same option.
    """

    command: str
    name: str
    flags: str
    taken: Mapping[str, str]
    dependencies: tuple[str, ...]
    replacements: Mapping[str, tuple[str, ...]]
    spells: Callable[[str, str], bool]

    def find(self, name: str, text: str | None, table: Iterable[str]) -> str | None:
        """Return the table entry for an option with its dashes, or None."""
        written = f"{name} {text or ''}"
        return next((entry for entry in table if self.spells(written, entry)), None)


def _spells_sbatch(written: str, option: str) -> bool:
    """Long options may be abbreviated; sbatch itself refuses an ambiguous abbreviation."""
    name = written.replace("=", " ").split()[0]
    long, _, short = option.partition(" ")
    return (name.startswith("--") and long.startswith(name)) or bool(
        short and name.startswith(short)
    )


def _spells_qsub(written: str, option: str) -> bool:
    """An entry is a one-letter option, or a resource or attribute of ``-l`` or ``-W``."""
    letter, _, name = option.partition(" ")
    parts = re.split(r"[,\s]+", written[2:].strip())
    names = [part.partition("=")[0].lower() for part in parts]  # PBS ignores case
    return written.startswith(letter) and (not name or name in names)


SBATCH = Syntax(
    command="sbatch",
    name="[A-Za-z]|[a-z0-9][a-z0-9-]*[a-z0-9]",
    flags="hHIkOQRsuvVW",
    taken={
        "--account -A": "set slurm.account",
        "--array -a": "remove it; a sweep of the job spec becomes an array",
        "--chdir -D": "remove it; jobs run in their run directory",
        "--cpus-per-task -c": "set resources.cpus_per_task",
        "--error -e": "remove it; errors are in logs/job.log",
        "--export": "set environment.inherit or environment.variables in the job spec",
        "--help -h": "remove it",
        "--job-name -J": "set name",
        "--no-requeue": "set checkpoint.max_requeues: 0",
        "--nodes -N": "set resources.nodes",
        "--ntasks -n": "set resources.tasks_per_node in the job spec",
        "--ntasks-per-node": "set resources.tasks_per_node",
        "--open-mode": _LOG,
        "--output -o": _LOG,
        "--partition -p": "set slurm.partition",
        "--requeue": "set checkpoint.max_requeues",
        "--signal": "set checkpoint.lead_time",
        "--tasks-per-node": "set resources.tasks_per_node",
        "--test-only": "remove it; `pipectl submit --test-only` asks Slurm",
        "--time -t": "set resources.walltime",
        "--usage": "remove it",
        "--version -V": "remove it",
        "--wait -W": "remove it; `pipectl submit --wait` waits",
        "--wrap": "remove it",
    },
    dependencies=("--dependency -d", "--kill-on-invalid-dep"),
    replacements={
        "chdir": ("chdir",),
        "comment": ("comment",),
        "cpus-per-task": ("cpus-per-task",),
        "gpus-per-node": ("gpus-per-node",),
        "mem": ("mem", "mem-per-cpu", "mem-per-gpu"),
        "ntasks-per-node": ("ntasks-per-node",),
        "open-mode": ("open-mode",),
        "signal": ("signal",),
        "time": ("time",),
    },
    spells=_spells_sbatch,
)
QSUB = Syntax(
    command="qsub",
    name="[A-Za-z]",
    flags="fhIVXz",
    taken={
        "-C": "remove it",
        "-I": "remove it; pipectl's jobs are not interactive",
        "-J": "remove it; a sweep of the job spec becomes an array",
        "-V": "set environment.inherit: all in the job spec",
        "-f": "remove it",
        "-z": "remove it; pipectl needs the job's id",
        "-W block": "remove it; `pipectl submit --wait` waits",
        "-W interactive": "remove it; pipectl's jobs are not interactive",
        # If a resource is given twice, qsub uses the first.
        "-l nodes": "set resources.nodes in the job spec",
        "-l select": "set resources in the job spec, or pbs.select",
        "-l walltime": "set resources.walltime in the job spec",
        "-A": "set pbs.account",
        "-N": "set name",
        "-S": "remove it; job scripts use bash",
        "-e": _LOG,
        "-j": _LOG,
        "-k": _LOG,
        "-o": _LOG,
        "-q": "set pbs.queue",
        "-r": "set checkpoint.max_requeues",
    },
    dependencies=("-W depend",),
    replacements={"S": ("S",), "j": ("j",), "k": ("k",)},
    spells=_spells_qsub,
)


SYNTAXES = {"slurm": SBATCH, "pbs": QSUB}
"""The syntax of each batch system by name."""


def packaged_schedulers() -> tuple[str, ...]:
    """Return the names of the batch systems that installed packages add."""
    from importlib.metadata import entry_points

    return tuple(sorted(entry_points(group=SCHEDULER_GROUP).names))


def fault_of_option(syntax: Syntax, name: str, value: Value) -> str:
    """Return why a job may not set an option to a value and what to do; empty if it may."""
    if not re.fullmatch(syntax.name, name):
        plain = name.lstrip("-").replace("_", "-")
        form = "of one letter" if syntax is QSUB else "such as mail-type, or of one letter"
        words = f"; write {plain}" if re.fullmatch(syntax.name, plain) else f", {form}"
        return f"is no option of {syntax.command} without its dashes{words}"
    if value is False:
        if name in syntax.replacements:
            return ""
        if syntax is SBATCH and name in _LETTERS:
            return f"cannot be false; write {_LETTERS[name]}: false"
        *others, last = syntax.replacements
        dropped = "leave it out, or write null to drop that of a site file"
        return f"cannot be false, as {', '.join(others)} and {last} can; {dropped}"
    faults = (_fault_of_text(syntax, *option) for option in options_of(name, value))
    if (fault := next(filter(None, faults), "")) or syntax is QSUB or len(name) == 1:
        return fault
    for whole in chain(*syntax.replacements.values()):  # a shorter prefix is ambiguous
        if whole != name and whole.startswith(name) and len(name) > whole.rfind("-") + 1:
            return f"cannot be abbreviated; write {whole}"
    return ""


def _fault_of_text(syntax: Syntax, dashed: str, text: str | None) -> str:
    letter, hints = dashed[1:], syntax.taken
    if entry := syntax.find(dashed, text, hints):
        name = entry.partition(" ")[0].lstrip("-")
        more = f"; {name}: false leaves out pipectl's own" if name in syntax.replacements else ""
        return f"cannot be set here; {hints[entry]}{more}"
    is_flag = letter in tuple(syntax.flags)
    if is_flag and text is not None:  # sbatch and qsub would read it as further options
        return f"takes no value; write {letter}: true"
    if syntax is QSUB and not is_flag and text is None:
        return "needs a value"
    is_mixed = not re.fullmatch("depend=[^=]*", text or "", re.IGNORECASE)
    if syntax is QSUB and is_mixed and syntax.find(dashed, text, syntax.dependencies):
        # The script leaves out its line when it submits itself again.
        return "depend must stand alone; write a list: W: [depend=..., umask=...]"
    if syntax is QSUB and letter == "l" and not RESOURCES.fullmatch(text or ""):
        return f"{text!r} cannot stand in a resource list of PBS, such as place=scatter:excl"
    return ""


def find_option(syntax: Syntax, options: Mapping[str, Value], table: Iterable[str]) -> str | None:
    """Return the name of the first option that matches a table entry, or None."""
    for name, value in options.items():
        if any(syntax.find(*written, table) for written in options_of(name, value)):
            return name
    return None


def options_of(name: str, value: Value) -> Iterator[tuple[str, str | None]]:
    """Yield the option with its dashes, and its value, once for each time that it is written."""
    if value is not False:
        dashed = f"-{name}" if len(name) == 1 else f"--{name}"
        for text in value if isinstance(value, tuple) else (value,):
            yield dashed, None if isinstance(text, bool) else text
