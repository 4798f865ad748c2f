import json
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SLURM = ("--scheduler", "slurm")
UNMEASURED = (
    "no up-to-date profile: the model is measured before it is trained, in the job's allocation"
)


def test_without_a_profile_the_job_makes_one_and_a_dry_run_leaves_nothing(
    cli, job, program, only_run
):
    result = cli("submit", "job.yaml", *SLURM, "--dry-run")
    assert (result.code, result.err) == (0, f"{UNMEASURED}\n")
    assert result.out.startswith("#!/bin/bash\n#SBATCH --job-name=tiny\n")
    assert "-m pipectl.jobs.in_job " in result.out
    assert "-m pipectl.runtime.worker --run " in result.out
    assert not Path("runs").exists()
    program("sbatch", "echo 41")
    submitted = cli("submit", "job.yaml", *SLURM)
    assert (submitted.code, submitted.err) == (0, f"{UNMEASURED}\n")
    assert not (only_run() / "profile.json").exists()
    assert without_names((only_run() / "job.sh").read_text()) == without_names(result.out)


def without_names(script: str) -> list[str]:
    """The lines of a script in which no run is named."""
    return [line for line in script.splitlines() if "-tiny" not in line]


@pytest.mark.parametrize("changes", [(), ("--set", "pipeline.offload=disk")])
def test_dry_run_prints_what_is_submitted_of_the_plan_that_lies_there(
    cli, profile, program, changes, only_run
):
    program("sbatch", "echo 41")
    cli("submit", "job.yaml", *SLURM, *changes)
    result = cli("submit", "job.yaml", *SLURM, *changes, "--dry-run")
    assert result.err.startswith("plan: runs/tiny.plan.json: tiny: 2 stages on 2 ranks, 1f1b, ")
    assert "\npredicted: " in result.err
    assert without_names(result.out) == without_names((only_run() / "job.sh").read_text())


def test_dry_run_uses_nothing_stale_and_says_what_would_be_made(cli, profile, program):
    line = ("submit", "job.yaml", "--dry-run")
    said = "no up-to-date plan: submit makes one from runs/tiny.profile.json\n"
    assert cli(*line, *SLURM).err == said
    cli("plan", "job.yaml", *SLURM)
    assert cli(*line, *SLURM).err.startswith("plan: ")
    result = cli(*line, *SLURM, "--set", "pipeline.schedule=gpipe")
    assert result.err == said
    assert "pipectl.jobs.in_job" not in result.out
    Path("model.py").write_text("def build(): return 1\ndef data(): ...\n")
    result = cli(*line, *SLURM)
    assert result.err == f"{UNMEASURED}\n"
    assert "pipectl.jobs.in_job" in result.out
    result = cli(*line, "--scheduler", "local")
    assert result.err == "no up-to-date profile: the model is measured before it is trained\n"
    assert "pipectl.jobs.in_job" not in result.out


def test_a_dry_run_needs_no_mpi_and_a_submission_fails_before_anything_is_made(
    cli, profile, place, monkeypatch
):
    monkeypatch.setattr(sys, "executable", str(place / "bin/python"))
    monkeypatch.setattr("pipectl.jobs.profiles.measure", lambda *_: pytest.fail("measured"))
    for scheduler in ("local", "slurm"):
        result = cli("submit", "job.yaml", "--scheduler", scheduler, "--dry-run")
        assert result.code == 0
        assert "\nrun_ranks mpiexec -n 2 " in result.out
    for has_profile in (True, False):
        if not has_profile:
            profile.unlink()
        result = cli("submit", "job.yaml", "--scheduler", "local")
        assert (result.code, result.out) == (5, "")
        assert result.err.startswith("error: mpiexec: not found")
        assert "pip install" in result.err
        assert [path for path in Path("runs").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ("-N 3 -t 30 -p debug -A me", "account=me partition=debug nodes=3 time=00:30:00"),
        ("--gres gpu:2", "gpus-per-node=2"),
        ("--gres gpu:a100:4", "gpus-per-node=a100:4"),
        ("--gres gpu:1g.5gb:2", "gpus-per-node=1g.5gb:2"),
        ("--gres nvme:1,gpu:a100", "gpus-per-node=a100:1 gres=nvme:1"),
        ("--gres nvme:1 -p 12", "partition=12 gres=nvme:1"),
        ("-N 3 --set resources.nodes=5", "nodes=5"),
    ],
)
def test_options_of_sbatch_set_one_key_each(cli, job, options, lines):
    script = cli("submit", "job.yaml", *SLURM, "--dry-run", *options.split()).out.splitlines()
    assert {f"#SBATCH --{line}" for line in lines.split()} <= set(script)


@pytest.mark.parametrize(
    ("title", "programs", "said"),
    [
        ("Slurm", ("sbatch", "squeue"), "squeue: slurm_load_jobs error: Unable to contact"),
        ("PBS", ("qsub", "qselect"), "qselect: slurm_load_jobs error: Unable to contact"),
    ],
)
def test_a_batch_system_that_does_not_answer(cli, profile, program, title, programs, said):
    for name in programs:
        program(name, "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1")
    result = cli("submit", "job.yaml")
    assert (result.code, result.out) == (5, "")
    assert f"error: {title} is installed here, but does not answer: {said}" in result.err
    assert "to train on this machine: --scheduler local" in result.err


def test_submit_to_slurm_with_a_profile(cli, profile, program, only_run):
    program("sbatch", "echo 41")
    result = cli("submit", "job.yaml", *SLURM, "--set", "training.steps=7")
    run = only_run()
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[-3:] == [
        "submitted: tiny (slurm job 41)",
        f"run directory: {run}",
        f"see: pipectl status {run.name}",
    ]
    names = {path.name for path in run.iterdir()}
    assert names == {
        *("job.yaml", "profile.json", "plan.json", "cluster.json", "job.sh", "record.json"),
        *("errors", "logs", "trace", "checkpoints", ".lock"),
    }
    record = json.loads((run / "record.json").read_text())
    assert (record["state"], record["job_id"], record["steps"]) == ("submitted", "41", 7)
    assert json.loads((run / "trace/predicted.json").read_text())["ranks"] == 2
    assert "pipectl.jobs.in_job" not in (run / "job.sh").read_text()
    assert Path("runs/tiny.plan.json").exists()


def test_a_stale_plan_is_made_again_and_a_fresh_one_kept(cli, profile, program):
    program("sbatch", "echo 41")
    plan = Path("runs/tiny.plan.json")
    cli("submit", "job.yaml", *SLURM, "--set", "pipeline.schedule=gpipe")
    assert json.loads(plan.read_text())["schedule"] == "gpipe"
    cli("submit", "job.yaml", *SLURM)
    assert json.loads(plan.read_text())["schedule"] == "1f1b"
    marked = {**json.loads(plan.read_text()), "assumptions": ["kept"]}
    plan.write_text(json.dumps(marked))
    cli("submit", "job.yaml", *SLURM)
    assert json.loads(plan.read_text())["assumptions"] == ["kept"]


@pytest.mark.parametrize(
    ("sbatch", "message"),
    [
        (None, "sbatch: No such file or directory"),
        ("echo 'sbatch: error: invalid partition specified: x' >&2; exit 1", "invalid partition"),
    ],
)
def test_a_refused_submission_leaves_nothing_behind(cli, profile, program, sbatch, message):
    if sbatch is not None:
        program("sbatch", sbatch)
    before = profile.read_bytes()
    result = cli("submit", "job.yaml", *SLURM)
    assert (result.code, result.out) == (5, "")
    assert result.err.startswith("error: sbatch")
    assert message in result.err
    assert "job.sh" not in result.err, "it is not there any more"
    assert len(result.err.splitlines()) >= 2
    assert [path for path in Path("runs").iterdir() if path.is_dir()] == []
    assert profile.read_bytes() == before


def test_test_only_gives_the_forecast_and_submits_nothing(cli, job, program):
    forecast = "sbatch: Job 29 to start at 2026-11-20T15:36:53 using 2 processors on nodes node1"
    program("sbatch", f'[ "$1" = --test-only ] && echo "{forecast}" >&2')
    result = cli("submit", "job.yaml", *SLURM, "--test-only")
    assert (result.code, result.out) == (0, forecast.removeprefix("sbatch: ") + "\n")
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["profile", "plan"])
def test_a_truncated_file_is_not_replaced(cli, profile, name):
    path = Path(f"runs/tiny.{name}.json")
    path.write_text('{"version"')
    result = cli("submit", "job.yaml", *SLURM)
    assert (result.code, result.out) == (3, "")
    assert result.err.startswith(f"error: {path}:1:")
    assert path.read_text() == '{"version"'


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_an_imported_profile_cannot_be_submitted(cli, profile, more):
    document = json.loads(profile.read_text())
    del document["fingerprint"], document["key"]
    profile.write_text(json.dumps(document))
    result = cli("submit", "job.yaml", *SLURM, *more)
    assert (result.code, result.out) == (3, "")
    assert "an imported profile can be planned, not submitted" in result.err


LOCAL_JOB = """\
[ "$1" = --version ] && exit 1
while [ "$1" != --run ]; do shift; done
run=$2
echo '{"attempt":1,"step":1,"steps":4,"time":0,"loss":2.5,"step_time_s":0.1}' > $run/metrics.jsonl
"""


@pytest.fixture
def local_mpi(mpiexec):
    """mpiexec beside the interpreter; what it runs is up to the test."""
    return lambda text: mpiexec(LOCAL_JOB + text)


def test_wait_follows_a_local_run_to_its_end_and_tells_phase_step_and_loss(
    cli, profile, local_mpi, only_run
):
    beat = '{"version":1,"state":"training","step":1,"steps":4,"time":1,"ranks":[]}'
    local_mpi(f"echo '{beat}' > $run/heartbeat.json; sleep 2.5; exit 0")
    result = cli("submit", "job.yaml", "--scheduler", "local", "--wait")
    assert result.code == 0
    assert f"{only_run().name}  COMPLETED  local job " in result.out
    assert "  loss          2.5 at first, 2.5 now\n" in result.out
    assert "RUNNING: training, step 1 of 4, loss 2.5\n" in result.err
    assert result.err.splitlines()[-1] == "COMPLETED"


def test_wait_returns_the_code_of_the_failure(cli, profile, local_mpi):
    report = '{"rank":1,"type":"MismatchError","message":"no","time":1,"exit_code":3}'
    local_mpi(f"echo '{report}' > $run/errors/rank-0001.json; exit 9")
    result = cli("submit", "job.yaml", "--scheduler", "local", "--wait")
    assert result.code == 3
    assert "  FAILED  local job " in result.out
    assert "  error         rank 1\n                MismatchError: no\n" in result.out


def test_an_interrupt_ends_the_waiting_and_not_the_run(
    cli, profile, local_mpi, monkeypatch, only_run
):
    def interrupt(_seconds):
        while not (only_run() / "metrics.jsonl").exists():
            time.sleep(0.02)
        signal.raise_signal(signal.SIGHUP)

    local_mpi("exec sleep 60")
    with monkeypatch.context() as patch:
        patch.setattr("pipectl.jobs.state.time", SimpleNamespace(time=time.time, sleep=interrupt))
        result = cli("submit", "job.yaml", "--scheduler", "local", "--wait")
    run = only_run().name
    assert result.code == 130
    assert f"\nthe run continues; cancel it with: pipectl cancel {run}\n" in result.err
    assert "  RUNNING  local job " in cli("status", "last").out
    assert cli("cancel", "last").out == f"cancelled: {run}\n"
    assert "  CANCELLED  local job " in cli("status", "last").out
