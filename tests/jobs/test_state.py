"""The state of runs: the verdict from four sources, in verdicts.txt, and how often batch systems
are asked by somebody who watches."""

import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest

from pipectl.batch import JobState, JobStatus
from pipectl.batch.process import NoAnswerError
from pipectl.cluster import Device, Node, assumed_cluster
from pipectl.jobs import recover, state
from pipectl.jobs.state import Poller
from pipectl.jobs.verdict import Answer, decide_state, find_job_status
from pipectl.link import RowTimes
from pipectl.runs import Measured, Record, RunDirectory
from pipectl.runs.kept_code import KeptCode, KeptFile
from pipectl.simulate import simulate
from tests.batch.job_requests import check_table

NOW, SUBMITTED = 1.7e9 + 3600, 1.7e9
VERDICTS = Path(__file__).with_name("verdicts.txt")


def number(text):
    return None if text is None else int(text)


def verdict(given):
    """Ages are in seconds; the record is an hour old unless it says otherwise."""
    facts, listed = dict(word.split("=") for word in given.split()), {}
    if "listed" in facts:
        state, code = JobState(facts["listed"]), number(facts.get("code"))
        reason, source = facts.get("reason", ""), facts.get("source", "queue")
        listed["7"] = JobStatus(state, reason, code, source=source)
    at, state = NOW - float(facts.get("age", 3600)), facts.get("record", "submitted")
    found = decide_state(
        Record("demo", "slurm", "t", at, 1, 1, 5, state=state, job_id="7"),
        Answer(listed, facts.get("error")),
        NOW,
        exit_code=number(facts.get("exit")),
        beat_at=NOW - int(facts["beat"]) if "beat" in facts else None,
        words="training, step 5 of 5",
        step_time_s=number(facts.get("step")),
    )
    code = "" if found.exit_code is None else f" {found.exit_code}"
    return f"{found.state}{code} by {found.source}" + (f": {found.reason}" * bool(found.reason))


def test_the_state_of_a_job_is_what_its_sources_say(snapshot):
    check_table(snapshot, VERDICTS, verdict)


class Scheduler:
    """Counts the questions."""

    def __init__(self):
        self.asked, self.searched = [], []
        self.job_of_tag, self.state = None, JobState.RUNNING

    def find_all(self, tags, clusters=""):
        self.searched.append(sorted(tags))
        return dict.fromkeys(tags, self.job_of_tag) if self.job_of_tag else {}

    def cluster_of(self, job_id):
        return job_id.partition(";")[2]

    def query(self, ids, *, since):
        self.asked.append(sorted(ids))
        return {job_id: JobStatus(self.state) for job_id in ids}


@pytest.fixture
def schedulers(monkeypatch):
    found = {"slurm": Scheduler(), "local": Scheduler()}
    for module in (state, recover):
        monkeypatch.setattr(module, "get_scheduler", lambda name, *_: found[name])
    return found


@pytest.fixture
def run(tmp_path):
    """``run("7")``: of a job; ``run(None)``: of an interrupted submission."""

    def make(job_id, scheduler="slurm"):
        made = RunDirectory.create(tmp_path, "demo", SUBMITTED)
        record = Record("demo", scheduler, made.name, SUBMITTED, 1, 1, 5)
        if job_id is not None:
            record = record.with_state(SUBMITTED, "submitted", job_id=job_id)
        record.save(made.record)
        return made

    return make


def test_a_run_that_is_watched_is_not_read_again(run, schedulers):
    clock, one = SimpleNamespace(now=0.0), run("7")
    poller, source = Poller(lambda: clock.now), one.path / "model.py"
    source.write_text("changed")
    KeptCode(NOW, (KeptFile(str(source), "other", 1, 1),)).save(one.code_file)
    for step in range(1, 4):
        with one.metrics.open("a") as stream:
            stream.write(json.dumps({"attempt": 1, "step": step, "loss": 3 / step}) + "\n")
        (found,) = poller.get_statuses([one], NOW)
        assert (found.measured.step, found.measured.last_loss) == (step, 3 / step)
        assert found.metrics.bytes_read == one.metrics.stat().st_size
        assert [line.loss for line in found.curve] == [3 / each for each in range(1, step + 1)]
        assert len(found.changed_files) == 1
        source.unlink(missing_ok=True)
        one.code_file.unlink(missing_ok=True)
    clock.now = 11.0
    (found,) = poller.get_statuses([one], NOW)
    assert found.changed_files == []


def test_questions_and_searches_become_rare_and_a_new_job_is_asked_about_at_once(run, schedulers):
    clock, runs, slurm = SimpleNamespace(now=1000.0), [run("7")], schedulers["slurm"]
    poller = Poller(lambda: clock.now)
    for _ in range(2 * 600):
        (found,) = poller.get_statuses(runs, NOW)
        assert found.job.state is JobState.RUNNING
        clock.now += 0.5
    assert 10 <= len(slurm.asked) <= 17, "in ten minutes"
    slurm.asked.clear()
    runs.append(run(None))
    for _ in range(2 * 600):
        _, found = poller.get_statuses(runs, NOW)
        assert found.job.state is JobState.UNKNOWN
        clock.now += 0.5
    assert 10 <= len(slurm.searched) <= 17
    assert 10 <= len(slurm.asked) <= 17
    slurm.job_of_tag = "8"
    clock.now += 60
    for _ in range(2):
        assert poller.get_statuses(runs, NOW)[1].job.state is JobState.RUNNING
    assert slurm.asked[-2:] == [["7"], ["7", "8"]]
    poller.get_statuses([*runs, run("9")], NOW)
    assert slurm.asked[-2:] == [["7", "8"], ["7", "8", "9"]]
    count = len(slurm.asked)
    assert poller.get_statuses(runs[1:], NOW)[0].job.state is JobState.RUNNING
    assert len(slurm.asked) == count, "a job less is no reason to ask"
    runs[0].start.exit_code.write_text("0\n")  # a reason to ask at once
    poller.get_statuses(runs, NOW)
    assert len(slurm.asked) == count + 1
    runs = [runs[1], run("9.1@here", "local")]  # processes are looked at every time
    for _ in range(3):
        poller.get_statuses(runs, NOW)
    assert len(slurm.asked) == count + 1
    assert schedulers["local"].asked == [["9.1@here"]] * 3


def test_a_cluster_that_does_not_answer_hides_no_job_of_another(run, schedulers):
    slurm = schedulers["slurm"]
    ask = slurm.query

    def query(ids, *, since):
        if any(slurm.cluster_of(job_id) for job_id in ids):
            raise NoAnswerError("squeue: no answer")
        return ask(ids, since=since)

    slurm.query = query
    ours, theirs = Poller().get_statuses([run("7"), run("7;b")], NOW)
    assert (ours.job.state, ours.query_error) == (JobState.RUNNING, None)
    assert (theirs.job.state, theirs.query_error) == (JobState.UNKNOWN, "squeue: no answer")


def test_a_job_has_not_completed_whose_script_never_began(run, schedulers):
    """A file that login shells read may end them without an error; others may see files late."""
    one, slurm = run("7"), schedulers["slurm"]
    slurm.state, end = JobState.COMPLETED, SUBMITTED + 600
    slurm.query = lambda ids, *, since: {"7": JobStatus(slurm.state, exit_code=0, end=end)}

    def job(now):
        return Poller().get_statuses([one], now)[0].job

    assert job(end + 59).state is JobState.COMPLETING
    assert (job(end + 61).state, job(end + 61).exit_code) == (JobState.FAILED, None)
    assert "~/.bash_profile" in job(end + 61).reason
    end = None  # nobody knows how long ago
    assert job(SUBMITTED + 9e9).state is JobState.COMPLETED
    end = SUBMITTED + 600
    one.start.begun.touch()
    assert job(end + 61).state is JobState.COMPLETED


@pytest.mark.parametrize(
    "listed",
    [
        JobStatus(JobState.COMPLETED, exit_code=0, end=SUBMITTED),
        JobStatus(JobState.FAILED, "JobLaunchFailure", exit_code=1, end=SUBMITTED),
    ],
)
def test_who_may_not_look_into_a_start_reads_what_the_batch_system_says(run, monkeypatch, listed):
    start, look = run("7").start, Path.stat

    def stat(path, **options):
        if path.parent == start.path:
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    record = Record("demo", "slurm", "t", SUBMITTED, 1, 1, 5, job_id="7")
    answer = Answer({"7": listed})
    assert find_job_status(start, record, answer, None, None, SUBMITTED + 3600) == listed


@pytest.mark.parametrize(
    ("job_ids", "file", "patience_s", "verdict"),
    [
        (["7"], "starts/1/heartbeat.json", 10, JobState.UNKNOWN),
        (["7"], "", 60, JobState.UNKNOWN),
        # The first search alone waits.
        ([None, None, "7"], "starts/1/exit_code", 10, JobState.FAILED),
    ],
)
def test_a_queue_that_hangs_is_waited_for_while_nothing_else_tells_of_a_run(
    run, monkeypatch, job_ids, file, patience_s, verdict
):
    runs, waited = [run(job_id) for job_id in job_ids], []
    for each in runs if file else []:
        (each.path / file).write_text("1\n")

    def hang(argv, *, timeout_s, **_):
        waited.append(timeout_s)
        raise NoAnswerError(f"{argv[0]}: no answer within {timeout_s:.0f} s")

    monkeypatch.setattr("pipectl.batch.process.run", hang)
    statuses = Poller().get_statuses(runs, time.time())
    assert waited == [patience_s]
    assert [status.job.state for status in statuses] == [verdict] * len(runs)
    assert {each.query_error for each in statuses} == {f"squeue: no answer within {patience_s} s"}


def test_ranks_of_a_run_as_predicted_compute_for_all_of_the_step_but_the_bubble(tmp_path, pipeline):
    """Updates of every replica, longer ones than a profile has, and recomputations included."""
    plan = pipeline(2, 4, ranks=[0, 2])
    first, last = plan.stages
    stages = replace(first, ranks=(0, 1), recompute=True), replace(last, ranks=(2, 3))
    plan = replace(plan, stages=stages, node_of_rank=(0,) * 4, micro_batch_size=2, batch_size=8)
    device = Device("cpu", rows=RowTimes(end=0.5))
    cluster = replace(assumed_cluster("c", [4], 4, None), nodes=(Node("n0", 4, 4, device),))
    step = simulate(plan, cluster)
    run = RunDirectory(tmp_path / "20250101-120000-tiny")
    shown = {}
    for factor in (1, 2):
        measured = Measured(step_time_s=factor * step.step_time_s)
        job, whole = JobStatus(JobState.COMPLETED), replace(plan, prediction=step.prediction)
        status = state.RunStatus(run, run.start, None, job, "", measured, whole, (), [])
        shown[factor] = status.efficiency
    assert 0.3 < step.prediction.bubble < 0.9
    assert shown[1] == pytest.approx(mean(step.utilisation)) == 2 * shown[2]
