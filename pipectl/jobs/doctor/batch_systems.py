"""Slurm and PBS, as far as their commands tell."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from pipectl.batch.dialects import AUTO
from pipectl.batch.pmi import offered, takes
from pipectl.errors import PipectlError
from pipectl.jobs.doctor.finding import Finding, Findings, Level, said

if TYPE_CHECKING:
    from pipectl.spec import JobSpec


def slurm(spec: JobSpec | None) -> Findings:
    """Whether Slurm answers, and what its srun offers."""
    if not shutil.which("sbatch"):
        yield Finding("Slurm", Level.OK, "not installed")
        return
    cure = "ask the site, or set SLURM_CONF; jobs run here with --scheduler local"
    try:
        known = said(["sinfo", "--version"], cure)
        partitions = said(["sinfo", "-h", "-o", "%P"], cure).split()
    except PipectlError as error:
        yield Finding("Slurm", Level.FAIL, error.message, cure)
        return
    yield Finding("Slurm", Level.OK, f"{known}; partitions {', '.join(partitions) or 'none'}")
    with suppress(PipectlError):
        yield _pmi(said(["srun", "--mpi=list"], ""), spec)


def _pmi(listed: str, spec: JobSpec | None) -> Finding:
    """What ``srun --mpi`` may be given, against what the job gives it."""
    kinds = offered(listed)
    wanted = AUTO if spec is None or spec.launch.launcher != "srun" else spec.launch.mpi
    text = f"srun --mpi: {', '.join(kind for kind in kinds if kind != 'none') or 'none'}"
    if wanted == AUTO or takes(kinds, wanted):
        return Finding("PMI", Level.OK, text)
    cure = "set launch.mpi to one of them, as your MPI needs it"
    return Finding("PMI", Level.FAIL, f"{text}; the job wants {wanted}", cure)


def pbs() -> Findings:
    """Whether PBS answers, where there is no Slurm."""
    if shutil.which("sbatch") or not (shutil.which("qsub") and shutil.which("qselect")):
        return
    cure = "ask the site, or set PBS_SERVER; jobs run here with --scheduler local"
    try:
        known = said(["qstat", "--version"], cure)
        server = said(["qstat", "-B", "-f"], cure)
    except PipectlError as error:
        yield Finding("PBS", Level.FAIL, error.message, cure)
        return
    yield Finding("PBS", Level.OK, known)
    if not re.search(r"^\s*flatuid\s*=\s*True\s*$", server, re.MULTILINE | re.IGNORECASE):
        text = "flatuid is not set: jobs may not be able to submit themselves again"
        advice = "ask the site for `set server flatuid = True`; else go on with pipectl resume"
        yield Finding("PBS requeue", Level.WARN, text, advice)
