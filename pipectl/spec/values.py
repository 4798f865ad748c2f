"""The types of the spec's fields: a Python type with the kind of scalar it is read from."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from pipectl.spec import references
from pipectl.spec.kinds import (
    Kind,
    any_text,
    auto,
    auto_list,
    choice,
    duration,
    flag,
    positive_number,
    size,
    text,
    walltime,
    whole,
)
from pipectl.spec.schedules import BUILT_IN, schedule
from pipectl.spec.section import without_nulls
from pipectl.spec.tree import Scalar
from pipectl.units import is_name

VERSION = 1
_READONLY = ("BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID")


def _name_fault(name: str) -> str | None:
    if is_name(name):
        return None
    return f"must be letters, digits, '.', '_' or '-', at most 64, not {name[:80]!r}"


def _variable_fault(name: str) -> str | None:
    if not (name.isascii() and name.isidentifier()):
        return "is no variable name; use letters, digits and '_'"
    if name.upper().startswith("PIPECTL_"):
        return "is pipectl's own: the job script sets what begins with PIPECTL_"
    return "cannot be set: bash forbids it" if name in _READONLY else None


def _directive_fault(directive: str) -> str | None:
    if directive.startswith("#"):
        return f"must be the option alone, without #SBATCH or #PBS, not {directive[:60]!r}"
    if not directive.startswith("-"):
        return f"must be an option such as --gres=gpu:1, not {directive[:60]!r}"
    return None


def _weight_fault(weight: str) -> str | None:
    return None if weight == "samples" else references.fault_of(weight)


def _loss_fault(loss: str) -> str | None:
    return None if loss == "model" else references.fault_of(loss)


def _version() -> Kind:
    def read(scalar: Scalar) -> int:
        if scalar.value != VERSION or isinstance(scalar.value, bool):
            raise ValueError(f"is {scalar}; this pipectl reads version {VERSION}")
        return VERSION

    return Kind(f"{VERSION}", {"const": VERSION}, read)


def _replicas() -> Kind:
    """A number, or ``any``: as many of each stage as serve the step best."""
    number = whole(1)

    def read(scalar: Scalar) -> int | str:
        found: int | str = "any" if scalar.text == "any" else number.read(scalar)
        return found

    return Kind(f"any or {number.words}", {"anyOf": [{"const": "any"}, number.schema]}, read)


Line = Annotated[str, text()]
Reference = Annotated[
    str, text("./file.py:name or package.module:name", references.fault_of, pattern=":")
]
LossReference = Annotated[
    str, text("model, ./file.py:name or package.module:name", _loss_fault, pattern="^model$|:")
]
WeightReference = Annotated[
    str,
    text("samples, ./file.py:name or package.module:name", _weight_fault, pattern="^samples$|:"),
]
Count = Annotated[int, whole(1)]
Natural = Annotated[int, whole(0)]
Flag = Annotated[bool, flag()]
Bytes = Annotated[int, size()]
Seconds = Annotated[int, duration()]
Walltime = Annotated[int, walltime()]
Positive = Annotated[float, positive_number()]
JobName = Annotated[str, text("a name", _name_fault)]
Version = Annotated[int, _version()]
Directive = Annotated[str, text("an option such as --gres=gpu:1", _directive_fault, pattern="^-")]
VariableName = Annotated[str, text("a variable name", _variable_fault)]
Variables = Annotated[dict[VariableName, Line], BeforeValidator(without_nulls)]
Script = Annotated[str, any_text()]
Kwargs = dict[str, Any]
AutoCount = Annotated[int | None, auto(whole(1))]
AutoCounts = Annotated[tuple[Count, ...] | None, auto_list("a list of whole numbers, one a stage")]
AutoReplicas = Annotated[int | str | None, auto(_replicas())]
Schedule = Annotated[str | None, schedule(auto(choice("auto", *BUILT_IN, later=("2bw",))))]
Recompute = Annotated[str | None, auto(choice("auto", "none", "all", "blocks"))]
Offload = Annotated[str | None, auto(choice("auto", "none", "host", "disk"))]
Backward = Annotated[str | None, auto(choice("auto", "together", "apart"))]
Precision = Annotated[str, choice("float32", "bf16", "float16", later=("mixed", "float64", "tf32"))]
OnNonfinite = Annotated[str, choice("stop", "skip", "ignore")]
Materialize = Annotated[str, choice("eager", "per_rank")]
Scheduler = Annotated[str, choice("auto", "local", "slurm", "pbs")]
Launcher = Annotated[str, choice("auto", "srun", "mpiexec")]
StopSignal = Annotated[str, choice("USR2", "USR1")]
Omitted = Annotated[str, choice("cpus-per-task", "gpus-per-node", "time")]
Binding = Annotated[str, choice("none", "cores", "numa")]
Progress = Annotated[str, choice("auto", "none", "poll", "thread")]
GpuAware = Annotated[str, choice("auto", "always", "never")]
