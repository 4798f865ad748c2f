"""PbsScheduler against pretended commands that check arguments and replay recordings."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipectl.batch import Array, JobRequest, JobState
from pipectl.batch.pbs import PbsScheduler
from pipectl.batch.process import NoAnswerError
from pipectl.errors import InvalidInputError, SchedulerError

if TYPE_CHECKING:
    from conftest import FakeCommands

MakeRequest = Callable[..., JobRequest]
SCRIPT = Path("/runs/job.sh")
ROW = "Job Id: {}\n    Job_Name = {}\n    job_state = R\n"


def test_submit_returns_the_id_and_makes_the_log_folder(
    pbs: "FakeCommands", make_request: MakeRequest
) -> None:
    pbs.replay("qsub", "qsub.txt")
    request = make_request()
    assert PbsScheduler().submit(SCRIPT, request) == "4.vm"
    assert pbs.calls("qsub") == [["-C", "#PBS", "/runs/job.sh"]]
    assert (request.run_directory / "logs").is_dir()


def test_variables_that_overrule_the_script_are_removed(
    pbs: "FakeCommands", make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PBS_DPREFIX", "PBS_JOBID", "PBS_SERVER", "MY_SETTING"):
        monkeypatch.setenv(name, "x")
    pbs.replay("qsub", "qsub.txt")
    PbsScheduler().submit(SCRIPT, make_request())
    environment = pbs.environment("qsub")
    assert not {"PBS_DPREFIX", "PBS_JOBID"} & set(environment)
    assert {"PBS_SERVER", "MY_SETTING", "PATH"} <= set(environment)


@pytest.mark.parametrize(
    ("sample", "message", "cure"),
    [
        ("qsub-badqueue.txt", "Unknown queue", "pbs.queue"),
        ("qsub-badres.txt", "Unknown resource: foo", "pbs.select_extra"),
        ("qsub-badwalltime.txt", "Resource_List.walltime", "resources.walltime"),
        ("qsub-badopt.txt", "invalid option", "pbs.directives"),
        ("qsub-group.txt", "Bad GID", "job spec"),
    ],
)
def test_refusals_name_a_cure(
    pbs: "FakeCommands", make_request: MakeRequest, sample: str, message: str, cure: str
) -> None:
    pbs.replay("qsub", sample)
    with pytest.raises(SchedulerError, match=message) as caught:
        PbsScheduler().submit(SCRIPT, make_request())
    assert cure in (caught.value.cure or "")
    assert pbs.calls("qselect") == [], "a refusal needs no search for the job"


def test_missing_pbs_is_named(
    make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="qsub") as caught:
        PbsScheduler().submit(SCRIPT, make_request())
    assert "launch.scheduler: local" in (caught.value.cure or "")


def test_a_lost_answer_is_looked_up_by_the_name(
    pbs: "FakeCommands", make_request: MakeRequest
) -> None:
    pbs.hang("qsub")
    pbs.replay("qselect", "qselect.txt")
    names = ROW.format("9.vm", "demo.abc1") + ROW.format("10.vm", "demo.abc1")
    pbs.answer("qstat", names + ROW.format("11.vm", "demo.other"))
    scheduler = PbsScheduler(timeout_s=1.0)
    assert scheduler.submit(SCRIPT, make_request(tag="20261120-152233-demo abc1")) == "10.vm"
    assert pbs.calls("qselect")[0][:2] == ["-x", "-u"]
    assert pbs.calls("qstat") == [["-x", "-f", "4.vm", "8.vm", "10.vm", "12.vm"]]


def test_a_lost_job_is_not_submitted_twice(pbs: "FakeCommands", make_request: MakeRequest) -> None:
    pbs.answer("qsub", stderr="qsub: Communication failure.", rc=1)
    with pytest.raises(NoAnswerError, match=r"ends in '\.tag-1' is listed: qsub: Comm"):
        PbsScheduler().submit(SCRIPT, make_request())
    assert len(pbs.calls("qsub")) == 1


def test_query_asks_once_for_all(pbs: "FakeCommands") -> None:
    pbs.answer("qstat", ROW.format("9.vm", "a") + ROW.format("10.vm", "b"), rc=153)
    found = PbsScheduler().query(["9.vm", "10.vm", "99999.vm"])
    assert {job_id: status.state for job_id, status in found.items()} == {
        "9.vm": JobState.RUNNING,
        "10.vm": JobState.RUNNING,
    }
    assert pbs.calls("qstat") == [["-x", "-f", "9.vm", "10.vm", "99999.vm"]]


def test_query_of_nothing_asks_nobody(pbs: "FakeCommands") -> None:
    assert PbsScheduler().query([]) == {}
    assert pbs.calls("qstat") == []


@pytest.mark.parametrize("sample", ["qstat-unknown.txt", "qstat-finished-nox.txt"])
def test_a_job_that_the_server_has_forgotten_is_absent(pbs: "FakeCommands", sample: str) -> None:
    pbs.replay("qstat", sample)
    assert PbsScheduler().query(["99999.vm"]) == {}


def test_a_server_that_is_down_is_an_error(pbs: "FakeCommands") -> None:
    pbs.answer("qstat", stderr="qstat: cannot connect to server vm (errno=15010)", rc=162)
    with pytest.raises(SchedulerError, match="cannot connect"):
        PbsScheduler().query(["9.vm"])


def test_cancel_of_what_is_gone_is_no_error(pbs: "FakeCommands") -> None:
    pbs.replay("qdel", "qdel-unknown.txt")
    PbsScheduler().cancel("99999.vm")
    assert pbs.calls("qdel") == [["99999.vm"]]
    pbs.answer("qdel", stderr="qdel: Unauthorized Request 9.vm", rc=159)
    with pytest.raises(SchedulerError, match="Unauthorized"):
        PbsScheduler().cancel("9.vm")


def test_no_forecast(pbs: "FakeCommands") -> None:
    assert PbsScheduler().estimate(SCRIPT) is None
    assert pbs.calls("qsub") == []


def test_jobs_of_an_array(pbs: "FakeCommands") -> None:
    row = "Job Id: {}\n    job_state = {}\n"
    over = row.format("41[2].vm", "X") + "    substate = 92\n"
    failed = row.format("41[3].vm", "X") + "    substate = 93\n    Exit_status = 3\n"
    deleted = row.format("41[4].vm", "X") + "    substate = 91\n"
    rows = [row.format("41[].vm", "B"), row.format("41[0].vm", "R"), row.format("41[1].vm", "Q")]
    pbs.answer("qstat", "".join([*rows, over, failed, deleted]))
    scheduler = PbsScheduler()
    ids = [scheduler.task_id("41[].vm", index) for index in range(5)]
    found = scheduler.query([*ids, "7.vm"])
    assert [found[job_id].state for job_id in ids] == [
        *(JobState.RUNNING, JobState.QUEUED, JobState.UNKNOWN),
        *(JobState.FAILED, JobState.CANCELLED),
    ]
    assert pbs.calls("qstat") == [["-x", "-t", "-f", "41[].vm", "7.vm"]]
    assert scheduler.array_id("41[3].vm") == scheduler.array_id("41[].vm") == "41[].vm"
    assert scheduler.array_id("7.vm") == "7.vm"


def test_an_array_of_one_job_is_refused(make_request: MakeRequest, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="single job"):
        PbsScheduler().render(make_request(array=Array((tmp_path,))))
