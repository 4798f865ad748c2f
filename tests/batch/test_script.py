"""Job scripts, run by real bash with plain commands instead of MPI."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from job_requests import change, run, start, wait_until, write_script

from pipectl.batch import Array, Template, get_scheduler
from pipectl.batch.script import render_variables, slurm_file, slurm_value
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
WAITS = "touch ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize("code", [0, 3, 255])
def test_exit_code_of_the_launch_is_kept(make_request, code):
    request = make_request()
    write_script(request)
    (request.run_directory / "exit_code").write_text("7\n")
    listed = run(request, "bash", "-c", f"ls; exit {code}")
    assert listed[0] == code
    assert "exit_code" not in listed[1].split(), "an old one is removed first"
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


def test_ranks_see_the_threads_and_the_run_directory(make_request):
    request = make_request(cpus_per_task=4, progress="core")
    names = "$OMP_NUM_THREADS $MKL_NUM_THREADS $PYTHONUNBUFFERED $PIPECTL_RUN_DIRECTORY"
    directory = str(request.run_directory)
    show = ("bash", "-c", f'echo "{names}"; pwd')
    assert run(request, *show)[1].splitlines() == [f"3 3 1 {directory}", directory]
    own = change(request, variables={"OMP_NUM_THREADS": "5"})
    assert run(own, *show)[1].startswith("5 3 ")


def test_variables_of_the_job_are_none_of_the_scripts_own(make_request):
    """Those with which it forwards signals and tells its exit code, say."""
    names = "child code attempt signal_code before IFS PATH_SEPARATOR timer deleted"
    request = make_request(variables=dict.fromkeys(names.split(), "1"))
    process = start(request, "bash", "-c", WAITS)
    wait_until((request.run_directory / "ready").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert (request.run_directory / "exit_code").read_text() == "143\n"
    assert run(request, "bash", "-c", "echo $child$code$attempt; exit 5") == (5, "111\n")
    assert (request.run_directory / "attempt").read_text() == "2\n"


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
    without = write_script(change(request, variables={}), "true")
    assert "variables.sh" not in without.read_text()


@pytest.mark.parametrize(
    ("changes", "code", "output"),
    [
        # The setup may use unset variables, fail, and change the directory.
        (
            {"setup": ("echo [$NOT_SET_ANYWHERE]", "false", "cd /\nset -e\n\techo 'kept  as is'")},
            75,
            "[]\nkept  as is\nlaunched in run\n",
        ),
        # Its traps do not fire after it; this one does once, before it is taken away.
        ({"setup": ("set -E; trap 'exit 9' ERR",)}, 75, "launched in run\n"),
        ({"setup": ("set -T; trap 'echo back' RETURN",)}, 75, "launched in run\n"),
        ({"setup": ("set -T; trap 'echo next' DEBUG",)}, 75, "next\nlaunched in run\n"),
        ({"first_command": ("bash", "-c", "echo one; exit 4")}, 4, "one\n"),
        ({"modules": ("no-such-module/1.0",)}, 1, None),
    ],
)
def test_what_comes_before_the_launch(make_request, changes, code, output):
    launch = ("bash", "-c", 'echo "launched in ${PWD##*/}"; exit 75')
    found_code, found = run(make_request(**changes), *launch)
    assert found_code == code
    assert found == output if output is not None else "launched" not in found


@pytest.mark.parametrize("name", ["TERM", "USR1", "USR2"])
def test_signals_reach_the_launch_whose_code_counts(make_request, name):
    request = make_request()
    process = start(request, "bash", "-c", f"trap 'echo got {name}; exit 5' {name}; {WAITS}")
    wait_until((request.run_directory / "ready").exists)
    process.send_signal(signal.Signals[f"SIG{name}"])
    assert process.communicate(timeout=60)[0] == f"got {name}\n"
    assert process.returncode == 5
    assert (request.run_directory / "exit_code").read_text() == "5\n"


def test_a_signal_that_the_launch_survives_does_not_end_the_script(make_request):
    request = make_request()
    handler = "trap 'touch got' USR2; touch ready; until [ -e end ]; do sleep 0.05; done; exit 6"
    process = start(request, "bash", "-c", handler)
    wait_until((request.run_directory / "ready").exists)
    process.send_signal(signal.SIGUSR2)
    wait_until((request.run_directory / "got").exists)
    (request.run_directory / "end").touch()
    process.communicate(timeout=60)
    assert process.returncode == 6


@pytest.mark.parametrize(
    ("name", "content"), [("TERM", "TERM"), ("INT", "INT"), ("USR1", ""), ("USR2", "")]
)
def test_a_signal_to_a_training_asks_the_ranks_to_save_and_leaves_the_launcher_alone(
    make_request, name, content
):
    request = make_request(checkpoint=SAVES)
    waits = "touch ready; until [[ -e stop ]]; do sleep 0.05; done; touch stopped"
    process = start(request, "bash", "-c", f"trap 'exit 9' TERM; {waits}")
    wait_until((request.run_directory / "ready").exists)
    process.send_signal(signal.Signals[f"SIG{name}"])
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert (request.run_directory / "stop").read_text() == content
    survives = ("bash", "-c", f"kill -s {name} $$; echo alive")
    assert content or run(request, *survives) == (0, "alive\n"), "it was done anyway"


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


def test_a_batch_system_starts_a_job_no_more_often_than_the_job_says(make_request):
    """After failures of nodes, say, of which the script does not know."""
    request = make_request(checkpoint=Checkpoint(max_requeues=1), earlier_starts=2)
    write_script(request)
    (request.run_directory / "attempt").write_text("2\n")
    results = [run(request, "bash", "-c", "touch errors/rank-0001.json; exit 1") for _ in range(3)]
    assert results[:2] == [(1, "")] * 2
    said = "it was started 4 times, as checkpoint.max_requeues allows\n"
    assert results[2] == (75, said)
    assert read_requeue_error(RunDirectory(request.run_directory)) == said.strip()
    assert (request.run_directory / "errors" / "rank-0001.json").exists(), "why it failed"
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


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"first_command": ("bash", "-c", f"trap 'exit 9' TERM; {WAITS}")}, 9),
        ({"setup": ("touch ready; sleep 0.5",)}, 143),
    ],
)
def test_termination_before_the_launch_ends_the_job(make_request, changes, code):
    request = make_request(**changes)
    process = start(request, "echo", "launched")
    wait_until((request.run_directory / "ready").exists)
    process.terminate()
    assert (process.communicate(timeout=60)[0], process.returncode) == ("", code)
    assert (request.run_directory / "exit_code").read_text() == f"{code}\n"


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
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert (request.run_directory / "exit_code").read_text() == "143\n"


INDEX = {"slurm": "SLURM_ARRAY_TASK_ID", "pbs": "PBS_ARRAY_INDEX"}
SITE = """\
{% extends base %}
{% block shebang %}#!/bin/bash -f{% endblock %}
{% block directives %}
#SBATCH --switches=1
{% endblock %}
{% block setup %}touch PWNED{% endblock %}
"""


@pytest.mark.parametrize("scheduler", INDEX)
def test_hostile_directories_of_an_array_arrive(make_request, tmp_path, nasty, scheduler):
    runs = tuple(Path("/x") / text for text in nasty if text.isprintable() and "\0" not in text)
    script = get_scheduler(scheduler).render(make_request(array=Array(runs))).partition("run=")[0]
    script += 'printf "%s\\0" "${runs[@]}"'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [str(run) for run in runs]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("template", [None, Template("site.sh", SITE)])
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


@pytest.mark.parametrize(
    "changes",
    [
        {"modules": ("gcc\n",)},
        {"run_directory": Path("/a\nb")},
        {"array": Array((Path("/a\x7fb"),))},
        {"first_command": ("a\0b",)},
        {"args": ("a\x1b[31m",)},
        {"slurm": {"partition": "a\x85b"}},
        {"slurm": {"options": {"x": ("a", "b\n#SBATCH --uid=0")}}},
        {"container": "x\t.sif"},
    ],
)
def test_values_that_no_script_can_hold_are_refused(make_request, changes):
    with pytest.raises(InvalidInputError, match="contains the control character"):
        get_scheduler("slurm").render(make_request(**changes))


@pytest.mark.parametrize("path", ["/a,b", "/a:b"])
def test_directories_that_apptainer_cannot_bind_are_refused(make_request, path):
    request = make_request(container="x.sif", binds=(Path(path),))
    with pytest.raises(InvalidInputError, match=r"environment\.container"):
        get_scheduler("local").render(request)


def test_variables_that_bash_cannot_export_are_refused(make_request):
    with pytest.raises(InvalidInputError, match="contains the control character"):
        render_variables(make_request(variables={"A": "x\ny"}))
    for name in ("", "1A", "A-B", "A B", "A=B", "é", "A\n", "A;touch x"):
        with pytest.raises(InvalidInputError, match="is not a variable name"):
            render_variables(make_request(variables={"OMP_NUM_THREADS": "1", name: "2"}))


def test_values_and_files_of_slurm_are_quoted_only_where_needed():
    assert slurm_value("gpu") == "gpu"
    assert slurm_value("a b") == '"a b"'
    assert slurm_value("") == '""'
    assert slurm_value('a\\b"c') == '"a\\\\b\\"c"'
    assert slurm_value("#no comment") == '"#no comment"'
    assert slurm_file("/runs/100%/job.log") == "/runs/100%%/job.log"
    # A backslash switches patterns off and halves backslashes; then the quoting doubles them.
    assert slurm_file("/a\\b%j") == '"/a' + "\\" * 4 + 'b%j"'


def test_names_in_the_templates_are_those_that_python_reads(make_request):
    request = make_request(checkpoint=Checkpoint(max_requeues=1), variables={"A": "1"})
    text = "".join(get_scheduler(name).render(request) for name in ("local", "pbs"))
    for name in (ATTEMPT, RUN_VARIABLE, SCRIPT):
        assert f"export {name}=" in text
    run = RunDirectory(Path("x"))
    for path in (run.requeue_error, run.variables):
        assert f'"${RUN_VARIABLE}/{path.name}"' in text
    for path in (run.exit_code, run.attempt, run.resubmitted):
        assert f"write_file {path.name} " in text


def test_jinja_is_imported_only_to_render():
    code = "import sys, pipectl.batch, pipectl.jobs.state; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
