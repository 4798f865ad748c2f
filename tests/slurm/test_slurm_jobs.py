"""SlurmScheduler with a real Slurm."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_requests import change, make_request, wait_until

from pipectl.batch import JobRequest, JobState, Template
from pipectl.batch.launchers import kind_of
from pipectl.batch.script import render_variables
from pipectl.batch.slurm import SlurmScheduler
from pipectl.errors import SchedulerError

SLURM = SlurmScheduler()
IN_BLOCKS = [f"rank {rank} of 4 on node{rank // 2 + 1}" for rank in range(4)]
NASTY = json.loads((Path(__file__).parents[1] / "data/scheduler/nasty.json").read_text())


@pytest.fixture
def request_of(lab, tmp_path):
    """A request whose one rank is a line of shell, started without MPI."""
    launcher = tmp_path / "mpiexec"
    launcher.write_text('#!/bin/bash\nshift 2\nexec "$@"\n')
    launcher.chmod(0o755)

    def build(command, **changes):
        request = make_request(
            tmp_path / "run",
            tag=f"tag-{time.time_ns()}",
            python=sys.executable,
            tasks_per_node=1,
            walltime=300,
            command=("bash", "-c", command),
            mpiexec=str(launcher),
        )
        return change(request, **changes)

    return build


def submit(request: JobRequest) -> str:
    (request.run_directory / "logs").mkdir(parents=True, exist_ok=True)
    script = request.run_directory / "job.sh"
    script.write_text(SLURM.render(request))
    (request.run_directory / "variables.sh").write_text(render_variables(request))
    return SLURM.submit(script, request)


def exit_file(request: JobRequest) -> str:
    return (request.run_directory / "exit_code").read_text()


def log(request: JobRequest) -> str:
    return (request.run_directory / "logs" / "job.log").read_text()


def test_a_job_completes(request_of, wait_for):
    request = request_of("echo hello from the job")
    submitted = time.time()
    job_id = submit(request)
    assert SLURM.query([job_id])[job_id].state.alive
    status = wait_for(job_id)
    assert (status.state, status.exit_code) == (JobState.COMPLETED, 0)
    assert exit_file(request) == "0\n"
    assert "hello from the job\n" in log(request)
    assert status.nodes.startswith("node")
    assert status.start is not None
    assert status.end is not None
    assert submitted - 1 <= status.start <= status.end <= time.time() + 1


def test_waiting_jobs_are_queued_or_held_and_can_be_cancelled(request_of, wait_for):
    later = {"options": {"begin": "now+1hour"}}
    held = {"options": {"hold": True}}
    queued_id = submit(request_of("true", slurm=later))
    held_id = submit(request_of("true", slurm=held))
    assert wait_for(queued_id, JobState.QUEUED).reason == "BeginTime"
    assert wait_for(held_id, JobState.HELD).reason == "JobHeldUser"
    for job_id in (queued_id, held_id):
        SLURM.cancel(job_id)
        status = wait_for(job_id)
        assert (status.state, status.exit_code) == (JobState.CANCELLED, None)


def test_a_running_job_is_cancelled_and_may_clean_up(request_of, wait_for):
    request = request_of(
        "trap 'echo cleaned up; exit 7' TERM; touch ready; while :; do sleep 0.05; done"
    )
    job_id = submit(request)
    wait_until((request.run_directory / "ready").exists)
    assert wait_for(job_id, JobState.RUNNING).nodes == "node1"
    SLURM.cancel(job_id)
    assert wait_for(job_id).state is JobState.CANCELLED
    wait_until((request.run_directory / "exit_code").exists)  # Slurm says it before the script ends
    assert exit_file(request) in {"7\n", "143\n"}
    assert "cleaned up" in log(request)


def test_signals_to_the_batch_shell_reach_the_rank(request_of, wait_for):
    request = request_of(
        "trap 'echo got USR2; exit 0' USR2; touch ready; while :; do sleep 0.05; done"
    )
    job_id = submit(request)
    wait_until((request.run_directory / "ready").exists)
    subprocess.run(["scancel", "-b", "-s", "USR2", job_id], check=True)
    assert wait_for(job_id).state is JobState.COMPLETED
    assert "got USR2" in log(request)


def test_srun_starts_every_rank_in_blocks(request_of, wait_for):
    request = request_of(
        'echo "rank $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME"',
        launcher="srun",
        mpi="none",
        nodes=2,
        tasks_per_node=2,
        cpus_per_task=2,
        gpus_per_node=2,
        memory_per_node=100 * 2**20,
    )
    status = wait_for(submit(request))
    assert status.state is JobState.COMPLETED, log(request)
    assert status.nodes == "node[1-2]"
    assert sorted(log(request).splitlines()) == IN_BLOCKS


@pytest.mark.mpi
def test_mpiexec_starts_every_rank_in_blocks(request_of, wait_for):
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("needs the mpich wheel: pip install mpich")
    code = (
        "import os; from mpi4py import MPI; w = MPI.COMM_WORLD; "
        "os.write(1, f'rank {w.rank} of {w.size} on {os.environ[\"SLURMD_NODENAME\"]}\\n'.encode())"
    )
    request = request_of(
        "true",
        nodes=2,
        tasks_per_node=2,
        mpiexec=str(mpiexec),
        mpi=kind_of(str(mpiexec)),
    )
    request = change(request, command=(sys.executable, "-m", "mpi4py", "-c", code))
    assert wait_for(submit(request)).state is JobState.COMPLETED, log(request)
    lines = sorted(line for line in log(request).splitlines() if line.startswith("rank"))
    assert lines == IN_BLOCKS


def test_nasty_values_arrive_unchanged(request_of, wait_for, tmp_path):
    variables = {f"NASTY_{index}": value for index, value in enumerate(NASTY)}
    report = 'printf "%s\\0" "$@"; for n in ${!NASTY_*}; do printf "%s=%s\\0" "$n" "${!n}"; done'
    request = change(
        request_of("true"),
        run_directory=tmp_path / "a b'c\"d$HOME\\e%j;touch PWNED",
        variables=variables,
        command=("bash", "-c", f"{{ {report}; }} >seen", "bash", *NASTY),
    )
    assert wait_for(submit(request)).state is JobState.COMPLETED
    parts = (request.run_directory / "seen").read_text().split("\0")[:-1]
    assert parts[: len(NASTY)] == NASTY
    assert dict(part.split("=", 1) for part in parts[len(NASTY) :]) == variables
    assert not list(tmp_path.rglob("PWNED"))


def test_the_log_is_written_whatever_the_directory_is_called(request_of, wait_for, tmp_path):
    names = ("100%", "%j", "back\\slash", "\\%j%%", "q\"u'o", "#x", "ä b")
    requests = [request_of("echo here", run_directory=tmp_path / name) for name in names]
    for job_id, request in [(submit(request), request) for request in requests]:
        assert wait_for(job_id).state is JobState.COMPLETED
        assert "here\n" in log(request)


def test_nasty_tags_reach_slurm_unchanged(request_of):
    held = {"options": {"hold": True}}
    values = [value for value in NASTY[::5] if value.strip()]
    tags = {submit(request_of("true", tag=value, slurm=held)): value for value in values}
    assert len(tags) >= 30
    ids = ",".join(tags)
    try:
        done = subprocess.run(
            ["squeue", "-h", "-o", "%i|%k", "-j", ids], capture_output=True, text=True, check=True
        )
        seen = dict(line.split("|", 1) for line in done.stdout.splitlines())
        assert seen == tags
    finally:
        subprocess.run(["scancel", *tags], check=True)


def test_what_pipectl_writes_overrules_a_template(request_of):
    own = "--hold --job-name=mine --time=9\n#SBATCH -c 4 -N2 --comment=x --requeue"
    blocks = f"{{% extends base %}}{{% block directives %}}\n#SBATCH {own}\n{{% endblock %}}"
    job_id = submit(request_of("true", template=Template("site.sh", blocks)))
    try:
        ask = ["squeue", "-h", "-o", "%j|%l|%D|%C|%r", "-j", job_id]
        done = subprocess.run(ask, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "demo|5:00|1|1|JobHeldUser"
    finally:
        SLURM.cancel(job_id)


def test_options_of_the_job_reach_slurm(request_of):
    own = {"hold": True, "nice": "7", "x": "node[3-4]"}
    job_id = submit(request_of("true", slurm={"options": own}))
    try:
        ask = ["scontrol", "show", "job", "-o", job_id]
        shown = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
        assert {"Nice=7", "ExcNodeList=node[3-4]", "Reason=JobHeldUser"} <= set(shown.split())
    finally:
        SLURM.cancel(job_id)


def test_a_job_is_found_by_its_tag(request_of):
    request = request_of("true")
    assert SLURM.find(request.tag) is None
    job_id = submit(request)
    assert SLURM.find(request.tag) == job_id


def test_the_environment_cannot_overrule_the_script(request_of, wait_for, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "nosuch")
    assert wait_for(submit(request_of("true"))).state is JobState.COMPLETED


def test_estimate(request_of):
    request = request_of("true")
    forecast = SLURM.estimate(SLURM.render(request))
    assert forecast is not None
    assert " to start at " in forecast
    too_large = SLURM.render(change(request, nodes=5, tasks_per_node=9))
    with pytest.raises(SchedulerError, match="not available"):
        SLURM.estimate(too_large)


def test_a_wrong_partition_is_refused_with_a_cure(request_of):
    with pytest.raises(SchedulerError, match="nosuch") as caught:
        submit(request_of("true", slurm={"partition": "nosuch"}))
    assert "slurm.partition" in (caught.value.cure or "")


def test_unknown_ids_are_absent_and_can_be_cancelled(lab):
    assert SLURM.query(["999999"]) == {}
    SLURM.cancel("999999")
