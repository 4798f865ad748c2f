"""What Slurm and PBS have in common, with their commands pretended."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from job_requests import check_table

from pipectl.batch import JobState, process
from pipectl.batch.pbs import PbsScheduler, parse_qstat
from pipectl.batch.process import NoAnswerError
from pipectl.batch.slurm import SlurmScheduler, parse_sacct, parse_sinfo, parse_squeue
from pipectl.errors import SchedulerError

SCRIPT = Path("/runs/job.sh")
HERE = Path(__file__).parent
WORDS = re.compile(r"(\S+) (says|fails with|as in) (.*)")


class System(NamedTuple):
    """A batch system, and its commands that submit, list and cancel jobs."""

    name: str
    scheduler: Any
    submit: str
    list: str
    cancel: str
    fake: Any


@pytest.fixture(params=["slurm", "pbs"])
def system(request, slurm, pbs):
    if request.param == "slurm":
        return System("slurm", SlurmScheduler(), "sbatch", "squeue", "scancel", slurm)
    return System("pbs", PbsScheduler(), "qsub", "qstat", "qdel", pbs)


HIDDEN = {
    "slurm": {"SBATCH_PARTITION", "SLURM_JOB_ID", "SLURM_NTASKS", "SQUEUE_PARTITION"},
    "pbs": {"PBS_DPREFIX", "PBS_JOBID"},
}


def test_answers_to_a_submission_are_ids_or_refusals_with_a_cure(
    slurm, pbs, make_request, snapshot
):
    def searches():
        return len(slurm.calls("squeue") + pbs.calls("qselect"))

    def answer(given):
        """The id that a submission returns, or its error with what to do."""
        command, how, text = WORDS.fullmatch(given).groups()
        fake = slurm if command == "sbatch" else pbs
        said, before = text.encode().decode("unicode_escape"), searches()
        if how == "as in":
            fake.replay(command, text)
        elif how == "says":
            fake.answer(command, said)
        else:
            fake.answer(command, stderr=said, rc=1)
        try:
            scheduler = SlurmScheduler() if fake is slurm else PbsScheduler()
            return scheduler.submit(SCRIPT, make_request())
        except SchedulerError as error:
            what = "not found" if isinstance(error, NoAnswerError) else "refused"
            assert (searches() > before) == (what == "not found"), "the job may be there"
            return f"{what}: {error.message} ({error.cure})".replace("\n", " / ")

    check_table(snapshot, HERE / "answers.txt", answer)


def test_no_variable_overrules_a_submission_and_a_missing_command_is_named(
    system, make_request, monkeypatch, tmp_path
):
    kept, hidden = {"SLURM_CONF", "SLURM_CLUSTERS", "PBS_SERVER", "MINE"}, HIDDEN[system.name]
    for name in hidden | kept:
        monkeypatch.setenv(name, "x")
    system.fake.answer(system.submit, "5\n")
    assert system.scheduler.submit(SCRIPT, make_request()) == "5"
    options = ["--parsable"] if system.name == "slurm" else ["-C", "#PBS"]
    assert system.fake.calls(system.submit)[0] == [*options, "/runs/job.sh"]
    environment = system.fake.environment(system.submit).keys()
    assert not hidden & environment
    assert kept | {"PATH"} <= environment
    assert "SLURM_TIME_FORMAT" not in environment, "it would leak into the job"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match=system.submit) as caught:
        system.scheduler.submit(SCRIPT, make_request())
    assert "launch.scheduler: local" in caught.value.cure


@pytest.mark.parametrize("hangs", [True, False])
def test_a_job_whose_answer_is_lost_is_found_by_its_tag_and_not_submitted_twice(
    system, make_request, hangs
):
    system.scheduler.timeout_s = 0.6
    unsure = {"slurm": "error: Unable to contact slurm", "pbs": "error: Communication failure."}
    if hangs:
        system.fake.hang(system.submit)
    else:
        system.fake.answer(system.submit, stderr=unsure[system.name], rc=1)
    with pytest.raises(NoAnswerError, match=r"tag-1' is listed: .*(error|no answer)"):
        system.scheduler.submit(SCRIPT, make_request())
    lists = "squeue" if system.name == "slurm" else "qselect"
    system.fake.answer(lists, stderr=f"{lists} is down", rc=1)
    with pytest.raises(NoAnswerError, match=rf"(error|no answer).*{lists} is down"):
        system.scheduler.submit(SCRIPT, make_request())
    assert len(system.fake.calls(system.submit)) == 2
    if system.name == "slurm":
        system.fake.replay("squeue", "squeue-format.txt")
        assert system.scheduler.submit(SCRIPT, make_request(tag="tag-run")) == "36"
        return
    row = "Job Id: {}\n    Job_Name = {}\n    job_state = R\n"
    jobs = {"9.vm": "demo.abc1", "10.vm": "demo.abc1", "11.vm": "demo.other"}
    system.fake.replay("qselect", "qselect.txt")
    system.fake.answer("qstat", "".join(row.format(*job) for job in jobs.items()))
    tag = "20261120-152233-demo abc1"
    assert system.scheduler.submit(SCRIPT, make_request(tag=tag)) == "10.vm"


def test_what_is_gone_can_be_cancelled_and_is_absent(system):
    system.fake.replay(system.cancel, f"{system.cancel}-unknown.txt")
    system.scheduler.cancel("99999")
    assert system.fake.calls(system.cancel) == [["99999"]]
    system.fake.answer(system.cancel, stderr="Access/permission denied", rc=159)
    with pytest.raises(SchedulerError, match="permission denied"):
        system.scheduler.cancel("1")
    gone = {"slurm": {"sacct": "sacct-unknown.txt"}, "pbs": {"qstat": "qstat-unknown.txt"}}
    for command, sample in gone[system.name].items():
        system.fake.replay(command, sample)
    assert system.scheduler.query(["99999"]) == {}
    if system.name == "pbs":  # as an old server says it
        system.fake.replay("qstat", "qstat-finished-nox.txt")
        assert system.scheduler.query(["99999.vm"]) == {}


def test_a_system_that_does_not_answer_is_an_error_not_an_absence(system):
    system.fake.answer(system.list, stderr="cannot connect to server vm (errno=15010)", rc=162)
    with pytest.raises(SchedulerError, match="cannot connect"):
        system.scheduler.query(["9"])
    system.fake.hang(system.list)
    system.scheduler.timeout_s = 0.6
    with pytest.raises(NoAnswerError, match="no answer within 1 s"):
        system.scheduler.query(["9"])
    assert system.scheduler.query([]) == {}


def test_undecodable_output_is_shown_as_it_can_be():
    assert process.run(["bash", "-c", "printf 'a\\377b'"], cure="-").stdout == "a\ufffdb"


def meaning(said):
    """All that is read of a command's output; fields of PBS are separated by ``|``."""
    command, _, text = said.partition(" ")
    text = text.encode().decode("unicode_escape")
    if command == "sinfo":
        return " ".join(f"{queue}".removeprefix("Queue") for queue in parse_sinfo(text))
    if command == "qstat":
        fields = "".join(f"    {field}\n" for field in text.split("|"))
        jobs = parse_qstat(f"Job Id: 7.vm\n{fields}").items()
    else:
        rows = {"squeue": parse_squeue, "sacct": parse_sacct}[command](text)
        jobs = [(row.job_id, row.status) for row in rows]
    words = []
    for job_id, job in jobs:
        words += [job_id, job.state, "" if job.exit_code is None else f"code {job.exit_code}"]
        words += [job.nodes, job.start and "started", job.end and "ended", f"({job.reason})"]
    return " ".join(word for word in words if word and word != "()")


def test_what_batch_systems_say_means_this(snapshot):
    check_table(snapshot, HERE / "states.txt", meaning)


WAITS = {JobState.QUEUED, JobState.HELD}
RUNS = {JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING}


def test_a_job_waits_or_runs_or_is_over_or_nobody_knows():
    assert {state for state in JobState if state.waits} == WAITS
    assert {state for state in JobState if state.alive} == WAITS | RUNS
    assert {state for state in JobState if not state.final} == WAITS | RUNS | {JobState.UNKNOWN}
