"""Jobs in the allocation of a shell: of Slurm and of PBS, with pretended commands."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipectl.batch import Array, JobState, get_scheduler
from pipectl.errors import InvalidInputError, SchedulerError
from pipectl.runs import RunDirectory, read_exit_code
from pipectl.spec.launch import Container, Resources
from pipectl.spec.models import Checkpoint
from tests.batch.fakes import FakeCommands
from tests.batch.job_requests import change, wait_until

SHOWN = """\
printf '%s ' "$@"; echo
env | grep -e ^SLURM -e ^PMI
cat "${PBS_NODEFILE-/dev/null}"
"""
SEEN = {
    "slurm": "SLURM_JOB_NODELIST=n1,n2 SLURM_NODELIST=n1,n2 SLURM_NNODES=2 SLURM_JOB_NUM_NODES=2 "
    "SLURM_TASKS_PER_NODE=2(x2) SLURM_NTASKS=4 SLURM_OVERLAP=1 SLURM_JOB_ID=7",
    "pbs": "n1\nn1\nn2\nn2\n",
}


@pytest.fixture(params=["slurm", "pbs"])
def system(request, tmp_path, monkeypatch):
    """A shell in a step of a job of three nodes that ends in an hour."""
    fakes = FakeCommands(tmp_path / "bin", request.param)
    monkeypatch.setenv("PATH", f"{fakes.folder}:/usr/bin:/bin")
    now = int(time.time())
    if request.param == "slurm":
        fakes.answer("scontrol", "n1\nn2\nn3\n")
        fakes.answer("squeue", f"7|RUNNING|x|{now}|{now + 3600}|n[1-3]|x|None\n")
        found = {
            "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NNODES": "1",
            "SLURM_TASKS_PER_NODE": "4(x3)", "SLURM_STEP_ID": "0", "PMI_RANK": "0",
            "SLURMD_NODENAME": "n1", "SLURM_MEM_PER_NODE": "4096",
        }  # fmt: skip
    else:
        began = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(now))
        fields = {"job_state": "R", "stime": began, "Resource_List.walltime": "01:00:00"}
        fields["Resource_List.mem"] = "12gb"
        lines = [f"    {name} = {value}" for name, value in fields.items()]
        fakes.answer("qstat", "\n".join(["Job Id: 7.s1", *lines, ""]))
        (tmp_path / "nodes").write_text("n1\n" * 4 + "n2\n" * 4 + "n3\n" * 4)
        found = {"PBS_JOBID": "7.s1", "PBS_NODEFILE": str(tmp_path / "nodes")}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return request.param


@pytest.mark.parametrize(("machine", "share"), [(9, 1), (2, 0.5)])
def test_ranks_share_the_memory_of_the_allocation(system, monkeypatch, machine, share):
    """Or what this machine, which is one of its nodes, has for it."""
    monkeypatch.setattr("pipectl.batch.here.memory_of_machine", lambda: machine * 2**30)
    spec = SimpleNamespace(resources=Resources(tasks_per_node=4))
    memory = get_scheduler("here").memory_of_rank(spec)
    assert memory == share * 2**30


def test_ranks_are_started_over_the_nodes_of_the_allocation(system, make_request, tmp_path):
    launcher = tmp_path / "mpiexec"
    launcher.write_text(f"#!/bin/bash\n{SHOWN}\n")
    launcher.chmod(0o755)
    request = make_request(nodes=2, mpiexec=str(launcher), mpi="hydra", checkpoint=Checkpoint())
    here, run = get_scheduler("here"), RunDirectory(request.run_directory)
    run.logs.mkdir(parents=True)
    run.start.errors.mkdir(parents=True)
    assert 3500 < here.walltime_of(request) <= 3600
    assert here.system_of_nodes == system
    run.script.write_text(here.render(request))
    assert "\nstop_s=34" in run.script.read_text()
    job_id = here.submit(run.script, request)
    assert wait_until(lambda: read_exit_code(run.start) is not None)
    said = (run.logs / "job.log").read_text()
    assert said.startswith("-n 4 -ppn 2 "), said
    seen = SEEN[system]
    assert seen in said if system == "pbs" else {*seen.split()} <= {*said.splitlines()}
    assert "STEP" not in said
    assert "PMI_RANK" not in said
    assert wait_until(lambda: here.query([job_id])[job_id].state is not JobState.RUNNING)


def test_what_an_allocation_cannot_do_is_refused(system, make_request, monkeypatch):
    here, request = get_scheduler("here"), make_request()
    for refused, words in (
        ({"nodes": 4}, r"4 are asked for, and this allocation \(7.*\) has 3"),
        ({"after": ("8",)}, "cannot wait for other runs"),
        ({"array": Array((Path("/a"),))}, "sweep: cannot run in an allocation"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            here.render(change(request, **refused))
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SchedulerError, match="in no allocation"):
        here.render(request)


def test_srun_is_asked_for_no_more_cores_than_the_nodes_have_that_it_takes(
    make_request, monkeypatch, tmp_path
):
    fakes = FakeCommands(tmp_path / "bin", "slurm")
    fakes.answer("scontrol", "n1\nn2\nn3\n")
    monkeypatch.setenv("PATH", f"{fakes.folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "8(x2),4")
    request = make_request(nodes=3, launcher="srun", tasks_per_node=2, cpus_per_task=4)
    here = get_scheduler("here")
    assert "--cpus-per-task=4 " in here.render(change(request, nodes=2))
    words = "no 2 ranks of 4 cores on a node of which this allocation .7. has 4 cores"
    with pytest.raises(InvalidInputError, match=words) as caught:
        here.render(request)
    assert "--ntasks-per-node=2 --cpus-per-task=4`" in caught.value.hint
    here.render(change(request, args=("--overcommit",)))
    here.render(change(request, launcher="mpiexec", mpiexec="mpiexec"))


def test_a_model_is_measured_on_a_node_also_from_the_shell_of_salloc(
    make_request, monkeypatch, tmp_path
):
    fakes = FakeCommands(tmp_path / "bin", "slurm")
    fakes.answer("scontrol", "n1\n")
    monkeypatch.setenv("PATH", f"{fakes.folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    request = make_request(first_command=("measure", "it"), cpus_per_task=3)
    script = get_scheduler("here").render(request)
    on_node = "srun --nodes=1 --ntasks=1 --cpus-per-task=6 --cpu-bind=none --mpi=none"
    assert f"\nrun with_variables {on_node} measure it ||" in script
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "4,8(x2)")
    assert " --cpus-per-task=4 " in get_scheduler("here").render(change(request, cpus_per_task=5))
    monkeypatch.delenv("SLURM_JOB_CPUS_PER_NODE")
    boxes = (Container(image="/x.sif", runtime=name) for name in ("apptainer", "pyxis"))
    inside = [change(request, container=box) for box in boxes]
    script, by_srun = map(get_scheduler("here").render, inside)
    assert f"\nrun with_variables {on_node} apptainer exec /x.sif measure it ||" in script
    assert "type apptainer" not in script, "it may be on the nodes alone"
    assert "--container-image=/x.sif measure it ||" in by_srun
    assert by_srun.count("srun --nodes=1") == 1
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert "\nrun with_variables measure it ||" in get_scheduler("here").render(request)
    assert "type apptainer" in get_scheduler("here").render(inside[0])
