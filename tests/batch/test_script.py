"""Job scripts, run by real bash with plain commands instead of MPI."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from job_requests import change, end, fields, run, start, wait_until, write_script

from pipectl.batch import Array, Template, get_scheduler
from pipectl.batch.script import render_variables
from pipectl.errors import InvalidInputError
from pipectl.runs import (
    ATTEMPT,
    RUN_VARIABLE,
    SCRIPT,
    RunDirectory,
    read_requeue_error,
)
from pipectl.spec.models import Checkpoint

SAVES = Checkpoint(max_requeues=0)
TEMPLATE = "{% extends base %}{% block setup %}\nSETUP{% endblock %}"
AT_EXIT = """{% block at_exit %}
echo "$word's $code, $(cat exit_code)"; false
{% endblock %}"""
INDEX = {"slurm": "SLURM_ARRAY_TASK_ID", "pbs": "PBS_ARRAY_INDEX"}


@pytest.mark.parametrize("case", yaml.safe_load(Path(__file__).with_name("ends.yaml").read_text()))
def test_how_jobs_end(make_request, case):
    requests = [make_request(**fields(case.get("job", {})))]
    if "setup" in case:
        template = Template("site.sh", TEMPLATE.replace("SETUP", case["setup"]))
        requests.insert(0, change(requests[0], setup=(case["setup"],)))
        requests[1] = change(requests[1], template=template)
    for request in requests:
        (request.run_directory / "ready").unlink(missing_ok=True)
        process = start(request, "bash", "-c", case["rank"])
        if "signal" in case:
            wait_until((request.run_directory / "ready").exists)
            process.send_signal(signal.Signals[f"SIG{case['signal']}"])
        code, output = end(process, request)
        assert (code, output) == (case["code"], case.get("output", output))
        assert "launched" not in output or code in {0, 75}


def test_an_old_exit_code_is_removed_and_commands_at_the_end_see_the_new_one(make_request):
    text = TEMPLATE.replace("SETUP", "word=it\n") + AT_EXIT
    request = make_request(template=Template("site.sh", text))
    write_script(request)
    (request.run_directory / "exit_code").write_text("7\n")
    code, output = run(request, "bash", "-c", "echo *; exit 255")
    assert code == 255
    files, end = output.splitlines()
    assert "exit_code" not in files.split()
    assert end == "it's 255, 255"
    assert not (request.run_directory / "exit_code.tmp").exists()


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
    own = f"${ATTEMPT} ${RUN_VARIABLE} ${SCRIPT}"
    process = start(request, "bash", "-c", f'echo "{shown} {own}"; pwd; exit 5')
    code, output = end(process, request)
    directory = request.run_directory
    assert (code, output) == (5, f"5 3 1 111 1 {directory} {process.pid}\n{directory}\n")
    assert RunDirectory(directory).attempt.read_text() == "1\n"


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


def impatient(script: Path) -> Path:
    """A script that kills a launcher soon after a rank has failed."""
    text = script.read_text().replace("tick_s=5", "tick_s=0.1")
    script.write_text(text.replace("patience=12", "patience=2"))
    return script


def test_a_launcher_that_waits_for_a_lost_node_does_not_keep_the_script(make_request):
    """Whatever signals the whole group gets meanwhile."""
    request = make_request(checkpoint=SAVES)
    waits = "trap '' TERM INT; : >ready; until [[ -e go ]]; do sleep 0.05; done"
    fails = f"{waits}; : >errors/rank-0001.json; exec sleep 300"
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
        assert "the launcher has not ended: it is killed" in job.communicate(timeout=60)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode > 0, "of the launcher, or of a signal: bash may take one for the other"
    assert (request.run_directory / "exit_code").read_text() == f"{job.returncode}\n"


def test_errors_of_an_earlier_start_that_cannot_be_moved_end_no_other(make_request):
    request = make_request(checkpoint=Checkpoint(max_requeues=1))
    script = impatient(write_script(request, "bash", "-c", "sleep 1.5; exit 0"))
    (request.run_directory / "errors" / "rank-0001.json").touch()
    (request.run_directory / "errors" / "attempt-1").touch()  # no directory
    (request.run_directory / "attempt").write_text("1\n")
    done = subprocess.run(["bash", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_job_counts_its_starts_keeps_their_errors_and_starts_no_more_often_than_it_says(
    make_request,
):
    """A batch system starts it again after failures of nodes, of which the script does not know."""
    request = make_request(checkpoint=Checkpoint(max_requeues=1), earlier_starts=2)
    write_script(request)
    (request.run_directory / "attempt").write_text("2\n")
    command = "echo $PIPECTL_ATTEMPT; touch errors/rank-0001.json; exit 1"
    results = [run(request, "bash", "-c", command) for _ in range(3)]
    said = "it was started 4 times, as checkpoint.max_requeues allows\n"
    assert results == [(1, "3\n"), (1, "4\n"), (75, said)]
    assert read_requeue_error(RunDirectory(request.run_directory)) == said.strip()
    errors = request.run_directory / "errors"
    kept = {str(path.relative_to(errors)) for path in errors.rglob("*.json")}
    assert kept == {"attempt-3/rank-0001.json", "rank-0001.json"}, "why it failed"
    for limits in (SAVES, None):
        assert run(change(request, checkpoint=limits), "true") == (0, "")


@pytest.mark.parametrize(("stopped", "code"), [("touch stopped", 75), ("true", 1)])
def test_a_stop_at_a_checkpoint_is_known_though_the_launchers_code_is_lost(
    make_request, stopped, code
):
    script = write_script(make_request(checkpoint=SAVES), "bash", "-c", stopped)
    text = script.read_text()
    body = text.replace('wait "$child"\n        code=$?', 'wait "$child"\n        code=-1')
    assert body != text
    assert subprocess.run(["bash", "-c", body], timeout=60, check=False).returncode == code


def test_termination_before_the_setup_is_no_success(make_request):
    request = make_request()
    attempt = write_script(request).parent / "attempt"
    os.mkfifo(attempt)  # in which the script waits for what is read first
    process = start(request, "true")
    writers: list[int] = []

    def reads():
        with suppress(OSError):  # nobody has it open
            writers.append(os.open(attempt, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    wait_until(reads)
    process.terminate()
    os.close(writers[0])
    assert end(process, request)[0] == 143


SITE = Template(
    "site.sh",
    "{% extends base %}{% block shebang %}#!/bin/bash -f{% endblock %}"
    "{% block directives %}\n#SBATCH --switches=1\n{% endblock %}"
    "{% block setup %}touch PWNED{% endblock %}",
)


@pytest.mark.parametrize("scheduler", INDEX)
def test_hostile_directories_of_an_array_arrive(make_request, tmp_path, nasty, scheduler):
    runs = tuple(Path("/x") / text for text in nasty if text.isprintable() and "\0" not in text)
    script = get_scheduler(scheduler).render(make_request(array=Array(runs))).partition("run=")[0]
    script += 'printf "%s\\0" "${runs[@]}"'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [str(run) for run in runs]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("template", [None, SITE])
@pytest.mark.parametrize("scheduler", INDEX)
def test_the_script_of_a_run_takes_over_that_of_its_array(
    make_request, tmp_path, scheduler, template
):
    """In the same process, with the output in its log; a template is the run's own matter."""
    runs = tuple(tmp_path / f"a b'{index}" for index in range(2))
    for directory in runs:
        (directory / "logs").mkdir(parents=True)
        (directory / "job.sh").write_text('echo "$$ $- $0"; exit 3\n')
    script = get_scheduler(scheduler).render(make_request(array=Array(runs), template=template))
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
    assert ("f" in words[1]) == (template is not None), "the options of the template's own bash"
    assert words[2] == f"{runs[1]}/job.sh\n"
    assert not (runs[0] / "logs/job.log").exists()
    assert not (tmp_path / "PWNED").exists()


APPTAINER = """#!/bin/bash
[[ $1 == exec ]] || exit 99
shift
while [[ $1 == -* ]]; do echo "option $1"; shift; done
echo "image $1"
shift
[[ $1 == python3 ]] || exit 98
exec {python} "${{@:2}}"
"""


def test_python_of_the_container_runs_with_the_same_words(make_request, tmp_path, monkeypatch):
    fake = tmp_path / "bin" / "apptainer"
    fake.parent.mkdir()
    fake.write_text(APPTAINER.format(python=sys.executable))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    own = (sys.executable, "-c", "import sys; print(sys.argv[1:])", "it's", "a b")
    request = make_request(
        python=sys.executable,
        container="my image.sif",
        binds=(tmp_path, Path("/my dir")),
        first_command=own,
    )
    once = f"option --bind={tmp_path}\noption --bind=/my dir\nimage my image.sif\n"
    assert run(request, *own) == (0, 2 * f"{once}[\"it's\", 'a b']\n")


def test_jinja_is_imported_only_to_render():
    code = "import sys, pipectl.batch, pipectl.jobs.state; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


WAITS = "until [[ -e stop ]]; do sleep 0.05; done; : >stopped"


def test_a_job_of_pbs_stops_before_the_walltime_and_submits_itself_again_if_the_site_lets_it(
    pbs, make_request
):
    request = make_request(walltime=1, checkpoint=Checkpoint(max_requeues=1))
    directory = RunDirectory(request.run_directory)
    pbs.answer("qsub", stderr="qsub: Bad UID for job execution\n", rc=15)
    assert run(request, "bash", "-c", WAITS, scheduler="pbs")[0] == 75
    log = directory.job_log.read_text()
    assert "qsub: Bad UID for job execution\npipectl: this job may not submit another" in log
    assert directory.requeue_error.read_text() == "qsub: Bad UID for job execution\n"
    assert not directory.resubmitted.exists()
    pbs.answer("qsub", "12.vm\n")
    directory.attempt.unlink()
    for attempt in (1, 2):
        assert run(request, "bash", "-c", WAITS, scheduler="pbs")[0] == 75
        assert pbs.calls("qsub")[1:] == [["-C", "#PBS", str(directory.script)]], attempt
    assert directory.resubmitted.read_text() == "12.vm\n"


def test_a_job_of_pbs_that_is_deleted_does_not_come_back(pbs, make_request):
    request = make_request(checkpoint=Checkpoint(max_requeues=1))
    rank = "trap '' TERM; : >begun; until [[ -s stop ]]; do sleep 0.05; done; : >stopped"
    job = start(request, "bash", "-c", rank, scheduler="pbs")
    wait_until((request.run_directory / "begun").exists)
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
