"""Submissions: interrupted, at once and of sweeps; and who may read what is left.

Commands at once are processes of their own; the batch system is a folder with one file a job.
"""

import contextlib
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.batch.local import LocalScheduler
from pipectl.cli import main
from pipectl.jobs.recover import recover
from pipectl.jobs.state import get_statuses
from pipectl.plan import Plan
from pipectl.profile import Profile
from pipectl.runs import Record, RunDirectory, list_runs
from pipectl.runtime.manifest import Manifest
from pipectl.spec import load, profile_key
from tests.batch.job_requests import wait_until

PATH = os.environ["PATH"]
"""With the compiler on it; tests of commands have a shorter one."""
SLURM = ("--scheduler", "slurm")
SUBMIT = ("submit", "job.yaml", *SLURM)
SBATCH = """
number=41
until mkdir queue/$number 2>/dev/null; do number=$((number + 1)); done
while read -r line; do
    [[ $line == '#SBATCH --comment='* ]] && comment=${line#*=}
done <"$2"
echo "$comment" >queue/$number/comment
[[ -e hang ]] && sleep 30
echo $number
"""
SQUEUE = """
for job in queue/*/; do
    job=${job%/}
    echo "${job#queue/}|PENDING|1|0|0||$(tr -d "'\\"" <$job/comment)|Priority"
done
"""


@pytest.fixture
def queue(place, program):
    (place / "queue").mkdir()
    (place / "bin/tr").symlink_to("/usr/bin/tr")
    program("sbatch", SBATCH)
    program("squeue", SQUEUE)
    program("scancel", "rm -rf queue/$1; exit 0")
    return place / "queue"


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[int]:
    """A command in a process of its own, with its output in a file of its name."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.setsid()
            file = os.open(f"{arguments[0]}-{os.getpid()}.out", os.O_CREAT | os.O_WRONLY)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os._exit(main(list(arguments)))
        os._exit(99)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at_once(*commands: tuple[str, ...]) -> list[int]:
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(started(*command)) for command in commands]
        return [code_of(pid) for pid in pids]


def runs() -> list[RunDirectory]:
    return list_runs(Path("runs"))


def jobs(queue: Path) -> set[str]:
    return {path.name for path in queue.iterdir()}


def interrupted(how: signal.Signals, *command: str) -> RunDirectory:
    """A submission that ends while sbatch, which has made the job, still says nothing."""
    Path("hang").touch()
    with started(*(command or SUBMIT)) as pid:
        wait_until(lambda: list(Path("queue").glob("*/comment")))
        os.kill(pid, how)
        assert code_of(pid) == (130 if how == signal.SIGINT else -how)
    Path("hang").unlink()
    (run,) = runs()
    if how == signal.SIGINT:
        (output,) = Path.cwd().glob("*.out")
        assert f"may be in the queue\n  see: pipectl status {run.name}\n" in output.read_text()
    record = Record.load(run.record)
    assert (record.state, record.job_id) == ("submitting", None)
    return run


DOWN = "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_an_interrupted_submission_is_completed_by_the_next_status_that_slurm_answers(
    cli, profile, queue, program, how
):
    run = interrupted(how)
    program("squeue", DOWN)
    assert cli("status", "last").code == 0
    assert Record.load(run.record).job_id is None
    program("squeue", SQUEUE)
    found = cli("status", "last", "--json").json
    assert (found["state"], found["job_id"], found["source"]) == ("QUEUED", "41", "queue")
    record = Record.load(run.record)
    assert (record.state, record.job_id) == ("submitted", "41")
    assert record.history[-1].detail == "found by its tag"
    assert cli("cancel", "last").code == 0
    assert jobs(queue) == set()


@pytest.mark.parametrize("command", [SUBMIT, ("profile", *SUBMIT[1:])])
def test_submitting_again_after_an_interrupt_makes_no_second_job(cli, profile, queue, command):
    run = interrupted(signal.SIGINT, *command)
    record = Record.load(run.record)
    for number in range(12):  # of a job with a longer name
        other = RunDirectory.create(run.path.parent, f"{record.name}-long", time.time() + number)
        replace(record, name=f"{record.name}-long", tag=f"other {number}").save(other.record)
    again = cli(*command)
    assert again.code == 2
    assert f"{run.name}: its submission was interrupted, but it is slurm job 41" in again.err
    assert (jobs(queue), len(runs())) == ({"41"}, 13)
    assert cli(*command).code == 0  # who has been told may have another
    assert jobs(queue) == {"41", "42"}


def test_an_interrupt_before_the_batch_system_is_asked_leaves_nothing(
    cli, profile, queue, monkeypatch
):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipectl.jobs.planning.write_plan", interrupt)
    assert cli(*SUBMIT).code == 130
    assert (runs(), jobs(queue)) == ([], set())


def test_a_submission_that_ends_while_another_looks_is_no_interrupted_one(
    cli, profile, queue, monkeypatch
):
    assert cli(*SUBMIT).code == 0
    (run,) = runs()
    done = Record.load(run.record)
    replace(done, state="submitting", job_id=None, history=done.history[:1]).save(run.record)

    def wait_for_the_other(run, now, **how):
        done.save(run.record)
        return recover(run, now, **how)

    monkeypatch.setattr("pipectl.jobs.recover.recover", wait_for_the_other)
    assert cli(*SUBMIT).code == 0
    assert jobs(queue) == {"41", "42"}


def test_commands_at_once_lose_and_double_no_job(cli, profile, queue):
    assert at_once(SUBMIT, SUBMIT) == [0, 0]
    records = [Record.load(run.record) for run in runs()]
    assert {record.job_id for record in records} == {"41", "42"} == jobs(queue)
    assert len({record.tag for record in records}) == 2

    for run in runs():
        assert cli("cancel", run.name).code == 0
        run.start.begun.touch()
        run.start.exit_code.write_text("1\n")
    resume, watch = ("resume", run.name), ("status", run.name, "--json")
    codes = at_once(resume, watch, resume, watch)
    assert (sorted(codes[::2]), codes[1::2]) == ([0, 2], [0, 0])
    record = Record.load(run.record)
    assert jobs(queue) == {record.job_id}
    assert [event.what for event in record.history].count("submitting") == 1

    cancel = ("cancel", run.name)
    assert {*at_once(cancel, ("status",), resume, cancel)} <= {0, 2}
    assert jobs(queue) <= {Record.load(run.record).job_id}
    assert not list(run.path.glob(".record*"))


def check_owner(run: RunDirectory, *, opened: bool = False) -> None:
    """Files are for their owner alone, and variables of the job are in two of them.

    If the owner has opened the directory to others, only these two stay closed.
    """
    paths, secret = [*run.path.rglob("*")], [run.job, run.variables]
    for path in secret if opened else [run.path, *paths]:
        whole = path.is_dir() or path == run.script
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if whole else 0o600), path
    texts = {path: path.read_bytes() for path in paths if path.is_file()}
    assert sorted(path for path in texts if b"swordfish" in texts[path]) == secret
    assert not any(b"of the environment" in text for text in texts.values())


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_everything_of_a_run_is_for_its_owner_alone(cli, profile, queue, monkeypatch, mask):
    monkeypatch.setenv("WANDB_API_KEY", "swordfish of the environment")
    given = ("--set", "environment.variables={KEY: swordfish}")
    before = os.umask(mask)
    try:
        assert "swordfish" not in cli(*SUBMIT, *given, "--dry-run").out
        assert "swordfish" not in cli("check", SUBMIT[1], *given, "--origins").out
        assert cli(*SUBMIT, *given).code == 0
        (run,) = runs()
        check_owner(run)
        for opened in (False, True):
            run.path.chmod(0o755 if opened else 0o700)
            for name in ("cancel", "resume"):
                for path in (run.start.begun, run.start.exit_code):
                    path.write_text("1\n")
                    path.chmod(0o600)
                assert cli(name, "last").code == 0
                check_owner(run, opened=opened)
        run.start.begun.touch(0o600)
        run.start.exit_code.write_text("1\n")
        assert cli("cancel", "last").code == 0
        assert cli("resume", "last", "--set", "environment.variables={KEY: ~}").code == 0
        assert not run.variables.exists()
    finally:
        os.umask(before)


@pytest.mark.mpi
@pytest.mark.timeout(600)
def test_everything_that_a_trained_run_leaves_is_for_its_owner_alone(
    cli, real_job, monkeypatch, warm_python
):
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setattr(sys, "executable", warm_python)
    options = ("variables={KEY: swordfish}", "training.steps=4", "checkpoint={every: 2}")
    options = (f"environment.{options[0]}", *options[1:], "trace={steps: [2]}")
    before = os.umask(0o002)
    try:
        settings = [word for option in options for word in ("--set", option)]
        result = cli("submit", "job.yaml", "--scheduler", "local", "--wait", *settings)
    finally:
        os.umask(before)
    assert result.code == 0, result.err
    (run,) = runs()
    names = {path.relative_to(run.path).as_posix() for path in run.path.rglob("*")}
    assert {"metrics.jsonl", "checkpoints/step-000004/manifest.json", "variables.sh"} <= names
    assert {"logs/job.log", "logs/rank-0000.log"} <= names
    assert len(list(run.start.watch.glob("node-0000.json"))) == 1
    check_owner(run)


RANKS = """\
[[ $1 == --version ]] && exit 1
while [[ $1 != --run ]]; do shift; done
: >$2/started
rm $PIPECTL_START/starting
until [[ -e $2/go ]]; do sleep 0.05; done
"""


@pytest.fixture
def start(cli, sweep, program, monkeypatch):
    """``start(5, 2)``: five runs, two at a time."""
    program("mpiexec", RANKS)
    python = program("python", f'exec {sys.executable} "$@"')
    monkeypatch.setattr(sys, "executable", str(python))

    def submit(points, at_once):
        grid = f"{{grid: {{training.seed: {[*range(points)]}}}, at_once: {at_once}}}"
        result = cli("submit", "job.yaml", "--scheduler", "local", "--set", f"sweep={grid}")
        assert result.code == 0, result.err
        return [RunDirectory(path) for path in sorted(Path("runs").glob("2*-tiny-*"))]

    yield submit
    cli("cancel", "tiny")


def until(runs, *wanted):
    def reached():
        return [status.job.state for status in get_statuses(runs, time.time())] == list(wanted)

    wait_until(reached, pause_s=0.05)


def test_a_few_run_at_a_time_in_their_order_and_what_is_cancelled_never_starts(
    cli, start, monkeypatch
):
    runs = start(5, 2)
    until(runs, "RUNNING", "RUNNING", "QUEUED", "QUEUED", "QUEUED")
    assert cli("cancel", runs[2].name).out == f"cancelled: {runs[2].name}\n"
    (runs[1].path / "go").touch()
    until(runs, "RUNNING", "COMPLETED", "CANCELLED", "RUNNING", "QUEUED")
    end = LocalScheduler.cancel

    def slowly(self, job_id):
        end(self, job_id)
        (runs[3].path / "go").touch()
        until(runs[3:4], "COMPLETED")

    monkeypatch.setattr(LocalScheduler, "cancel", slowly)
    assert cli("cancel", "tiny").out.startswith("cancelled: 2 of the 5 runs"), "one is complete"
    until(runs, "CANCELLED", "COMPLETED", "CANCELLED", "COMPLETED", "CANCELLED")
    started = [True, True, False, True, False]
    assert [(run.path / "started").exists() for run in runs] == started
    assert [Record.load(run.record).task is None for run in runs] == started
    assert cli("cancel", runs[4].name).out == f"{runs[4].name} had already ended\n"


def test_a_run_that_completes_while_it_is_cancelled_is_not_said_to_be_cancelled(
    cli, start, monkeypatch
):
    (run,) = start(1, 1)
    until([run], "RUNNING")

    def too_late(self, job_id):
        (run.path / "go").touch()
        until([run], "COMPLETED")

    monkeypatch.setattr(LocalScheduler, "cancel", too_late)
    assert cli("cancel", run.name).out == f"{run.name} was complete before it could be cancelled\n"
    until([run], "COMPLETED")
    assert Record.load(run.record).state != "cancelled"


def test_what_waits_for_a_driver_that_is_gone_never_starts(start):
    runs = start(2, 1)
    until(runs, "RUNNING", "QUEUED")
    driver = LocalScheduler().find(Record.load(runs[1].record).tag)
    LocalScheduler(grace_s=0.1).cancel(driver)
    until(runs[1:], "FAILED")
    assert "never started" in get_statuses(runs, time.time())[1].job.reason


def submit_planned(cli, profile):
    """Submit a job whose number of micro-batches is planned; the run."""
    planned = "pipeline.micro_batches=~"
    key = profile_key(load(Path("job.yaml"), [planned]))
    replace(Profile.load(profile), key=key).save(profile)
    assert cli(*SUBMIT, "--set", planned).code == 0
    (run,) = runs()
    return run


def test_a_resumed_job_may_get_a_container_and_its_micro_batches_stay(cli, profile, queue):
    """Its runtime is chosen as by submit, also where the plan is made again."""
    run = submit_planned(cli, profile)
    before = Plan.load(run.plan)
    assert cli("cancel", run.name).code == 0
    run.start.begun.touch()
    run.start.exit_code.write_text("1\n")
    result = cli("resume", "last", "--set", "environment.container={image: /images/new.sif}")
    assert result.code == 0, result.err
    assert "apptainer exec" in run.script.read_text()
    spec = load(run.job)
    assert spec.environment.container.runtime == "apptainer"
    assert spec.pipeline.micro_batches == before.micro_batches


def test_a_resume_that_the_ranks_would_refuse_is_refused_at_once(cli, profile, queue):
    """Micro-batches keep their size, and steps that are done stay."""
    run = submit_planned(cli, profile)
    before, job = Plan.load(run.plan), run.job.read_text()
    size, batch = before.micro_batch_size, before.batch_size
    assert size == 1
    assert cli("cancel", run.name).code == 0
    run.start.begun.touch()
    run.start.exit_code.write_text("1\n")
    checkpoint = run.checkpoints / "step-000003"
    checkpoint.mkdir(parents=True)
    Manifest(3, size, {}).save(checkpoint)
    for setting, words in (
        ("training.steps=2", "step 3 of it is done, which is more than training.steps: 2"),
        (f"pipeline.micro_batches={batch // 2}", f"--set pipeline.micro_batches={batch}"),
    ):
        result = cli("resume", "last", "--set", setting)
        assert (result.code, run.job.read_text()) == (2, job)
        assert words in " ".join(result.err.split())
    result = cli("resume", "last", "--set", f"training.batch_size={3 * batch}")
    assert result.code == 0, result.err
    assert Plan.load(run.plan).micro_batch_size == size
    assert Plan.load(run.plan).micro_batches == 3 * batch // size


@pytest.mark.parametrize("nodes", ["2", "2-3"])
def test_a_resume_that_is_refused_leaves_the_plans_of_a_range_of_nodes(
    cli, profile, queue, program, nodes
):
    planned = ["resources.tasks_per_node=1", "pipeline.stages=2"]

    def settings(nodes: str) -> list[str]:
        return [word for text in (*planned, f"resources.nodes={nodes}") for word in ("--set", text)]

    replace(Profile.load(profile), key=profile_key(load(Path("job.yaml"), planned))).save(profile)
    result = cli(*SUBMIT, *settings("2-4"))
    assert result.code == 0, result.err
    (run,) = runs()
    before = {path: path.read_text() for path in run.range.iterdir()}
    assert len(before) == 4
    assert cli("cancel", run.name).code == 0
    run.start.begun.touch()
    run.start.exit_code.write_text("1\n")
    run.predicted.write_bytes(b"\xff")  # damaged, and not needed
    refusal = "Batch job submission failed: Invalid partition name specified"
    program("sbatch", f"echo 'sbatch: error: {refusal}' >&2; exit 1")
    result = cli("resume", "last", "--set", f"resources.nodes={nodes}")
    assert result.code == 5, result.err
    assert {path: path.read_text() for path in run.range.iterdir()} == before
    assert run.predicted.read_bytes() == b"\xff"
