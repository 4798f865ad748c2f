"""Rendered scripts against checked-in copies. To accept a change: ``make golden``."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.batch import (
    Array,
    Container,
    JobRequest,
    MoreNodes,
    PbsOptions,
    SlurmOptions,
    Stop,
    Template,
    get,
)

GOLDEN = Path(__file__).parents[2] / "slurm" / "golden"

WORKER = ("-m", "mpi4py", "-m", "pipectl.runtime.worker", "--run")
SMALL = JobRequest(
    name="gpt-small",
    tag="7f3a9c",
    run_directory=Path("/scratch/u/runs/20261120-152233-gpt-small"),
    python="/opt/env/bin/python",
    ranks=4,
    nodes=2,
    tasks_per_node=2,
    walltime_s=1800,
    command=("/opt/env/bin/python", *WORKER, "/scratch/u/runs/20261120-152233-gpt-small"),
    mpiexec="/opt/env/bin/mpiexec",
)
FULL = replace(
    SMALL,
    run_directory=Path("/scratch/u/my runs/100%"),
    command=("/opt/env/bin/python", *WORKER, "/scratch/u/my runs/100%"),
    cpus_per_task=16,
    gpus_per_node=4,
    memory_per_node_bytes=240 * 2**30,
    walltime_s=36 * 3600,
    modules=("gcc/13.2", "openmpi/5.0.6"),
    setup=("source /proj/venv/bin/activate", "ulimit -s unlimited"),
    variables={"UCX_TLS": "tcp,self", "GREETING": 'it\'s "here"'},
    prepare=(("/opt/env/bin/python", "-m", "pipectl.jobs.prepare", "/scratch/u/my runs/100%"),),
    launcher="srun",
    mpi="pmix",
    bind="cores",
    launch_args=("--label",),
    slurm=SlurmOptions(
        partition="gpu",
        account="proj123",
        qos="normal",
        constraint="a100&nvlink",
        reservation="maintenance week",
        exclusive=True,
        gres="nvme:1",
        licenses="matlab:2",
        nodelist="n[1-2]",
        exclude="n7",
        mail_type="END,FAIL",
        mail_user="a@b.org",
        directives=("--switches=1",),
    ),
    pbs=PbsOptions(
        queue="gpu",
        account="proj 123",
        project="climate",
        place="scatter:excl",
        select_extra="model=icelake",
        mail="ae",
        mail_user="a@b.org",
        directives=("-W group_list=physics",),
    ),
)
KINDS = replace(
    SMALL,
    ranks=9,
    slurm=SlurmOptions(partition="batch", account="proj 1", constraint="icelake", exclusive=True),
    pbs=PbsOptions(select_extra="model=icelake"),
    more=(
        MoreNodes(1, 4, 2**40, SlurmOptions(constraint="bigmem"), "bigmem=True"),
        MoreNodes(1, 1, slurm=SlurmOptions(partition="gpu", gres="nvme:1")),
    ),
)
STOP = Stop(requeues=3)
IMAGE = Container("/proj/my image.sif", (Path("/scratch/u/my runs/100%"), Path("/home/u")), True)
TEMPLATE = Template(
    "site.sh",
    """\
#!/bin/bash -l
# Every job of this group keeps its scratch files apart, and removes them.
#SBATCH --switches=1
#PBS -p 5
#pipectl directives

set -eu
scratch=$(mktemp -d)
export TMPDIR=$scratch
trap 'rm -rf "$scratch"' EXIT

#pipectl body
""",
)
RUNS = tuple(Path(f"/scratch/u/my runs/100%/20261120-152233-it's-{i}") for i in range(3))
SWEEP = Path("/scratch/u/my runs/100%/sweeps/20261120-152233-it's")
ARRAY = replace(FULL, run_directory=SWEEP, stop=STOP, array=Array(RUNS, 2))
DRIVER = ("/opt/env/bin/python", "-m", "pipectl.jobs.sweep_driver", str(SWEEP))
CASES = {
    "local-array.sh": ("local", replace(ARRAY, launcher="mpiexec", command=DRIVER)),
    "pbs-array.sh": ("pbs", replace(ARRAY, launcher="mpiexec", mpi="auto", after=("41.vm",))),
    "slurm-array.sh": ("slurm", replace(ARRAY, after=("41", "42_1"))),
    "slurm-array-template.sh": (
        "slurm",
        replace(SMALL, run_directory=SWEEP, array=Array(RUNS), template=TEMPLATE),
    ),
    "local.sh": ("local", replace(SMALL, stop=STOP)),
    "local-template.sh": ("local", replace(SMALL, template=TEMPLATE)),
    "local-full.sh": ("local", replace(FULL, launcher="mpiexec", mpi="hydra", launch_args=())),
    "pbs.sh": ("pbs", SMALL),
    "pbs-cray.sh": ("pbs", replace(SMALL, mpi="cray", bind="cores", cpus_per_task=4)),
    "pbs-hydra.sh": ("pbs", replace(SMALL, mpi="hydra", bind="numa", cpus_per_task=4)),
    "pbs-intel.sh": ("pbs", replace(SMALL, mpi="intel", bind="cores", cpus_per_task=4)),
    "pbs-full.sh": (
        "pbs",
        replace(FULL, launcher="mpiexec", mpi="openmpi", stop=STOP, after=("41.vm",)),
    ),
    "pbs-template.sh": ("pbs", replace(SMALL, stop=STOP, template=TEMPLATE)),
    "slurm-template.sh": ("slurm", replace(SMALL, stop=STOP, template=TEMPLATE)),
    "slurm-mpiexec.sh": ("slurm", SMALL),
    "slurm-container.sh": ("slurm", replace(FULL, container=IMAGE, launch_args=())),
    "slurm-openmpi.sh": ("slurm", replace(FULL, launcher="mpiexec", mpi="openmpi", stop=STOP)),
    "slurm-kinds.sh": ("slurm", replace(KINDS, stop=STOP)),
    "slurm-kinds-srun.sh": ("slurm", replace(KINDS, launcher="srun", mpi="pmix")),
    "pbs-kinds.sh": ("pbs", KINDS),
    "slurm-numa.sh": ("slurm", replace(SMALL, launcher="srun", mpi="pmi2", bind="numa")),
    "slurm-omit.sh": (
        "slurm",
        replace(
            SMALL,
            cpus_per_task=16,
            gpus_per_node=4,
            launcher="srun",
            mpi="pmix",
            slurm=SlurmOptions(gres="gpu:4", omit=("cpus-per-task", "gpus-per-node", "time")),
        ),
    ),
    "slurm-srun.sh": ("slurm", replace(FULL, stop=Stop("USR1", 90), after=("41", "42"))),
}


@pytest.mark.parametrize("name", CASES)
def test_script_is_the_golden_one(name: str) -> None:
    scheduler, request = CASES[name]
    script = get(scheduler).render(request)
    path = GOLDEN / name
    if os.environ.get("PIPECTL_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
    assert script == path.read_text(), f"{path} differs; if that is intended: make golden"


def test_no_golden_script_is_left_over() -> None:
    assert {path.name for path in GOLDEN.glob("*.sh")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_golden_script_is_valid_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(GOLDEN / name)], check=True)


@pytest.mark.parametrize("name", CASES)
def test_golden_script_passes_shellcheck(name: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", "--severity=warning", str(GOLDEN / name)], check=True)
