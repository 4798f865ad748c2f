"""Job scripts, run by real bash with plain commands instead of MPI."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import yaml

from pipectl.batch import Array, get_scheduler
from pipectl.batch.launchers import local_environment
from pipectl.batch.request import IN_JOB, WORKER
from pipectl.batch.script import render_variables
from pipectl.errors import InvalidInputError
from pipectl.runs import (
    RUN_VARIABLE,
    SCRIPT,
    START_VARIABLE,
    RunDirectory,
    read_errors,
)
from pipectl.spec.launch import Container, Launch
from pipectl.spec.models import Checkpoint
from tests.batch.job_requests import change, end, fields, run, start, wait_until, write_script

SAVES = Checkpoint(max_requeues=0)
PREEMPTED = "PreemptEligibleTime=2026-11-29T10:00:00 PreemptTime=2026-11-29T10:05:07"
INDEX = {"slurm": "SLURM_ARRAY_TASK_ID", "pbs": "PBS_ARRAY_INDEX"}


@pytest.mark.parametrize("case", yaml.safe_load(Path(__file__).with_name("ends.yaml").read_text()))
def test_how_jobs_end(make_request, case):
    request = make_request(**fields(case.get("job", {})))
    if "setup" in case:
        request = change(request, setup=(case["setup"],))
    process = start(request, "bash", "-c", case["rank"])
    if "signal" in case:
        wait_until((request.run_directory / "ready").exists)
        process.send_signal(signal.Signals[f"SIG{case['signal']}"])
    code, output = end(process, request)
    assert (code, output) == (case["code"], case.get("output", output))
    assert "launched" not in output or code in {0, 75}


def test_commands_at_the_end_see_the_exit_code(make_request):
    end = """echo "$word's $code, $(cat $PIPECTL_START/exit_code)"; false"""
    request = make_request(setup=("word=it",), teardown=(end, "exit 3"))
    assert run(request, "bash", "-c", "exit 255") == (255, "it's 255, 255\n")
    assert not (request.run_directory / "starts/1/exit_code.tmp").exists()


def test_nasty_values_arrive_unchanged(make_request, nasty, tmp_path):
    variables = {f"NASTY_{index}": value for index, value in enumerate(nasty)}
    report = 'printf "%s\\0" "$@"; for n in ${!NASTY_*}; do printf "%s=%s\\0" "$n" "${!n}"; done'
    directory = tmp_path / "a b'c\"d$HOME\\e%j;touch PWNED"
    request = make_request(run_directory=directory, variables=variables)
    code, output = run(request, "bash", "-c", report, "bash", *nasty)
    assert code == 0
    parts = output.split("\0")[:-1]
    assert parts[: len(nasty)] == nasty
    assert dict(part.split("=", 1) for part in parts[len(nasty) :]) == variables
    assert not list(tmp_path.rglob("PWNED"))


def test_ranks_see_the_variables_of_the_job_and_the_script_does_not(make_request):
    """Those with which it tells its exit code, say."""
    variables = {"child": "1", "code": "1", "attempt": "1", "OMP_NUM_THREADS": "5"}
    request = make_request(cpus_per_task=4, progress="core", variables=variables)
    shown = "$OMP_NUM_THREADS $MKL_NUM_THREADS $PYTHONUNBUFFERED $child$code$attempt"
    own = f"${RUN_VARIABLE} ${START_VARIABLE} ${SCRIPT}"
    process = start(request, "bash", "-c", f'echo "{shown} {own}"; pwd; exit 5')
    code, output = end(process, request)
    directory = request.run_directory
    own = f"{directory} {directory}/starts/1 {process.pid}"
    assert (code, output) == (5, f"5 3 1 111 {own}\n{directory}\n")


@pytest.mark.parametrize("name", [WORKER, IN_JOB])
def test_programs_that_scripts_start_are_there(name):
    """The script of Slurm looks for ranks that are left by the first of these names."""
    assert '__name__ == "__main__"' in Path(find_spec(name).origin).read_text()


def test_variables_are_in_a_file_without_which_the_job_does_not_run(make_request):
    request = make_request(variables={"API_KEY": "swordfish"}, first_command=("true",))
    script = write_script(request, "echo", "ran")
    assert "swordfish" not in script.read_text()
    assert "API_KEY" in script.read_text(), "in a comment"
    assert render_variables(request) == "export API_KEY=swordfish\n"
    assert run(request, "echo", "ran") == (0, "ran\n")
    (request.run_directory / "variables.sh").unlink()
    again = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "ran" not in again.stdout
    with pytest.raises(InvalidInputError, match="contains the control character"):
        render_variables(change(request, variables={"A": "x\ny"}))
    for name in ("", "1A", "A-B", "A B", "A=B", "é", "A\n", "A;touch x"):
        with pytest.raises(InvalidInputError, match="is not a variable name"):
            render_variables(change(request, variables={"OMP_NUM_THREADS": "1", name: "2"}))


def test_what_fails_before_the_ranks_is_the_reason_of_the_end(make_request):
    """With the line of the setup."""
    request = make_request(setup=("source /no such/activate",))
    assert run(request, "true")[0] == 1
    (error,) = read_errors(RunDirectory(request.run_directory).start)
    assert "environment.setup failed with exit code 1: source /no such/activate" in error.message


def test_a_profile_that_is_killed_is_named(make_request):
    command = ("bash", "-c", "rm $PIPECTL_START/starting; kill -9 $$")
    request = make_request(first_command=command)
    assert run(request, "true")[0] == 137
    (error,) = read_errors(RunDirectory(request.run_directory).start)
    assert error.message == "its process was ended by SIGKILL"


def test_background_processes_of_the_setup_end_with_the_job(make_request):
    request = make_request(setup=("sleep 311 &\necho $! >pid",))
    assert run(request, "true")[0] == 0
    pid = int((request.run_directory / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


def impatient(script: Path, *more: str) -> Path:
    """A script that ends a launcher soon after a rank has failed, and in other cases by their
    variables."""
    text = re.sub(f"({'|'.join(['patience', *more])})=[0-9]+", r"\1=2", script.read_text())
    script.write_text(text.replace("tick_s=5", "tick_s=0.1"))
    return script


TRACE = "Traceback:\n  File x.py, line 3\nModuleNotFoundError: No module named torch"
SLOTS = "-----\nThere are not enough slots available\nto satisfy the 4 slots"
EXPIRED = "srun: error: A: expired\n[mpiexec@n1] HYDU_sock_write (/a/b.c:2): write error"


@pytest.mark.parametrize(
    ("printed", "then", "message"),
    [
        (TRACE, "exit 1", ": exit code 1\nModuleNotFoundError: No module named torch"),
        (SLOTS, "exit 213", ": exit code 213\nThere are not enough slots available"),
        (EXPIRED, "exit 2", ": exit code 2\nsrun: error: A: expired"),
        ("one\n\ntwo", "exit 3", ": exit code 3\none\ntwo"),
        ("", "exec x1", ": exit code 127\nbash: line 1: exec: x1: not found"),
        ("", "exit 4", ": exit code 4"),
        ("error: busy", "exec sleep 300", " in 302 s, so the launcher was ended\nerror: busy"),
        ("", "trap '' TERM; sleep 300", " in 302 s, so the launcher was ended"),
        ("error", "rm $PIPECTL_START/starting; exit 3", None),  # a rank had begun
        ("error", "kill -TERM $PPID; exec sleep 300", None),  # it was cancelled
    ],
)
def test_why_no_rank_has_begun(make_request, printed, then, message):
    """In the words of what was started, which may wait forever."""
    request = make_request(setup=("echo error of the setup",))
    script = write_script(request, "bash", "-c", f"cat printed >&2; {then}")
    if "sleep" in then:
        impatient(script, "start_looks")
    run = RunDirectory(request.run_directory)
    (run.path / "printed").write_text(printed)
    with run.job_log.open("w") as log:
        done = subprocess.run(["bash", script], stdout=log, stderr=log, timeout=300, check=False)
    assert done.returncode
    assert run.start.exit_code.read_text() == f"{done.returncode}\n"
    assert not run.start.starting.exists()
    found = [(error.where, error.message) for error in read_errors(run.start)]
    where = f"start on {os.uname().nodename}"
    assert found == ([] if message is None else [(where, f"no rank has begun{message}")])


@pytest.mark.parametrize("setup", ["true", "set -o posix"])
def test_a_launcher_that_starts_nothing_has_failed_though_it_says_nothing(make_request, setup):
    command = ("python", "-m", "mpi4py", "-m", "x")
    request = make_request(command=command, args=("--help",), setup=(setup,))
    launcher = request.run_directory.parent / "mpiexec"
    request = change(request, mpiexec=str(launcher))
    for begins, code in (("", 1), ("rm $PIPECTL_START/starting", 0)):
        launcher.write_text(f"#!/bin/bash\necho Usage: mpiexec\n{begins}\n")
        launcher.chmod(0o755)
        script, start = write_script(request), RunDirectory(request.run_directory).start
        with start.run.job_log.open("w") as log:
            done = subprocess.run(["bash", script], stdout=log, stderr=log, check=False)
        assert done.returncode == code
        said = [error.message for error in read_errors(RunDirectory(request.run_directory).start)]
        assert said == (["no rank has begun: exit code 0\nUsage: mpiexec"] if code else [])


@pytest.mark.mpi
def test_an_mpiexec_that_waits_for_a_process_that_has_ended_is_ended(make_request, mpiexec):
    rank = "((PMI_RANK)) && exec sleep 300; exit 3"
    request = make_request(mpi="hydra", mpiexec=mpiexec, command=("bash", "-c", rank))
    script, run = write_script(request), RunDirectory(request.run_directory)
    script.write_text(script.read_text().replace("tick_s=5", "tick_s=0.1"))
    with run.job_log.open("w") as log:
        done = subprocess.run(["bash", script], stdout=log, stderr=log, timeout=60, check=False)
    assert done.returncode
    (error,) = read_errors(run.start)
    assert f"a process ended on {os.uname().nodename} before MPI had begun" in error.message


def test_ranks_that_are_done_and_do_not_end_are_ended(make_request):
    command = ": >$PIPECTL_START/finished; exec sleep 300"
    script = impatient(write_script(make_request(), "bash", "-c", command), "end_looks")
    done = subprocess.run(
        ["bash", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "all work was done and saved" in done.stderr


@pytest.fixture
def job_of_slurm(tmp_path, monkeypatch):
    """The environment of a job on two nodes, in which no step can be started."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text("#!/bin/bash\necho 'srun: error: Job credential expired' >&2\nexit 1\n")
    srun.chmod(0o755)
    slurm = {"JOB_ID": "1", "JOBID": "1", "NNODES": "2", "TASKS_PER_NODE": "2(x2)"}
    slurm |= dict.fromkeys(("NODELIST", "JOB_NODELIST"), "node[1-2]")
    for name, value in {**slurm, "TMPDIR": "/local", "SUBMIT_DIR": "/home"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setenv("PMI_FD", "900")
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")


@pytest.mark.mpi
def test_an_mpiexec_whose_processes_do_not_start_is_ended(make_request, mpiexec, job_of_slurm):
    """MPICH's waits for them forever."""
    request = make_request(nodes=2, mpi="hydra", mpiexec=mpiexec, command=("true",))
    script, run = write_script(request, scheduler="slurm"), RunDirectory(request.run_directory)
    with run.job_log.open("w") as log:
        done = subprocess.run(["bash", script], stdout=log, stderr=log, timeout=300, check=False)
    assert done.returncode
    (error,) = read_errors(run.start)
    assert error.where == "start on node1"
    assert error.message.splitlines()[1] == "srun: error: Job credential expired"


@pytest.mark.parametrize("end", ["", "kill -s KILL $(head -n 1 $PIPECTL_START/agents); "])
def test_what_ended_is_said_though_the_launcher_ends_before_its_agent(
    make_request, job_of_slurm, end
):
    """And has more to say than the few lines of a reason; or though it kills the agent."""
    srun = Path(os.environ["PATH"].partition(":")[0]) / "srun"
    srun.write_text(
        "#!/bin/bash\nwhile kill -0 $LAUNCHER 2>/dev/null; do read -rt 0.05 <> <(:); done\n"
        "for task in 1 2 3; do echo srun: error: n$task: task $task: Exited >&2; done\n"
        "echo 'a process ended on node2 before MPI had begun in it' >&2\nexit 1\n"
    )
    mpiexec = (
        "export LAUNCHER=$$; $HYDRA_LAUNCHER_EXEC -N2 /bin/hydra_pmi_proxy & "
        "cd $PIPECTL_START; "
        "until [[ -s agents ]] && (($(wc -l <agents) == 2)); do read -rt 0.05 <> <(:); done; "
        "for f in f1 f2 f3; do echo "
        '"[proxy:1@node2] $f (/a.c:1): read error"; done; '
        f"{end}exit 255"
    )
    request = make_request(nodes=2)
    assert run(request, "bash", "-c", f"({mpiexec}) >>logs/job.log 2>&1", scheduler="slurm")[0]
    (error,) = read_errors(RunDirectory(request.run_directory).start)
    _, first, _, ended = error.message.splitlines()
    assert "read error" in first
    assert ended == "a process ended on node2 before MPI had begun in it"


@pytest.mark.mpi
def test_jobs_of_this_machine_are_no_part_of_the_job_in_which_they_run(
    make_request, mpiexec, job_of_slurm
):
    """Their setup and their ranks see the directories that a batch system made, however."""
    request = make_request(
        mpi="hydra",
        mpiexec=mpiexec,
        command=("bash", "-c", "echo $(compgen -e | grep ^SLURM) $((PMI_FD != 900))"),
        setup=("echo $SLURM_JOB_ID",),
    )
    process = subprocess.run(
        ["bash", write_script(request)], capture_output=True, text=True, timeout=300, check=False
    )
    assert process.stdout.splitlines() == ["1", *["SLURM_SUBMIT_DIR SLURM_TMPDIR 1"] * 2]
    environment = local_environment()
    assert {name for name in environment if name.startswith(("SLURM", "PMI"))} == {
        "SLURM_TMPDIR",
        "SLURM_SUBMIT_DIR",
    }
    for launch in (Launch(mpi="cray"), Launch(launcher="flux")):
        assert local_environment(launch) == dict(os.environ)


STOPS = "cd $PIPECTL_START; echo TERM >stop; : >stopped"


@pytest.mark.parametrize(
    ("times", "calls", "rank"),
    [
        (PREEMPTED, 1, STOPS),
        ("PreemptEligibleTime=2026-11-29T10:00:00 PreemptTime=None", 0, STOPS),  # it is cancelled
        ("PreemptTime=2026-11-29T09:59:59", 0, STOPS),  # the start before was preempted
        ("", 0, STOPS),
        (PREEMPTED, 1, "kill $$"),  # before the ranks look for signals
        (PREEMPTED, 1, "rm $PIPECTL_START/starting; kill $$"),
        ("", 0, "kill $$"),
        (PREEMPTED, 0, ": >$PIPECTL_START/finished; exit 3"),
    ],
)
def test_a_job_that_slurm_preempts_goes_back_into_the_queue(
    make_request, tmp_path, monkeypatch, times, calls, rank
):
    """Slurm itself requeues it only if it lives until the end of its time of grace."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    shown = f"JobId=7 Restarts=1\n   StartTime=2026-11-29T10:00:00 EndTime=Unknown {times}"
    scontrol.write_text(
        f'#!/bin/bash\necho "$@" >>{tmp_path}/calls\n'
        f"[[ $1 != show ]] || exec echo '{shown}'\n"
        f"mkdir {tmp_path}/asked 2>/dev/null || exit 0\n"
        "echo 'Unable to contact slurm controller (connect failure)' >&2\nexit 1\n"
    )
    scontrol.chmod(0o755)
    never_sleep(scontrol.parent)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    request = make_request(checkpoint=Checkpoint(max_requeues=1))
    code = 75 if calls or rank == STOPS else 0 if "finished" in rank else 143
    assert run(request, "bash", "-c", rank, scheduler="slurm")[0] == code
    said = (tmp_path / "calls").read_text().splitlines() if code else []
    shown = ["show job 7"] if code else []
    assert said == [*shown, *["requeue 7"] * (2 * calls)], "it did not answer at first"
    assert len(read_errors(RunDirectory(request.run_directory).start)) == (code == 143)


def test_a_launcher_that_waits_for_a_lost_node_does_not_keep_the_script(make_request):
    """Whatever signals the whole group gets meanwhile."""
    request = make_request(checkpoint=SAVES)
    waits = "trap '' TERM INT; : >ready; until [[ -e go ]]; do sleep 0.05; done"
    fails = f"{waits}; : >$PIPECTL_START/errors/rank-0001.json; exec sleep 300"
    script = impatient(write_script(request, "bash", "-c", fails))
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    ignored = sum(1 << (number - 1) for number in signals)
    job = subprocess.Popen(
        ["bash", script], start_new_session=True, stderr=subprocess.PIPE, text=True
    )

    def ignores(process):
        with suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(status.partition("SigIgn:")[2].split()[0], 16) & ignored == ignored
        return False

    # The launcher and its guard, once they are ready.
    wait_until(lambda: sum(map(ignores, psutil.Process(job.pid).children())) == 2)
    wait_until((request.run_directory / "ready").exists)
    for number in signals:
        os.killpg(job.pid, number)
    (request.run_directory / "go").touch()
    try:
        assert "the launcher has not ended: it is killed" in job.communicate(timeout=300)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode > 0, "of the launcher, or of a signal: bash may take one for the other"
    assert (request.run_directory / "starts/1/exit_code").read_text() == f"{job.returncode}\n"


@pytest.mark.parametrize(("stopped", "code"), [("touch $PIPECTL_START/stopped", 75), ("true", 1)])
def test_a_stop_at_a_checkpoint_is_known_though_the_launchers_code_is_lost(
    make_request, stopped, code
):
    script = write_script(make_request(checkpoint=SAVES), "bash", "-c", stopped)
    text = script.read_text()
    body = text.replace('wait "$child"\n        code=$?', 'wait "$child"\n        code=-1')
    assert body != text
    assert subprocess.run(["bash", "-c", body], timeout=300, check=False).returncode == code


@pytest.mark.parametrize("scheduler", INDEX)
def test_hostile_directories_of_an_array_arrive(make_request, tmp_path, nasty, scheduler):
    runs = tuple(Path("/x") / text for text in nasty if text.isprintable() and "\0" not in text)
    script = get_scheduler(scheduler).render(make_request(array=Array(runs))).partition("run=")[0]
    script += 'printf "%s\\0" "${runs[@]}"'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [str(run) for run in runs]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheduler", INDEX)
def test_the_script_of_a_run_takes_over_that_of_its_array(make_request, tmp_path, scheduler):
    """In the same process, with the output in its log; a setup is the run's own matter."""
    runs = tuple(tmp_path / f"a b'{index}" for index in range(2))
    for directory in runs:
        (directory / "logs").mkdir(parents=True)
        (directory / "job.sh").write_text('echo "$$ $- $0"; exit 3\n')
    script = get_scheduler(scheduler).render(
        make_request(array=Array(runs), setup=("touch PWNED",))
    )
    (tmp_path / "array.sh").write_text(script)
    for beyond in ({}, {INDEX[scheduler]: "7"}):
        done = subprocess.run(["bash", "-c", script], env=beyond, capture_output=True)
        assert done.returncode != 0
        assert b"unbound variable" in done.stderr
    environment = {**os.environ, INDEX[scheduler]: "1"}
    with subprocess.Popen(["bash", "array.sh"], env=environment, cwd=tmp_path) as process:
        assert process.wait() == 3
    words = (runs[1] / "logs/job.log").read_text().split(maxsplit=2)
    assert words[0] == str(process.pid)
    assert words[2] == f"{runs[1]}/job.sh\n"
    assert not (runs[0] / "logs/job.log").exists()
    assert not (tmp_path / "PWNED").exists()


LAUNCHERS = {
    "ibrun": """[[ $1 == -n ]] || exit 99
ranks=$2
shift 2
[[ $1 == task_affinity ]] && shift""",
    "flux": """[[ "$1 $2 $4 ${FLUX_URI-}" == "run --nodes=2 --tasks-per-node=2 local:" ]] || exit 99
ranks=4
shift 4
while [[ $1 == -o ]]; do
    [[ $2 == @(exit-on-error|exit-timeout=none|cpu-affinity=per-task|pmi=simple) ]] || exit 98
    shift 2
done""",
}
"""As they read their words: TACC's user guides, flux-run(1)."""


@pytest.mark.parametrize(
    ("scheduler", "launch"),
    [
        ("slurm", {"launcher": "ibrun", "args": ("task_affinity",)}),
        ("local", {"launcher": "flux", "bind": "cores", "mpi": "simple"}),
        ("pbs", {"launcher": "flux"}),
    ],
)
def test_launchers_of_sites_start_all_ranks(make_request, tmp_path, monkeypatch, scheduler, launch):
    name = launch["launcher"]
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / name
    copies = 'for _ in $(seq "$ranks"); do "$@" & done\nwait\n'
    program.write_text(f"#!/bin/bash\n{LAUNCHERS[name]}\n{copies}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FLUX_URI", "local:")
    words = (
        "bash",
        "-c",
        "echo $OMP_NUM_THREADS $WORD >>ranks; cd $PIPECTL_START; : >finished; rm -f starting",
    )
    request = make_request(
        nodes=2, cpus_per_task=3, command=words, variables={"WORD": "a b"}, **launch
    )
    script = write_script(request, scheduler=scheduler)
    done = subprocess.run(["bash", script], timeout=300, check=False)
    run = request.run_directory
    assert done.returncode == 0, read_errors(RunDirectory(run).start)
    assert (run / "ranks").read_text().splitlines() == ["3 a b"] * 4


RUNTIME = """#!/bin/bash
# Drops its own words, of which some are wanted, marks the processes, and runs them.
words="$* "
while (($#)) && [[ $1 != python3 && $1 != /bin/sh ]]; do
    [[ $1 == -n ]] && shift
    shift
done
for wanted in WANTED; do [[ $words == *"$wanted "* ]] || exit 98; done
(($#)) || exit 97
[[ $1 == python3 ]] || [[ $5 == python3 ]] || exit 96
export INSIDE=$((${INSIDE-0} + 1)) TOKEN="of the image"
PATH=HERE/image:$PATH exec "$@"
"""
IMAGES = {
    "apptainer": ("local", "/x.sif", "apptainer", "--bind=/d:/d /x.sif"),
    "singularity": ("pbs", "/x.sif", "singularity", "--bind=/d:/d /x.sif"),
    "podman-hpc": ("local", "a/b:1", "podman-hpc", "run --volume=/d:/d a/b:1 --env=PIPECTL_*"),
    "shifter": ("pbs", "a/b:1", "shifter", "--image=a/b:1 --volume=/d:/d"),
    "pyxis": ("slurm", "r#a/b", "srun", "--container-image=r#a/b"),
    "cscs": ("slurm", "/a.toml", "srun", "--environment=HERE/run/container.toml"),
}
"""Batch system, image, program, and words that it must have."""


@pytest.mark.parametrize("runtime", IMAGES)
def test_every_process_of_a_job_runs_in_its_container(make_request, tmp_path, monkeypatch, runtime):
    """What measures and plans, the ranks and what they start, once each, with Python and the
    variables of the container; where the runtime is missing, the error says what to do."""
    scheduler, image, program, wanted = IMAGES[runtime]
    for name in ("bin", "image"):
        (tmp_path / name).mkdir()
    (tmp_path / "image" / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.delenv("INSIDE", raising=False)
    code = (
        "import os, subprocess, sys; subprocess.run(['bash', '-c', 'echo $INSIDE $TOKEN >>seen']); "
        "print(sys.argv[1:]); os.chdir(os.environ['PIPECTL_START']); "
        "os.path.exists('starting') and os.unlink('starting')"
    )
    own = (sys.executable, "-c", code, "it's", "a b")
    request = make_request(
        python=sys.executable,
        command=own,
        first_command=own,
        container=Container(image=image, runtime=runtime, mounts=("/d",)),
        variables={"TOKEN": "a b"},
    )
    script = write_script(request, *(own if program != "srun" else ()), scheduler=scheduler)
    log = RunDirectory(request.run_directory).job_log

    def start_job() -> int:
        with log.open("w") as output:
            done = subprocess.run(["bash", script], stdout=output, stderr=output, timeout=300)
        return done.returncode

    if program != "srun":
        assert start_job() == 127
        (error,) = read_errors(RunDirectory(request.run_directory).start)
        assert f"has no {program}: load its module" in error.message
    text = RUNTIME.replace("WANTED", wanted).replace("HERE", str(tmp_path))
    (tmp_path / "bin" / program).write_text(text)
    (tmp_path / "bin" / program).chmod(0o755)
    assert start_job() == 0, log.read_text()
    assert (request.run_directory / "seen").read_text() == "1 a b\n" * 2
    assert log.read_text() == "[\"it's\", 'a b']\n" * 2


def test_jinja_is_imported_only_to_render():
    code = "import sys, pipectl.batch, pipectl.jobs.state; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def never_sleep(folder):
    """Longer than a rank does."""
    (folder / "sleep").write_text("#!/bin/bash\n[[ $1 != 0.05 ]] || exec /bin/sleep 0.05\n")
    (folder / "sleep").chmod(0o755)


WAITS = "cd $PIPECTL_START; until [[ -e stop ]]; do sleep 0.05; done; : >stopped"


def test_a_job_of_pbs_stops_before_the_walltime_and_submits_itself_again_if_the_site_lets_it(
    pbs, make_request
):
    request = make_request(walltime=1, checkpoint=Checkpoint(max_requeues=1))
    directory = RunDirectory(request.run_directory)
    pbs.answer("qsub", stderr="qsub: Bad UID for job execution\n", rc=15)
    assert run(request, "bash", "-c", WAITS, scheduler="pbs")[0] == 75
    log = directory.job_log.read_text()
    assert "qsub: Bad UID for job execution\npipectl: this job may not submit another" in log
    assert directory.start.requeue_error.read_text() == "qsub: Bad UID for job execution\n"
    assert not directory.start.resubmitted.exists()
    pbs.answer("qsub", "12.vm\n")
    shutil.rmtree(directory.starts)
    for attempt in (1, 2):
        assert run(request, "bash", "-c", WAITS, scheduler="pbs")[0] == 75
        assert pbs.calls("qsub")[1:] == [["-C", "#PBS", str(directory.script)]], attempt
    assert directory.start_of(1).resubmitted.read_text() == "12.vm\n"


@pytest.mark.parametrize(
    "of_job",
    [
        {"after": ("4.vm",)},
        {"after": ("4[].vm",)},
        {"pbs": {"options": {"W": "depend=on:1"}}},
        {"pbs": {"options": {"W": ("umask=022", "depend=before:2.vm", "Depend=afterok:1.vm")}}},
    ],
)
def test_a_job_of_pbs_that_submits_itself_again_waits_for_no_other(pbs, make_request, of_job):
    """A server without a history takes a job that depends on one that is over, and drops it."""
    request = make_request(checkpoint=Checkpoint(max_requeues=1), **of_job)
    (pbs.folder / "qsub").write_text("#!/bin/bash\n[[ $# == 2 ]] && cat >next.sh && echo 12.vm\n")
    stops = "cd $PIPECTL_START; : >stop; : >stopped"
    assert run(request, "bash", "-c", stops, scheduler="pbs")[0] == 75
    directory = RunDirectory(request.run_directory)
    assert directory.start.resubmitted.read_text() == "12.vm\n"
    script, text = directory.script.read_text(), (directory.path / "next.sh").read_text()
    (line,) = set(script.splitlines()) - set(text.splitlines())
    assert "depend=" in line.lower()
    assert "before" not in line
    assert text == script.replace(f"{line}\n", "")


def test_a_job_of_pbs_whose_server_takes_the_next_job_without_an_answer_has_one(pbs, make_request):
    request = make_request(checkpoint=Checkpoint(max_requeues=1))
    (pbs.folder / "qsub").write_text(
        '#!/bin/bash\nhere=$(dirname "$0")\necho "$@" >>$here/called\n'
        "echo 13.vm >$here/qselect.stdout\necho 'qsub: Connection timed out' >&2\nexit 1\n"
    )
    never_sleep(pbs.folder)
    assert (
        run(request, "bash", "-c", "cd $PIPECTL_START; : >stop; : >stopped", scheduler="pbs")[0]
        == 75
    )
    directory = RunDirectory(request.run_directory)
    assert directory.start.resubmitted.read_text() == "13.vm\n"
    assert (pbs.folder / "called").read_text() == f"-C #PBS {directory.script}\n"


def test_a_job_of_pbs_that_is_deleted_does_not_come_back(pbs, make_request):
    request = make_request(checkpoint=Checkpoint(max_requeues=1))
    until = "until [[ -s stop ]]; do sleep 0.05; done"
    rank = f"trap '' TERM; : >ready; cd $PIPECTL_START; {until}; : >stopped"
    job = start(request, "bash", "-c", rank, scheduler="pbs")
    wait_until((request.run_directory / "ready").exists)
    job.terminate()
    assert end(job, request)[0] == 75
    assert pbs.calls("qsub") == []


def test_other_nodes_of_pbs_are_reached_by_the_task_manager(pbs, make_request):
    pbs.answer("pbs_tmrsh")
    rank = '"$HYDRA_LAUNCHER_EXEC" -x -q n2 "echo \'a  b\'" c; echo "$HYDRA_LAUNCHER"'
    request = make_request(nodes=2)
    assert run(request, "bash", "-c", rank, scheduler="pbs")[0] == 0
    assert RunDirectory(request.run_directory).job_log.read_text() == "ssh\n"
    assert pbs.calls("pbs_tmrsh") == [["n2", "/bin/bash", "-c", "echo 'a  b' c"]]
    pbs.answer("sleep")  # the agent's
    rank = '"$HYDRA_LAUNCHER_EXEC" n2 /bin/hydra_pmi_proxy; read -t 30 <> <(:)'
    assert run(request, "bash", "-c", rank, scheduler="pbs")[0] == 143
    (error,) = read_errors(RunDirectory(request.run_directory).start)
    assert "a process ended on n2 before MPI had begun in it" in error.message
