"""SlurmScheduler with a real Slurm."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipectl.batch import JobRequest, JobState
from pipectl.batch.launchers import kind_of
from pipectl.batch.slurm import SlurmScheduler
from pipectl.errors import SchedulerError
from pipectl.runs import RunDirectory, read_errors, read_exit_code
from pipectl.spec.models import Checkpoint
from tests.batch.job_requests import change, make_request, wait_until, write_script

SLURM = SlurmScheduler()
LAB = Path(__file__).parents[2] / "slurm" / "lab"
NASTY = json.loads((Path(__file__).parents[1] / "data/scheduler/nasty.json").read_text())
HELD = {"options": {"hold": True}}


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


def submit(request: JobRequest, tick_s: float = 5) -> str:
    script = write_script(request, scheduler="slurm")
    script.write_text(script.read_text().replace("tick_s=5", f"tick_s={tick_s}"))
    return SLURM.submit(script, request)


def ask(*command: str) -> str:
    return subprocess.check_output(command, text=True).strip()


def exit_file(request: JobRequest) -> str:
    return (request.run_directory / "starts/1/exit_code").read_text()


def log(request: JobRequest) -> str:
    return (request.run_directory / "logs" / "job.log").read_text()


def test_jobs_complete_in_directories_of_any_name_whatever_the_environment(
    request_of, wait_for, tmp_path, monkeypatch
):
    """Variables of the submitting shell are there if the job inherits them."""
    monkeypatch.setenv("SBATCH_PARTITION", "nosuch")
    monkeypatch.setenv("OF_THE_SHELL", "its variable")
    names = ("a b'c\"d$HOME\\e%j;touch PWNED", "100%", "%j", "\\%j%%", "#x", "ä b")
    said = {"none": "here, nothing\n", "all": "here, its variable\n"}
    requests = [
        request_of(
            "srun -n1 bash -c 'echo here, ${OF_THE_SHELL-nothing}'; : ${HOME?} ${PATH?}",
            run_directory=tmp_path / name,
            inherit=inherit,
        )
        for name, inherit in zip(names, [*said] * 3, strict=True)
    ]
    assert SLURM.find(requests[0].tag) is None
    submitted = time.time()
    jobs = {submit(request): request for request in requests}
    for job_id, request in jobs.items():
        assert SLURM.find(request.tag) == job_id
        status = wait_for(job_id)
        assert (status.state, status.exit_code) == (JobState.COMPLETED, 0), log(request)
        assert exit_file(request) == "0\n"
        assert log(request).endswith(said[request.environment.inherit])
        assert status.nodes.startswith("node")
        assert submitted - 1 <= status.start <= status.end <= time.time() + 1
    assert not list(tmp_path.rglob("PWNED"))


def test_waiting_jobs_are_queued_or_held_as_the_job_says_and_can_be_cancelled(request_of, wait_for):
    """Options of the job reach Slurm."""
    options = {"options": {"hold": True, "nice": "7", "x": "node[3-4]"}}
    held = request_of("true", slurm=options)
    queued_id = submit(request_of("true", slurm={"options": {"begin": "now+1hour"}}))
    held_id = submit(held)
    assert wait_for(queued_id, JobState.QUEUED).reason == "BeginTime"
    assert wait_for(held_id, JobState.HELD).reason == "JobHeldUser"
    assert ask("squeue", "-h", "-o", "%j|%l|%D|%C", "-j", held_id) == "demo|5:00|1|1"
    shown = ask("scontrol", "show", "job", "-o", held_id).split()
    assert {"Nice=7", "ExcNodeList=node[3-4]"} <= {*shown}
    for job_id in (queued_id, held_id):
        SLURM.cancel(job_id)
        status = wait_for(job_id)
        assert (status.state, status.exit_code) == (JobState.CANCELLED, None)


@pytest.mark.parametrize(
    ("name", "code", "state"),
    [("TERM", 7, JobState.CANCELLED), ("USR2", 0, JobState.COMPLETED)],
)
def test_signals_reach_the_rank_which_may_clean_up(request_of, wait_for, name, code, state):
    request = request_of(
        f"trap 'echo got {name}; exit {code}' {name}; touch ready; while :; do sleep 0.05; done"
    )
    job_id = submit(request)
    wait_until((request.run_directory / "ready").exists)
    assert wait_for(job_id, JobState.RUNNING).nodes == "node1"
    if name == "TERM":
        SLURM.cancel(job_id)
    else:
        ask("scancel", "-b", "-s", name, job_id)
    assert wait_for(job_id).state is state
    # Slurm says it before the script ends.
    wait_until((request.run_directory / "starts/1/exit_code").exists)
    assert exit_file(request) in {f"{code}\n", "143\n"}
    assert f"got {name}" in log(request)


@pytest.mark.torture
def test_a_job_is_asked_to_stop_before_its_time_is_over(request_of, wait_for):
    """Its ranks find a file then; tests of commands go on from there."""
    saves = Checkpoint(every=1, max_requeues=0)
    waits = "until [[ -e $PIPECTL_START/stop ]]; do sleep 0.1; done; echo asked"
    request = request_of(waits, checkpoint=saves, walltime=120)
    status = wait_for(submit(request), timeout_s=240)
    assert status.state is not JobState.TIMEOUT
    assert "asked" in log(request)


@pytest.mark.parametrize("launcher", ["srun", pytest.param("mpiexec", marks=pytest.mark.mpi)])
def test_every_rank_is_started_in_blocks(request_of, wait_for, launcher):
    variables = {
        "cpus_per_task": 2,
        "gpus_per_node": 2,
        "memory_per_node": 100 * 2**20,
        "launcher": "srun",
        "mpi": "none",
    }
    if launcher == "mpiexec":
        mpiexec = Path(sys.executable).parent / "mpiexec"
        if not mpiexec.exists():
            pytest.skip("needs the mpich wheel: pip install mpich")
        variables = {"mpiexec": str(mpiexec), "mpi": kind_of(str(mpiexec))}
    request = request_of(
        'rm -f "$PIPECTL_START/starting"; '
        'echo "rank ${PMI_RANK-$SLURM_PROCID} of ${PMI_SIZE-$SLURM_NTASKS} on $SLURMD_NODENAME"',
        nodes=2,
        tasks_per_node=2,
        **variables,
    )
    status = wait_for(submit(request))
    assert status.state is JobState.COMPLETED, log(request)
    assert status.nodes == "node[1-2]"
    lines = sorted(line for line in log(request).splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 4 on node{rank // 2 + 1}" for rank in range(4)]


def test_nasty_tags_reach_slurm_unchanged(request_of):
    values = [value for value in NASTY[::5] if value.strip()]
    tags = {submit(request_of("true", tag=value, slurm=HELD)): value for value in values}
    assert len(tags) >= 30
    try:
        lines = ask("squeue", "-h", "-o", "%i|%k|", "-j", ",".join(tags)).splitlines()
        assert dict(line[:-1].split("|", 1) for line in lines) == tags
    finally:
        ask("scancel", *tags)


def test_jobs_with_a_comment_of_the_user_or_without_what_sites_refuse_are_found(request_of):
    refused = ("comment", "chdir", "open-mode", "signal", "ntasks-per-node", "cpus-per-task")
    for options in ({"comment": 'group "x" | {"a": 1}'}, dict.fromkeys(refused, False)):
        request = request_of("true", slurm={"options": {**options, "hold": True}})
        job_id = submit(request)
        try:
            shown = ask("squeue", "-h", "-o", "%k", "-j", job_id)
            assert shown == (options["comment"] or "(null)")
            assert SLURM.find(request.tag) == job_id
            assert SLURM.query([job_id])[job_id].state is JobState.HELD
        finally:
            SLURM.cancel(job_id)


def test_what_slurm_cannot_start_is_refused_with_a_hint_and_else_it_says_when(request_of):
    request = request_of("true")
    forecast = SLURM.estimate(SLURM.render(request))
    assert forecast is not None
    assert " to start at " in forecast
    with pytest.raises(SchedulerError, match="not available"):
        SLURM.estimate(SLURM.render(change(request, nodes=5, tasks_per_node=9)))
    assert SLURM.check(request) == ""
    for change_of, why in (({"walltime": 7200}, "01:00:00"), ({"nodes": 5}, "4 nodes")):
        with pytest.raises(SchedulerError, match=why):
            SLURM.check(change(request, **change_of))
    with pytest.raises(SchedulerError, match="nosuch") as caught:
        submit(request_of("true", slurm={"partition": "nosuch"}))
    assert "slurm.partition" in (caught.value.hint or "")
    assert SLURM.query(["999999"]) == {}
    SLURM.cancel("999999")


def test_jobs_that_slurm_has_forgotten_end_in_its_accounts_as_they_did(accounts):
    def sbatch(command: str, *options: str) -> str:
        return ask("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={command}")

    since = time.time()
    array = sbatch("exit $SLURM_ARRAY_TASK_ID", "--array=0-1")
    cancelled = sbatch("sleep 100")
    expected = {
        sbatch("true"): (JobState.COMPLETED, 0),
        sbatch("exit 3"): (JobState.FAILED, 3),
        f"{array}_0": (JobState.COMPLETED, 0),
        f"{array}_1": (JobState.FAILED, 1),
        cancelled: (JobState.CANCELLED, None),
    }
    SLURM.cancel(cancelled)
    wait_until(lambda: not ask("squeue", "-h", "-t", "all"), pause_s=0.3)
    found = SLURM.query(list(expected), since=since)
    assert {job: (status.state, status.exit_code) for job, status in found.items()} == expected
    assert {status.source for status in found.values()} == {"accounting"}
    assert SLURM.query(["9999"], since=since) == {}


@pytest.mark.mpi
@pytest.mark.torture
@pytest.mark.parametrize("catches", [True, False])
@pytest.mark.parametrize("launcher", ["srun", "mpiexec"])
def test_a_preempted_job_stops_at_a_checkpoint_and_comes_back(
    request_of, wait_for, partitions_with_priorities, mpiexec, launcher, catches
):
    """Or at once, if TERM ends ranks that still import; and it does not if it is cancelled after
    that."""
    kinds = {"srun": {"launcher": "srun", "mpi": "none"}, "mpiexec": {"mpi": "hydra"}}
    begins = "cd $PIPECTL_START; : >ready; "
    if catches:
        begins = f"{begins}trap 'echo TERM >>stop' TERM; rm -f starting; "
    request = request_of(
        f"{begins}until [[ -s stop ]]; do sleep 0.1; done; : >stopped",
        nodes=2,
        mpiexec=mpiexec,
        checkpoint=Checkpoint(max_requeues=2),
        slurm={"partition": "low"},
        **kinds[launcher],
    )
    job_id, run = submit(request), RunDirectory(request.run_directory)
    wait_until((run.start_of(1).path / "ready").exists)
    other = ("--parsable", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
    urgent = ask("sbatch", "-p", "high", "-N4", *other)
    assert wait_for(urgent).state is JobState.COMPLETED
    wait_until((run.start_of(2).path / "ready").exists, 120)
    assert wait_for(job_id, JobState.RUNNING)
    SLURM.cancel(job_id)
    assert wait_for(job_id).state is JobState.CANCELLED
    assert not run.start_of(3).path.exists()


RING = Path(__file__).parents[1] / "runtime" / "watch" / "ranks_that_wait.py"


@pytest.fixture
def submit_ring(request_of, mpiexec):
    """``submit_ring(what)``: three ranks on three nodes, of which the second meets with
    something."""

    def start(what):
        request = request_of("", nodes=3, mpiexec=mpiexec, variables={"TEST_HAPPENS": what})
        run = RunDirectory(request.run_directory)
        ring = (sys.executable, "-m", "mpi4py", str(RING), "--run", str(run.path))
        job_id = submit(change(request, command=ring), tick_s=0.1)
        if what == "lingers":
            wait_until((run.path / "happened").exists)
        return run, job_id

    return start


def live_processes(run: RunDirectory) -> list[int]:
    """Of all ranks, and of those beside them."""
    families = [json.loads(path.read_text())["family"] for path in run.path.glob("pids-*")]
    return [pid for family in families for pid, _ in family if psutil.pid_exists(pid)]


@pytest.mark.mpi
@pytest.mark.torture
def test_a_frozen_node(submit_ring, wait_for, processes_on, lab):
    """Slurm does not notice for long, and the launcher waits; the job ends and frees the others."""
    conf = lab / "slurm.conf"
    text = conf.read_text()
    conf.write_text(text.replace("SlurmdTimeout=15", "SlurmdTimeout=3000"))
    subprocess.run(["scontrol", "reconfigure"], check=True)
    run, job_id = submit_ring("lingers")
    frozen = processes_on("node2")
    try:
        for process in frozen:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        wait_for(job_id, JobState.COMPLETING)
        wait_until(lambda: SLURM.query([job_id])[job_id].nodes == "node2", 30)
        assert read_exit_code(run.start) == 137
        (error,) = read_errors(run.start)
        assert (error.rank, error.host) == (1, "node2")
        assert "the launcher has not ended: it is killed" in run.job_log.read_text()
    finally:
        for process in reversed(frozen):
            with suppress(psutil.NoSuchProcess):
                process.resume()
        conf.write_text(text)
        subprocess.run(["scontrol", "reconfigure"], check=True)
    wait_for(job_id)


@pytest.mark.mpi
@pytest.mark.torture
@pytest.mark.parametrize("lost", ["rank", "node"])
def test_what_is_lost_is_named_and_all_end(submit_ring, wait_for, processes_on, lost):
    """With a node, everything there is killed at once: Slurm's daemon, its step, the launcher's
    process, the rank."""
    run, job_id = submit_ring("killed" if lost == "rank" else "lingers")
    if lost == "node":
        time.sleep(2)
        there = processes_on("node2")
        (run.path / "happened").write_text(str(time.time()))
        for process in there:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    wait_for(job_id)
    wait_until(lambda: read_errors(run.start), 30)
    (error,) = read_errors(run.start)
    wait_until(lambda: not live_processes(run), 20)
    if lost == "node":
        psutil.wait_procs(there, timeout=20)
        subprocess.run([LAB / "up"], capture_output=True, check=True, timeout=300)
    assert (error.rank, error.host) == (1, "node2")
    assert ("killed (by SIGKILL" if lost == "rank" else "the node is gone") in error.message
    assert error.time - float((run.path / "happened").read_text()) < 30
