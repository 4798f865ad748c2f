"""`pipectl resume`: what is submitted again, what stays, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.cluster import Cluster
from pipectl.plan import Plan
from pipectl.runs import Heartbeat, Record, RunDirectory
from pipectl.spec import load

FOUR_RANKS = ("--set", "resources.nodes=4", "--set", "pipeline={stages: 4}")


@pytest.fixture
def ended(cli, profile, slurm):
    """A run on Slurm that failed after its checkpoint of step 2."""
    assert cli("submit", "job.yaml", "--scheduler", "slurm").code == 0
    (path,) = (path for path in Path("runs").iterdir() if path.is_dir())
    run = RunDirectory(path)
    run.exit_code.write_text("1\n")
    (run.checkpoints / "step-000002").mkdir()
    slurm("sbatch", "echo 42")
    return run


def contents(run: RunDirectory) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(run.path.rglob("*")) if p.is_file()}


def test_the_same_job_goes_on_in_its_directory(cli, ended):
    before = ended.plan.read_bytes(), load(ended.job)
    ended.stopped_marker.write_text("")
    ended.logs.rmdir()
    result = cli("resume", "last")
    assert (result.code, result.err) == (0, "")
    assert ended.logs.is_dir(), "a job without it fails or hangs without output"
    assert result.out.splitlines() == [
        "resumed: tiny (slurm job 42), from step 2",
        f"see: pipectl status {ended.name}",
    ]
    assert (ended.plan.read_bytes(), load(ended.job)) == before
    assert not ended.exit_code.exists()
    assert not ended.stopped_marker.exists()
    record = Record.load(ended.record)
    assert (record.job_id, record.state) == ("42", "submitted")
    told = [(event.what, event.detail) for event in record.history]
    assert told == [("submitted", "41"), ("submitting", "resumed"), ("submitted", "42")]
    shown = {line.split()[0] for line in cli("status", "last").out.splitlines()}
    assert {"submitted", "resumed"} <= shown
    ended.exit_code.write_text("1\n")
    result = cli("resume", "last", "--set", "training.steps=9", "--set", "optimizer.kwargs.lr=0.5")
    assert result.code == 0
    assert result.out.splitlines()[:2] == [
        "changed: training.steps 4 -> 9",
        "changed: optimizer.kwargs.lr null -> 0.5",
    ]
    assert ended.plan.read_bytes() == before[0], "more steps need no other plan"
    assert Record.load(ended.record).steps == 9


def test_other_ranks_get_another_plan_with_the_same_micro_batches(cli, ended):
    result = cli("resume", "last", *FOUR_RANKS, "--json")
    assert result.code == 0
    answer = json.loads(result.out)
    assert (answer["from_step"], answer["planned_anew"], answer["job_id"]) == (2, True, "42")
    plan = Plan.load(ended.plan)
    assert (plan.ranks, plan.micro_batches) == (4, 4)
    record = Record.load(ended.record)
    assert (record.ranks, record.nodes) == (4, 4)
    assert "--nodes=4" in ended.script.read_text()


def test_recorded_steps_make_way_for_those_of_another_plan(cli, ended):
    ended.attempt.write_text("2\n")
    step = ended.measured_of(2)
    step.write_text("{}")
    assert cli("resume", "last").code == 0
    assert step.exists()
    ended.exit_code.write_text("1\n")
    assert cli("resume", "last", *FOUR_RANKS).code == 0
    assert not step.exists()
    assert (ended.trace_before(2) / step.name).read_text() == "{}"
    assert ended.predicted.exists()


@pytest.fixture
def another_model(ended, place):
    """The model's file has changed since the run ended."""
    (place / "model.py").write_text("def build(): return 1\ndef data(): ...\n")


def begins_anew(run: RunDirectory) -> None:
    (run.checkpoints / "step-000002").rmdir()


@pytest.mark.usefixtures("another_model")
def test_a_model_that_has_changed_is_measured_anew_by_the_job(cli, ended):
    begins_anew(ended)
    result = cli("resume", "last")
    assert result.code == 0
    said = "no up-to-date profile: the model is measured before it is trained"
    assert result.err == f"{said}, in the job's allocation\n"
    assert "from the beginning" in result.out
    assert "pipectl.jobs.in_job" in ended.script.read_text()
    assert not ended.plan.exists()
    assert not ended.predicted.exists()


@pytest.mark.usefixtures("another_model")
def test_it_keeps_its_micro_batches_if_it_goes_on_from_a_checkpoint(cli, ended):
    assert cli("resume", "last", "--set", "pipeline={stages: 2}").code == 0
    assert "pipectl.jobs.in_job" in ended.script.read_text()
    assert load(ended.job).pipeline.micro_batches == 4
    begins_anew(ended)
    ended.exit_code.write_text("1\n")
    assert cli("resume", "last", "--set", "model.kwargs={width: 3}").code == 0
    assert not ended.plan.exists()


def test_other_ranks_need_no_other_profile_whatever_changed_before(cli, ended, place):
    begins_anew(ended)
    for tasks in (2, 4):
        change = f"resources={{nodes: 1, tasks_per_node: {tasks}}}"
        more = ("--set", f"pipeline.stages={tasks}", "--set", "data.kwargs={more: 1}")
        assert cli("resume", "last", "--set", change, *more).code == 0
        assert "pipectl.jobs.in_job" not in ended.script.read_text()
        assert Plan.load(ended.plan).ranks == tasks
        ended.exit_code.write_text("1\n")
    (place / "model.py").write_text("def build(): return 1\ndef data(): ...\n")
    assert cli("resume", "last").code == 0
    assert "pipectl.jobs.in_job" in ended.script.read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.factory={place}/model.py:data", "model.factory has changed, but its checkpoints"),
        ("model.kwargs={{width: 3}}", "model.kwargs has changed, but its checkpoints"),
        ("launch.scheduler=local", "was submitted to slurm and resumes there, not on local"),
    ],
)
def test_another_model_or_batch_system_is_refused(cli, ended, place, change, said):
    before = contents(ended)
    result = cli("resume", "last", "--set", change.format(place=place))
    assert result.code == 2, result.err
    assert said in result.err
    assert contents(ended) == before
    assert cli("resume", "last", "--set", "launch.scheduler=slurm").code == 0


def test_what_a_submission_warns_of_a_resumption_does_too(cli, ended, program):
    program("srun", "echo 'MPI plugin types are...'; echo '  none'; echo '  pmi2'")
    srun = ("--set", "launch.launcher=srun", "--set", "launch.mpi=pmix")
    replace(Cluster.load(ended.cluster), key="of other links").save(
        ended.path.parent / "tiny.cluster.json"
    )
    submitted = cli("submit", "job.yaml", "--scheduler", "slurm", *srun).err.splitlines()
    resumed = cli("resume", ended.name, *srun, "--json").err.splitlines()
    for found in submitted, resumed:
        assert "tiny.cluster.json was measured for other resources" in found[0]
    assert submitted[1:] == resumed[1:]
    assert resumed[1].startswith("warning: srun here knows no --mpi=pmix")


def test_what_the_earlier_start_told_is_out_of_the_way_while_the_next_one_waits(cli, ended):
    ended.attempt.write_text("2\n")
    failure = {"rank": 0, "type": "ValueError", "message": "bad news", "time": 1.0}
    ended.error_of(0).write_text(json.dumps(failure))
    Heartbeat("training", 2, 4, attempt=2).save(ended.heartbeat)
    assert "bad news" in cli("status", "last").out
    assert cli("resume", "last").code == 0
    shown = cli("status", "last").out
    assert "QUEUED" in shown
    assert not any(text in shown for text in ("bad news", "training"))
    for path in (ended.error_of(0), ended.heartbeat):
        assert not path.exists()
        assert (ended.errors_before(2) / path.name).exists()


def test_it_goes_back_into_the_queue_as_often_as_a_new_run(cli, ended):
    assert "if ((attempt < 4)) && " in ended.script.read_text()
    ended.attempt.write_text("4\n")
    assert cli("resume", "last").code == 0
    assert "if ((attempt < 8)) && " in ended.script.read_text()
    ended.exit_code.write_text("1\n")
    assert cli("resume", "last", "--set", "checkpoint.max_requeues=0").code == 0
    assert "((attempt < " not in ended.script.read_text()


def test_measured_links_are_found_from_everywhere(cli, ended, tmp_path, monkeypatch):
    measured = replace(Cluster.load(ended.cluster), source="measured")
    measured.save(ended.path.parent / "tiny.cluster.json")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli("resume", "last", "-d", str(ended.path.parent)).code == 0
    assert Cluster.load(ended.cluster).source == "measured"


def test_a_completed_run_is_not_resumed_and_cancel_leaves_it_completed(cli, ended):
    ended.exit_code.write_text("0\n")
    before = contents(ended)
    result = cli("resume", "last")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        f"error: {ended.name}: is complete, step 4 of 4\n"
        f"  to train on, give it more steps: pipectl resume {ended.name} --set training.steps=8\n"
    )
    assert cli("cancel", "last").out == f"{ended.name} had already ended\n"
    assert contents(ended) == before
    assert cli("status", "last", "--json").json["state"] == "COMPLETED"


def test_a_rejected_submission_leaves_the_run_as_it_was(cli, ended, program):
    program("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    ended.measured_of(2).write_text("{}")
    ended.error_of(0).write_text("{}")
    Heartbeat("training", 2, 4).save(ended.heartbeat)
    before = contents(ended)
    for changes in (FOUR_RANKS, ("--set", "data.kwargs={more: 1}")):
        result = cli("resume", "last", *changes)
        assert (result.code, result.out) == (5, "")
        assert "invalid partition" in result.err
        assert contents(ended) == before
    assert list(ended.path.glob("*/attempt-*")) == []


def test_a_run_that_is_not_over_is_refused(cli, ended, program):
    ended.exit_code.unlink()
    assert "is QUEUED" in cli("resume", "last", "--force").err
    record = Record.load(ended.record)
    replace(record, submitted_at=record.submitted_at - 3600).save(ended.record)
    program("squeue", "echo 'slurm_load_jobs error: timed out' >&2; exit 1")
    result = cli("resume", "last")
    assert result.code == 2
    assert result.err.startswith(f"error: {ended.name}: it is not known whether it has ended: ")
    assert "if you know that it has: pipectl resume --force" in result.err
    assert cli("resume", "last", "--force").code == 0
    replace(record, kind="rehearsal").save(ended.record)
    assert "is not a training run" in cli("resume", "last").err
