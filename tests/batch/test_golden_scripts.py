"""Five scripts that show everything, and what further fields change in a script, against checked-in
copies; ``make golden`` accepts changes."""

import shutil
import subprocess
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
from job_requests import change, make_request

from pipectl.batch import Array, Template, get_scheduler
from pipectl.directives import REPLACEMENTS
from pipectl.errors import PipectlError
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
def test_a_script_is_the_golden_one_and_valid_bash(snapshot, name):
    scheduler, request = CASES[name]
    snapshot(GOLDEN / name, get_scheduler(scheduler).render(request))
    assert {path.name for path in GOLDEN.glob("*.sh")} == set(CASES)
    subprocess.run(["bash", "-n", str(GOLDEN / name)], check=True)
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", "--severity=warning", str(GOLDEN / name)], check=True)


GPUS = {"gpus_per_node": 2, "memory_per_node": 2**30}
SITE = {"qos": "a b", "exclusive": True, "x": "node[1-2]", "s": True, "bb": ("x", "y")}
ALONE = {"alone": True, "command": ("measure", "this model")}
OF_SLURM: list[dict[str, Any]] = [
    {"memory_per_node": 2**20 + 1},
    {"slurm": {"partition": "gpu", "account": "it's", "options": SITE}},
    {**GPUS, "launcher": "srun", "mpi": "pmi2"},
    {**GPUS, "launcher": "srun", "mpi": "pmi2", "options": dict.fromkeys(REPLACEMENTS, False)},
    *(
        {**GPUS, "options": {"gpus-per-node": "a100:2", memory: "0"}}
        for memory in REPLACEMENTS["mem"]
    ),
    {"walltime": 6000},  # else the lead time is a quarter of it
    {"options": {"time": False}},
    {"mpi": "hydra"},
    {"mpi": "hydra", "variables": {"HYDRA_LAUNCHER_EXEC": "ssh"}},
    {"mpi": "hydra", "variables": {"HYDRA_BOOTSTRAP": "ssh"}},
    {"mpi": "hydra", "args": ("-launcher", "ssh")},
    ALONE,
    {**ALONE, "launcher": "srun"},
    {"options": {"dep": "on:1", "kill-on-invalid-dep": "no"}},
    *({"options": {name: "on:1"}, "after": ("41",)} for name in ("dependency", "d", "kill-on-inv")),
    {"options": {"qos": "", "wckey": "#no comment", "x": 'a\\b"c'}},
    {"run_directory": Path("/a\\b%j")},  # where Slurm replaces nothing, and halves backslashes
    {"modules": ("gcc\n",)},
    {"run_directory": Path("/a\nb")},
    {"array": Array((Path("/a\x7fb"),))},
    {"first_command": ("a\0b",)},
    {"args": ("a\x1b[31m",)},
    {"slurm": {"partition": "a\x85b"}},
    {"options": {"x": ("a", "b\n#SBATCH --uid=0")}},
    {"container": "x\t.sif"},
]
OF_PBS: list[dict[str, Any]] = [
    {"memory_per_node": 2**20 + 1},
    {"gpus_per_node": 4, "nodes": 1},
    *(
        {"gpus_per_node": 4, "pbs": {"select": own}}
        for own in ("naccelerators=4", "model=x:gpus=2", "ngpus=4")
    ),
    *({"options": {"l": ("software=matlab", f"{place}=pack")}} for place in ("place", "Place")),
    {"variables": {"HYDRA_LAUNCHER": "ssh"}},
    {"variables": {"PRTE_MCA_plm": "ssh"}},
    ALONE,
    {"options": {"W": "depend=on:1"}},
    {"options": {"W": ("group_list=x", "a=b,Depend=on:1")}, "after": ("41.vm",)},
    {"run_directory": Path("/scratch/a:b")},
    {"array": Array((Path("/runs/a"),))},
]
OF_NEITHER: list[dict[str, Any]] = [
    {"cpus_per_task": 4, "progress": "core"},
    {**ALONE, "launcher": "srun"},
    {"after": ("12.34@here",)},
    {"container": "x.sif", "binds": (Path("/a,b"),)},
    {"container": "x.sif", "binds": (Path("/a:b"),)},
]


def test_what_each_field_changes_in_a_script_or_why_it_is_refused(snapshot):
    """Lines without and with it; errors with what to do."""
    plain = make_request(Path("/runs/x"), nodes=2, mpi="openmpi", walltime=600)
    plain = change(plain, checkpoint=Checkpoint(lead_time=400))
    text = ""
    for scheduler, cases in (("slurm", OF_SLURM), ("pbs", OF_PBS), ("local", OF_NEITHER)):
        render = get_scheduler(scheduler).render
        before = render(plain).splitlines()
        for case in cases:
            text += f"{scheduler} {case}\n"
            own = {scheduler: {"options": case["options"]}} if "options" in case else {}
            fields = {name: value for name, value in case.items() if name != "options"}
            try:
                script = render(change(plain, **fields, **own))
            except PipectlError as error:
                text += f"  error: {error.message} ({error.cure})\n"
                continue
            found = unified_diff(before, script.splitlines(), n=0, lineterm="")
            text += "".join(f"  {line}\n" for line in [*found][2:] if line[:2] != "@@")
    snapshot(Path(__file__).with_name("changes.txt"), text)
