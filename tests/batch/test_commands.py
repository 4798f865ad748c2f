"""What Slurm and PBS have in common, with their commands pretended."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pipectl.batch import process
from pipectl.batch.pbs import PbsScheduler
from pipectl.batch.process import NoAnswerError
from pipectl.batch.slurm import SlurmScheduler
from pipectl.errors import SchedulerError

SCRIPT = Path("/runs/job.sh")


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


IDS = {
    "slurm": {
        "28\n": "28",
        "28;cluster1\n": "28",
        "Welcome to 2026\n****\n29\n": "29",
        "no id here\n": None,
        "": None,
    },
    "pbs": {
        "4.vm\n": "4.vm",
        "Welcome to the cluster\n12345.pbs-1.site.org\n": "12345.pbs-1.site.org",
        "5[].vm": "5[].vm",
        "77": "77",
        "no id here": None,
        "": None,
    },
}
HIDDEN = {
    "slurm": {"SBATCH_PARTITION", "SLURM_JOB_ID", "SLURM_NTASKS", "SQUEUE_PARTITION"},
    "pbs": {"PBS_DPREFIX", "PBS_JOBID"},
}


def test_submit_returns_the_id_in_the_answer_and_no_variable_overrules_the_script(
    system, make_request, monkeypatch
):
    kept, hidden = {"SLURM_CONF", "SLURM_CLUSTERS", "PBS_SERVER", "MINE"}, HIDDEN[system.name]
    for name in hidden | kept:
        monkeypatch.setenv(name, "x")
    for text, job_id in IDS[system.name].items():
        system.fake.answer(system.submit, text)
        if job_id is not None:
            assert system.scheduler.submit(SCRIPT, make_request()) == job_id
            continue
        with pytest.raises(NoAnswerError, match="gave no job id"):
            system.scheduler.submit(SCRIPT, make_request())
    options = ["--parsable"] if system.name == "slurm" else ["-C", "#PBS"]
    assert system.fake.calls(system.submit)[0] == [*options, "/runs/job.sh"]
    environment = system.fake.environment(system.submit).keys()
    assert not hidden & environment
    assert kept | {"PATH"} <= environment
    assert "SLURM_TIME_FORMAT" not in environment, "it would leak into the job"


REFUSALS = {
    "slurm": [
        ("sbatch-badpart.txt", "invalid partition specified: nope", "slurm.partition"),
        ("sbatch-badmem.txt", "Memory specification", "resources.memory_per_node"),
        ("sbatch-badopt.txt", "unrecognized option", "slurm.options"),
        ("sbatch-gpu.txt", "Invalid generic resource", "resources.gpus_per_node"),
        ("sbatch-noshebang.txt", "does not look like a batch script", "job spec"),
        ("Invalid account or account/partition combination", "account", "set slurm.account"),
        ("Job violates accounting/QOS policy (user's limits)", "QOS policy", "lower resources"),
        ("Could not establish a configuration source", "^Slurm does not answer:\n", "be reached"),
    ],
    "pbs": [
        ("qsub-badqueue.txt", "Unknown queue", "pbs.queue"),
        ("qsub-badres.txt", "Unknown resource: foo", "pbs.select"),
        ("qsub-badwalltime.txt", "Resource_List.walltime", "resources.walltime"),
        ("qsub-badopt.txt", "invalid option", "pbs.options"),
        ("qsub-group.txt", "Bad GID", "job spec"),
        ("cannot connect to server pbs (errno=15010)", "^PBS does not answer:\n", "be reached"),
    ],
}


def test_refusals_and_missing_commands_are_told_with_a_cure(
    system, make_request, monkeypatch, tmp_path
):
    for answer, message, cure in REFUSALS[system.name]:
        if answer.endswith(".txt"):
            system.fake.replay(system.submit, answer)
        else:
            system.fake.answer(system.submit, stderr=answer, rc=1)
        with pytest.raises(SchedulerError, match=message) as caught:
            system.scheduler.submit(SCRIPT, make_request())
        assert cure in caught.value.cure
    assert system.fake.calls("squeue") == system.fake.calls("qselect") == [], "no search for a job"
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
