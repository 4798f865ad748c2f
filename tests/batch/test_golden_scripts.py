"""Five scripts that show everything, against checked-in copies; ``make golden`` accepts changes."""

import shutil
import subprocess
from pathlib import Path

import pytest
from job_requests import change, make_request

from pipectl.batch import Array, Template, get_scheduler
from pipectl.jobs.job import IN_JOB
from pipectl.spec.models import Checkpoint

GOLDEN = Path(__file__).parents[2] / "slurm" / "golden"

WORKER = ("-m", "mpi4py", "-m", "pipectl.runtime.worker", "--run")
SMALL = make_request(
    Path("/scratch/u/runs/20261120-152233-gpt-small"),
    name="gpt-small",
    tag="7f3a9c",
    nodes=2,
    walltime=1800,
    command=("/opt/env/bin/python", *WORKER, "/scratch/u/runs/20261120-152233-gpt-small"),
)
FULL = change(
    SMALL,
    run_directory=Path("/scratch/u/my runs/100%"),
    command=("/opt/env/bin/python", *WORKER, "/scratch/u/my runs/100%"),
    cpus_per_task=16,
    gpus_per_node=4,
    memory_per_node=240 * 2**30,
    walltime=36 * 3600,
    modules=("gcc/13.2", "openmpi/5.0.6"),
    setup=("source /proj/venv/bin/activate", "ulimit -s unlimited"),
    variables={"UCX_TLS": "tcp,self", "GREETING": 'it\'s "here"'},
    first_command=("/opt/env/bin/python", "-m", IN_JOB, "/scratch/u/my runs/100%"),
    args=("--label",),
    bind="cores",
    container="/proj/my image.sif",
    binds=(Path("/scratch/u/my runs"), Path("/home/u")),
    slurm={
        "partition": "gpu",
        "account": "proj 1",
        "options": {
            "constraint": "a100&nvlink",
            "reservation": "maintenance week",
            "mail-type": "END,FAIL",
            "exclusive": True,
            "x": "node[3-4]",
            "gpus-per-node": False,
        },
    },
    pbs={
        "queue": "gpu",
        "account": "proj 123",
        "select": "model=icelake",
        "options": {
            "P": "climate",
            "l": ("place=scatter:excl", "software=matlab"),
            "M": "a@b.org",
            "h": True,
        },
    },
)
STOP = Checkpoint(max_requeues=3)
TEMPLATE = Template(
    "site.sh",
    """\
{% extends base %}
{## Every job of this group keeps its scratch files apart, and removes them. ##}
{% block shebang %}#!/bin/bash -l{% endblock %}
{% block directives %}
#SBATCH --switches=1
{% endblock %}
{% block setup %}
scratch=$(mktemp -d /scratch/{{ job.name }}.XXXXXX)
export TMPDIR=$scratch
{% endblock %}
{% block at_exit %}
    rm -rf "${scratch-}"
{% endblock %}
""",
)
RUNS = tuple(Path(f"/scratch/u/my runs/100%/20261120-152233-it's-{i}") for i in range(3))
CASES = {
    "local.sh": ("local", SMALL),
    "pbs.sh": (
        "pbs",
        change(FULL, mpi="openmpi", checkpoint=STOP, after=("41.vm",)),
    ),
    "slurm-srun.sh": (
        "slurm",
        change(
            FULL,
            launcher="srun",
            mpi="pmix",
            checkpoint=Checkpoint(lead_time=90, max_requeues=0),
            after=("41", "42"),
        ),
    ),
    "slurm-template.sh": ("slurm", change(SMALL, checkpoint=STOP, template=TEMPLATE)),
    "slurm-array.sh": (
        "slurm",
        change(FULL, run_directory=RUNS[0].parent / "sweeps/x", array=Array(RUNS, 2)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_script_is_the_golden_one(snapshot, name):
    scheduler, request = CASES[name]
    script = get_scheduler(scheduler).render(request)
    snapshot(GOLDEN / name, script)


def test_no_golden_script_is_left_over():
    assert {path.name for path in GOLDEN.glob("*.sh")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_golden_script_is_valid_bash_and_passes_shellcheck(name):
    subprocess.run(["bash", "-n", str(GOLDEN / name)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", "--severity=warning", str(GOLDEN / name)], check=True)
