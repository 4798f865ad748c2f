"""Job scripts, run by real bash with plain commands instead of MPI."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from job_requests import change

from pipectl.batch import Array, JobRequest, Template, get, render_variables
from pipectl.errors import InvalidInputError
from pipectl.runs import (
    ATTEMPT,
    RUN_VARIABLE,
    SCRIPT,
    RunDirectory,
)
from pipectl.spec.models import Checkpoint

MakeRequest = Callable[..., JobRequest]


def render(request: JobRequest, launch: Sequence[str]) -> str:
    """A script with a launcher that drops ``-n <ranks>`` and runs the command once."""
    launcher = ("bash", "-c", 'shift 2; exec "$@"', "bash")
    script = get("local").render(change(request, command=tuple(launch), mpiexec="mpiexec"))
    assert script.count("run_ranks mpiexec ") == 1
    return script.replace("run_ranks mpiexec ", f"run_ranks {shlex.join(launcher)} ")


def start(request: JobRequest, launch: Sequence[str]) -> subprocess.Popen[str]:
    request.run_directory.mkdir(parents=True, exist_ok=True)
    script = request.run_directory / "job.sh"
    script.write_text(render(request, launch))
    (request.run_directory / "variables.sh").write_text(render_variables(request))
    return subprocess.Popen(
        ["bash", str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(request: JobRequest, launch: Sequence[str]) -> tuple[int, str]:
    process = start(request, launch)
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def impatient(script: str) -> str:
    """A script that kills a launcher soon after a rank has failed."""
    return script.replace("tick_s=5", "tick_s=0.1").replace("patience=12", "patience=2")


def exit_file(request: JobRequest) -> str:
    return (request.run_directory / "exit_code").read_text()


def wait_for(path: Path) -> None:
    for _ in range(200):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} never appeared")


@pytest.mark.parametrize("code", [0, 3, 255])
def test_exit_code_of_the_launch_is_kept(make_request: MakeRequest, code: int) -> None:
    request = make_request()
    assert run(request, ["bash", "-c", f"exit {code}"])[0] == code
    assert exit_file(request) == f"{code}\n"
    assert not (request.run_directory / "exit_code.tmp").exists()


def test_an_old_exit_code_is_removed_first(make_request: MakeRequest) -> None:
    request = make_request()
    request.run_directory.mkdir()
    (request.run_directory / "exit_code").write_text("7\n")
    _, output = run(request, ["bash", "-c", "ls"])
    assert "exit_code" not in output.split()


def test_nasty_values_arrive_unchanged(
    make_request: MakeRequest, nasty: list[str], tmp_path: Path
) -> None:
    variables = {f"NASTY_{index}": value for index, value in enumerate(nasty)}
    report = 'printf "%s\\0" "$@"; for n in ${!NASTY_*}; do printf "%s=%s\\0" "$n" "${!n}"; done'
    directory = tmp_path / "a b'c\"d$HOME\\e%j;touch PWNED"
    request = make_request(run_directory=directory, variables=variables)
    code, output = run(request, ["bash", "-c", report, "bash", *nasty])
    assert code == 0
    parts = output.split("\0")[:-1]
    assert parts[: len(nasty)] == nasty
    assert dict(part.split("=", 1) for part in parts[len(nasty) :]) == variables
    assert not list(tmp_path.rglob("PWNED"))


def test_ranks_see_the_threads_and_the_run_directory(make_request: MakeRequest) -> None:
    request = make_request(cpus_per_task=4, progress="core")
    names = "$OMP_NUM_THREADS $MKL_NUM_THREADS $PYTHONUNBUFFERED $PIPECTL_RUN_DIRECTORY"
    _, output = run(request, ["bash", "-c", f'echo "{names}"; pwd'])
    directory = str(request.run_directory)
    assert output.splitlines() == [f"3 3 1 {directory}", directory]


def test_own_variables_win_over_the_defaults(make_request: MakeRequest) -> None:
    request = make_request(variables={"OMP_NUM_THREADS": "5"})
    assert run(request, ["bash", "-c", "echo $OMP_NUM_THREADS"])[1] == "5\n"


def test_variables_of_the_job_are_none_of_the_scripts_own(
    make_request: MakeRequest, tmp_path: Path
) -> None:
    """Those with which it forwards signals and tells its exit code, say."""
    names = "child code attempt interrupted signalled before IFS PATH_SEPARATOR timer deleted"
    request = make_request(variables=dict.fromkeys(names.split(), "1"))
    process = start(request, ["bash", "-c", f"touch {tmp_path}/begun; exec sleep 60"])
    wait_for(tmp_path / "begun")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert exit_file(request) == "143\n"
    assert run(request, ["bash", "-c", "echo $child$code$attempt; exit 5"]) == (5, "111\n")
    assert (request.run_directory / "attempt").read_text() == "2\n"


def test_no_value_of_a_variable_is_in_the_script(make_request: MakeRequest) -> None:
    request = make_request(variables={"API_KEY": "swordfish"}, prepare=("true",))
    script = render(request, ["true"])
    assert "swordfish" not in script
    assert "API_KEY" in script, "in a comment"
    assert render_variables(request) == "export API_KEY=swordfish\n"
    assert "variables.sh" not in render(make_request(), ["true"])


def test_a_job_does_not_run_without_its_variables(make_request: MakeRequest) -> None:
    request = make_request(variables={"API_KEY": "swordfish"})
    assert run(request, ["echo", "ran"]) == (0, "ran\n")
    (request.run_directory / "variables.sh").unlink()
    command = ["bash", str(request.run_directory / "job.sh")]
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "ran" not in again.stdout


def test_setup_may_use_unset_variables_fail_and_change_directory(make_request: MakeRequest) -> None:
    setup = ("echo [$NOT_SET_ANYWHERE]", "false", "cd /\nset -e\n\techo 'kept  as is'")
    request = make_request(setup=setup)
    code, output = run(request, ["pwd"])
    assert code == 0
    assert output.splitlines() == ["[]", "kept  as is", str(request.run_directory)]


@pytest.mark.parametrize(
    ("setup", "output"),
    [
        ("set -E; trap 'exit 9' ERR", "launched\n"),
        ("set -T; trap 'echo back' RETURN", "launched\n"),
        ("set -T; trap 'echo next' DEBUG", "next\nlaunched\n"),  # before it is taken away
    ],
)
def test_traps_of_the_setup_do_not_fire_behind_it(
    make_request: MakeRequest, setup: str, output: str
) -> None:
    request = make_request(setup=(setup,))
    assert run(request, ["bash", "-c", "echo launched; exit 75"]) == (75, output)
    assert exit_file(request) == "75\n"


def test_setup_with_a_carriage_return_is_refused(make_request: MakeRequest) -> None:
    with pytest.raises(InvalidInputError, match=r"environment\.setup"):
        render(make_request(setup=("echo a\r\necho b",)), ["true"])


def test_a_module_that_cannot_be_loaded_ends_the_job(make_request: MakeRequest) -> None:
    request = make_request(modules=("no-such-module/1.0",))
    code, output = run(request, ["echo", "launched"])
    assert code != 0
    assert "launched" not in output
    assert exit_file(request) == f"{code}\n"


def test_a_failed_preparation_ends_the_job(make_request: MakeRequest) -> None:
    request = make_request(prepare=("bash", "-c", "echo one; exit 4"))
    code, output = run(request, ["echo", "launched"])
    assert (code, output) == (4, "one\n")
    assert exit_file(request) == "4\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_reach_the_launch_whose_code_counts(
    make_request: MakeRequest, number: signal.Signals
) -> None:
    request = make_request()
    name = number.name.removeprefix("SIG")
    handler = f"trap 'echo got {name}; exit 5' {name}; touch ready; while :; do sleep 0.05; done"
    process = start(request, ["bash", "-c", handler])
    wait_for(request.run_directory / "ready")
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert output == f"got {name}\n"
    assert process.returncode == 5
    assert exit_file(request) == "5\n"


def test_a_signal_that_the_launch_survives_does_not_end_the_script(
    make_request: MakeRequest,
) -> None:
    request = make_request()
    handler = "trap 'touch got' USR2; touch ready; until [ -e end ]; do sleep 0.05; done; exit 6"
    process = start(request, ["bash", "-c", handler])
    wait_for(request.run_directory / "ready")
    process.send_signal(signal.SIGUSR2)
    wait_for(request.run_directory / "got")
    (request.run_directory / "end").touch()
    process.communicate(timeout=30)
    assert process.returncode == 6


@pytest.mark.parametrize(
    ("name", "said"), [("TERM", "TERM"), ("INT", "INT"), ("USR1", ""), ("USR2", "")]
)
def test_a_signal_to_a_training_asks_the_ranks_to_save_and_leaves_the_launcher_alone(
    make_request: MakeRequest, name: str, said: str
) -> None:
    request = make_request(checkpoint=Checkpoint(max_requeues=0))
    launcher = "trap 'exit 9' TERM; touch ready; until [[ -e stop ]]; do sleep 0.05; done; "
    process = start(request, ["bash", "-c", f"{launcher} touch stopped"])
    wait_for(request.run_directory / "ready")
    process.send_signal(signal.Signals[f"SIG{name}"])
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert (request.run_directory / "stop").read_text() == said


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_the_launcher_of_a_training_survives_signals_for_the_ranks(
    make_request: MakeRequest, name: str
) -> None:
    request = make_request(checkpoint=Checkpoint(max_requeues=0))
    assert run(request, ["bash", "-c", f"kill -s {name} $$; echo alive"]) == (0, "alive\n")


def test_a_launcher_that_waits_for_a_lost_node_does_not_keep_the_script(
    make_request: MakeRequest,
) -> None:
    request = make_request(checkpoint=Checkpoint(max_requeues=0))
    (request.run_directory / "errors").mkdir(parents=True)
    body = render(request, ["bash", "-c", "trap '' TERM; : >errors/rank-0001.json; exec sleep 300"])
    body = impatient(body)
    done = subprocess.run(["bash", "-c", body], capture_output=True, text=True, timeout=60)
    assert done.returncode == 137
    assert "the launcher has not ended: it is killed" in done.stderr
    assert exit_file(request) == "137\n"


def test_signals_to_the_whole_group_end_no_guard_of_the_launcher(
    make_request: MakeRequest,
) -> None:
    request = make_request(checkpoint=Checkpoint(max_requeues=0))
    (request.run_directory / "errors").mkdir(parents=True)
    waits = "trap '' TERM INT; : >ready; until [[ -e go ]]; do sleep 0.05; done"
    body = render(request, ["bash", "-c", f"{waits}; : >errors/rank-0001.json; exec sleep 300"])
    script = subprocess.Popen(
        ["bash", "-c", impatient(body)], start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    wait_for(request.run_directory / "ready")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        os.killpg(script.pid, number)
    (request.run_directory / "go").touch()
    try:
        assert "the launcher has not ended: it is killed" in script.communicate(timeout=30)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
    assert script.returncode == 137


def test_errors_of_an_earlier_start_that_cannot_be_moved_end_no_other(
    make_request: MakeRequest,
) -> None:
    request = make_request(checkpoint=Checkpoint(max_requeues=1))
    errors = request.run_directory / "errors"
    errors.mkdir(parents=True)
    (errors / "rank-0001.json").touch()
    (errors / "attempt-1").touch()  # no directory
    (request.run_directory / "attempt").write_text("1\n")
    body = impatient(render(request, ["bash", "-c", "sleep 1.5; exit 0"]))
    done = subprocess.run(["bash", "-c", body], capture_output=True, text=True, timeout=60)
    assert (done.returncode, exit_file(request)) == (0, "0\n"), done.stderr


@pytest.mark.parametrize(("stopped", "code"), [("touch stopped", 75), ("true", 1)])
def test_a_stop_at_a_checkpoint_is_known_though_the_launchers_code_is_lost(
    make_request: MakeRequest, stopped: str, code: int
) -> None:
    request = make_request(checkpoint=Checkpoint(max_requeues=0))
    body = render(request, ["bash", "-c", stopped])
    body = body.replace('wait "$child"\n        code=$?', 'wait "$child"\n        code=-1')
    assert "code=-1" in body
    request.run_directory.mkdir()
    assert subprocess.run(["bash", "-c", body], timeout=30, check=False).returncode == code
    assert exit_file(request) == f"{code}\n"


def test_a_signal_reaches_the_preparation(make_request: MakeRequest) -> None:
    handler = "trap 'exit 9' TERM; touch ready; while :; do sleep 0.05; done"
    request = make_request(prepare=("bash", "-c", handler))
    process = start(request, ["echo", "launched"])
    wait_for(request.run_directory / "ready")
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (9, "")


def test_termination_during_the_setup_ends_the_job(make_request: MakeRequest) -> None:
    request = make_request(setup=("touch ready; sleep 0.5",))
    process = start(request, ["echo", "launched"])
    wait_for(request.run_directory / "ready")
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (143, "")
    assert exit_file(request) == "143\n"


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("variables", {"A": "x\ny"}, r"environment\.variables\.A"),
        ("variables", {"A B": "x"}, r"environment\.variables"),
        ("modules", ("gcc\n",), r"environment\.modules"),
        ("run_directory", Path("/a\nb"), r"output\.directory"),
        ("prepare", ("a\0b",), "prepare"),
    ],
)
def test_values_that_no_script_can_hold_are_refused(
    make_request: MakeRequest, field: str, value: object, named: str
) -> None:
    request = change(make_request(), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=named):
        render(request, ["true"])


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
def test_hostile_directories_of_an_array_arrive(
    make_request: MakeRequest, tmp_path: Path, nasty: list[str], scheduler: str
) -> None:
    runs = tuple(Path("/x") / text for text in nasty if text.isprintable() and "\0" not in text)
    script = get(scheduler).render(make_request(array=Array(runs))).partition("run=")[0]
    script += 'printf "%s\\0" "${runs[@]}"'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [str(run) for run in runs]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("template", [None, Template("site.sh", SITE)])
@pytest.mark.parametrize("scheduler", INDEX)
def test_the_script_of_a_run_takes_over_that_of_its_array(
    make_request: MakeRequest, tmp_path: Path, scheduler: str, template: Template | None
) -> None:
    """In the same process, with the output in its log; a template is the run's own matter."""
    runs = tuple(tmp_path / f"a b'{index}" for index in range(2))
    for run in runs:
        (run / "logs").mkdir(parents=True)
        (run / "job.sh").write_text('echo "$$ $- $0"; exit 3\n')
    script = tmp_path / "array.sh"
    script.write_text(get(scheduler).render(make_request(array=Array(runs), template=template)))
    environment = {**os.environ, INDEX[scheduler]: "1"}
    with subprocess.Popen(["bash", str(script)], env=environment, cwd=tmp_path) as process:
        assert process.wait() == 3
    said = (runs[1] / "logs/job.log").read_text().split(maxsplit=2)
    assert said[0] == str(process.pid)
    assert ("f" in said[1]) == (template is not None), "the options of the template's own bash"
    assert said[2] == f"{runs[1]}/job.sh\n"
    assert not (runs[0] / "logs/job.log").exists()
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("scheduler", INDEX)
def test_an_index_beyond_the_runs_starts_nothing(
    make_request: MakeRequest, tmp_path: Path, scheduler: str
) -> None:
    script = get(scheduler).render(make_request(array=Array((tmp_path, tmp_path))))
    for environment in ({}, {INDEX[scheduler]: "7"}):
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True)
        assert done.returncode != 0
        assert b"unbound variable" in done.stderr


APPTAINER = """#!/bin/bash
[[ $1 == exec ]] || exit 99
shift
while [[ $1 == -* ]]; do echo "option $1"; shift; done
echo "image $1"
shift
[[ $1 == python3 ]] || exit 98
exec {python} "${{@:2}}"
"""


def test_python_of_the_container_runs_with_the_same_words(
    make_request: MakeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        prepare=own,
    )
    once = f"option --bind={tmp_path}\noption --bind=/my dir\nimage my image.sif\n"
    assert run(request, own) == (0, 2 * f"{once}[\"it's\", 'a b']\n")


@pytest.mark.parametrize("name", ["/a,b", "/a:b"])
def test_directories_that_apptainer_would_cut_are_refused(
    make_request: MakeRequest, name: str
) -> None:
    with pytest.raises(InvalidInputError, match=r"environment\.container"):
        render(make_request(container="x.sif", binds=(Path(name),)), ["true"])


def test_names_in_the_templates_are_those_that_python_reads(make_request: MakeRequest) -> None:
    request = make_request(checkpoint=Checkpoint(max_requeues=1), variables={"A": "1"})
    text = "".join(get(name).render(request) for name in ("local", "pbs"))
    for name in (ATTEMPT, RUN_VARIABLE, SCRIPT):
        assert f"export {name}=" in text
    run = RunDirectory(Path("x"))
    for path in (run.requeue_error, run.resubmitted, run.variables):
        assert f'"${RUN_VARIABLE}/{path.name}"' in text


def test_jinja_is_imported_only_to_render() -> None:
    code = "import sys, pipectl.batch, pipectl.jobs.state; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
