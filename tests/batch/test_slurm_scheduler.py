"""SlurmScheduler against pretended commands that check arguments and replay recordings."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipectl.batch import JobRequest, JobState
from pipectl.batch.process import NoAnswerError
from pipectl.batch.slurm import SlurmScheduler
from pipectl.batch.slurm_text import SACCT_FORMAT, SQUEUE_FORMAT
from pipectl.errors import SchedulerError

if TYPE_CHECKING:
    from conftest import FakeCommands

MakeRequest = Callable[..., JobRequest]
SCRIPT = Path("/runs/job.sh")
SUBMIT = 1795228138.0


def test_submit_returns_the_id_and_makes_the_log_folder(
    slurm: "FakeCommands", make_request: MakeRequest
) -> None:
    slurm.replay("sbatch", "sbatch-parsable.txt")
    request = make_request()
    assert SlurmScheduler().submit(SCRIPT, request) == "28"
    assert slurm.calls("sbatch") == [["--parsable", "/runs/job.sh"]]
    assert (request.run_directory / "logs").is_dir()


def test_variables_that_overrule_the_script_are_removed(
    slurm: "FakeCommands", make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = ("SBATCH_PARTITION", "SLURM_JOB_ID", "SLURM_NTASKS", "SQUEUE_PARTITION")
    for name in (*removed, "SLURM_CONF", "SLURM_CLUSTERS", "MY_SETTING"):
        monkeypatch.setenv(name, "x")
    slurm.answer("sbatch", "5\n")
    SlurmScheduler().submit(SCRIPT, make_request())
    environment = slurm.environment("sbatch")
    assert not set(removed) & set(environment)
    assert {"SLURM_CONF", "SLURM_CLUSTERS", "MY_SETTING", "PATH"} <= set(environment)
    assert "SLURM_TIME_FORMAT" not in environment, "it would leak into the job"


@pytest.mark.parametrize(
    ("sample", "message", "cure"),
    [
        ("sbatch-badpart.txt", "invalid partition specified: nope", "slurm.partition"),
        ("sbatch-badmem.txt", "Memory specification", "resources.memory_per_node"),
        ("sbatch-badopt.txt", "unrecognized option", "slurm.directives"),
        ("sbatch-gpu.txt", "Invalid generic resource", "resources.gpus_per_node"),
        ("sbatch-noshebang.txt", "does not look like a batch script", "job spec"),
    ],
)
def test_refusals_name_a_cure(
    slurm: "FakeCommands", make_request: MakeRequest, sample: str, message: str, cure: str
) -> None:
    slurm.replay("sbatch", sample)
    with pytest.raises(SchedulerError, match=message) as caught:
        SlurmScheduler().submit(SCRIPT, make_request())
    assert cure in (caught.value.cure or "")
    assert slurm.calls("squeue") == [], "a refusal needs no search for the job"


def test_missing_slurm_is_named(
    make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="sbatch") as caught:
        SlurmScheduler().submit(SCRIPT, make_request())
    assert "launch.scheduler: local" in (caught.value.cure or "")


def test_a_lost_answer_is_looked_up_by_tag(
    slurm: "FakeCommands", make_request: MakeRequest
) -> None:
    slurm.hang("sbatch")
    slurm.replay("squeue", "squeue-format.txt")
    scheduler = SlurmScheduler(timeout_s=1.0)
    assert scheduler.submit(SCRIPT, make_request(tag="tag-run")) == "36"
    assert slurm.calls("squeue") == [["-h", "-r", "-t", "all", "-o", SQUEUE_FORMAT, "--me"]]


def test_an_uncertain_failure_is_looked_up_too(
    slurm: "FakeCommands", make_request: MakeRequest
) -> None:
    slurm.answer("sbatch", stderr="sbatch: error: Socket timed out on send/recv operation", rc=1)
    slurm.replay("squeue", "squeue-format.txt")
    assert SlurmScheduler().submit(SCRIPT, make_request(tag="tag-held")) == "35"


def test_a_lost_job_is_not_submitted_twice(
    slurm: "FakeCommands", make_request: MakeRequest
) -> None:
    slurm.answer("sbatch", stderr="Unable to contact slurm controller", rc=1)
    with pytest.raises(NoAnswerError, match="'tag-1' is listed: Unable to contact"):
        SlurmScheduler().submit(SCRIPT, make_request())
    slurm.answer("squeue", stderr="squeue is down", rc=1)
    with pytest.raises(NoAnswerError, match=r"Unable to contact.*squeue is down"):
        SlurmScheduler().submit(SCRIPT, make_request())
    assert len(slurm.calls("sbatch")) == 2


def test_find_takes_the_latest_job_of_a_tag(slurm: "FakeCommands") -> None:
    row = "{}|RUNNING|1|N/A|N/A|node1|tag|None\n"
    slurm.answer("squeue", row.format(9) + row.format(10) + row.format(8))
    assert SlurmScheduler().find("tag") == "10"
    assert SlurmScheduler().find("other") is None


def test_query_of_live_jobs_asks_the_queue_once(slurm: "FakeCommands") -> None:
    slurm.replay("squeue", "squeue-format.txt")
    found = SlurmScheduler().query(["36", "37"])
    assert found["36"].state is JobState.RUNNING
    assert found["37"].state is JobState.QUEUED
    assert slurm.calls("squeue") == [
        ["-h", "-r", "-t", "all", "-o", SQUEUE_FORMAT, "-j", "36,37,36"]
    ]
    assert slurm.environment("squeue")["SLURM_TIME_FORMAT"] == "%s"
    assert slurm.calls("sacct") == slurm.calls("scontrol") == []


def test_query_of_nothing_asks_nobody(slurm: "FakeCommands") -> None:
    assert SlurmScheduler().query([]) == {}
    assert slurm.calls("squeue") == []


def test_what_is_no_id_hides_no_other_job(slurm: "FakeCommands") -> None:
    slurm.replay("squeue", "squeue-format.txt")
    found = SlurmScheduler().query(["7.vm", "36", "12.34@here"])
    assert list(found) == ["36"]
    assert slurm.calls("squeue")[0][-1] == "36,36"


def test_finished_jobs_get_their_exit_code_from_the_accounting(slurm: "FakeCommands") -> None:
    slurm.answer("squeue", "2|FAILED|1|1795228139|1795228139|node1|t|NonZeroExitCode\n")
    slurm.replay("sacct", "sacct-format.txt")
    found = SlurmScheduler().query(["1", "2", "3"], since=SUBMIT)
    assert (found["2"].state, found["2"].exit_code, found["2"].source) == (
        JobState.FAILED,
        3,
        "queue",
    )
    assert (found["1"].state, found["1"].source) == (JobState.COMPLETED, "accounting")
    assert found["3"].state is JobState.CANCELLED
    ((*flags, ids, start, day, output, columns),) = slurm.calls("sacct")
    assert flags == ["-X", "-D", "-n", "-P", "-j"]
    assert (ids, start, output, columns) == ("1,2,3", "-S", "-o", SACCT_FORMAT)
    assert day in {"2026-11-19", "2026-11-20"}, "the day before, in local time"


def test_the_latest_attempt_of_a_requeued_job_counts(slurm: "FakeCommands") -> None:
    slurm.replay("sacct", "sacct-format.txt")
    assert SlurmScheduler().query(["6"], since=SUBMIT)["6"].state is JobState.COMPLETED


def test_a_recycled_id_is_not_taken_for_ours(slurm: "FakeCommands") -> None:
    slurm.replay("sacct", "sacct-format.txt")
    assert "2" in SlurmScheduler().query(["2"], since=SUBMIT + 59)
    assert SlurmScheduler().query(["2"], since=SUBMIT + 61) == {}


def test_without_accounting_the_controller_tells_the_exit_code(slurm: "FakeCommands") -> None:
    slurm.answer("squeue", "2|FAILED|1|1795228139|1795228139|node1|t|NonZeroExitCode\n")
    slurm.replay("scontrol", "scontrol-2.txt")
    status = SlurmScheduler().query(["2"])["2"]
    assert (status.state, status.exit_code, status.reason) == (
        JobState.FAILED,
        3,
        "NonZeroExitCode",
    )
    assert slurm.calls("scontrol") == [["show", "job", "-o", "2"]]


def test_jobs_that_nobody_knows_are_absent(slurm: "FakeCommands") -> None:
    slurm.replay("scontrol", "scontrol-unknown.txt")
    assert SlurmScheduler().query(["99"]) == {}
    slurm.replay("sacct", "sacct-unknown.txt")
    assert SlurmScheduler().query(["99"]) == {}


def test_an_accounting_that_missed_the_end_decides_nothing(slurm: "FakeCommands") -> None:
    slurm.answer("sacct", "7|RUNNING|0:0|1795228138|1795228139|Unknown|node1\n")
    status = SlurmScheduler().query(["7"])["7"]
    assert status.state is JobState.UNKNOWN
    assert "RUNNING" in status.reason


def test_a_failing_squeue_is_an_error_not_an_absence(slurm: "FakeCommands") -> None:
    slurm.answer("squeue", stderr="slurm_load_jobs error: Unable to contact", rc=1)
    with pytest.raises(SchedulerError, match="Unable to contact"):
        SlurmScheduler().query(["1"])


def test_a_squeue_that_hangs_is_given_up(slurm: "FakeCommands") -> None:
    slurm.hang("squeue")
    with pytest.raises(NoAnswerError, match="no answer within 1 s"):
        SlurmScheduler(timeout_s=1.0).query(["1"])


def test_cancel(slurm: "FakeCommands") -> None:
    slurm.replay("scancel", "scancel-unknown.txt")
    SlurmScheduler().cancel("999999")
    assert slurm.calls("scancel") == [["999999"]]
    slurm.answer("scancel", stderr="Access/permission denied", rc=1)
    with pytest.raises(SchedulerError, match="permission denied"):
        SlurmScheduler().cancel("1")


def test_estimate_is_the_forecast(slurm: "FakeCommands") -> None:
    slurm.replay("sbatch", "sbatch-testonly-toobig.txt")
    forecast = SlurmScheduler().estimate(SCRIPT)
    assert forecast is not None
    assert forecast.startswith("Job 30 to start at 2026-11-20T15:36:53")
    assert slurm.calls("sbatch") == [["--test-only", "/runs/job.sh"]]


def test_an_impossible_job_has_no_estimate(slurm: "FakeCommands") -> None:
    slurm.replay("sbatch", "sbatch-testonly-5nodes.txt")
    with pytest.raises(SchedulerError, match="node configuration is not available") as caught:
        SlurmScheduler().estimate(SCRIPT)
    assert "lower resources" in (caught.value.cure or "")


def test_jobs_of_an_array_are_asked_about_together(slurm: "FakeCommands") -> None:
    slurm.answer(
        "squeue",
        "1_[2-3%2]|PENDING|1|N/A|N/A||t|JobArrayTaskLimit\n"
        "1_0|RUNNING|1|1795228139|1795228139|node1|t|None\n"
        "1_1|FAILED|1|1795228139|1795228139|node1|t|NonZeroExitCode\n",
    )
    slurm.answer("scontrol", "JobId=6 ArrayJobId=1 ArrayTaskId=1 JobState=FAILED ExitCode=3:0\n")
    found = SlurmScheduler().query(["1_0", "1_1", "1_2", "1_3", "1_4"])
    assert {job_id: status.state for job_id, status in found.items()} == {
        "1_0": JobState.RUNNING,
        "1_1": JobState.FAILED,
        "1_2": JobState.QUEUED,
        "1_3": JobState.QUEUED,
    }
    assert found["1_1"].exit_code == 3
    assert [call[-1] for call in slurm.calls("squeue")] == ["1,1"]
    assert slurm.calls("scontrol") == [["show", "job", "-o", "1"]]


def test_the_accounting_knows_jobs_of_an_array_by_their_place(slurm: "FakeCommands") -> None:
    slurm.answer(
        "sacct",
        "1_0|COMPLETED|0:0|1795228138|1795228139|1795228141|node1\n"
        "1_1|FAILED|2:0|1795228138|1795228139|1795228141|node2\n",
    )
    found = SlurmScheduler().query(["1_0", "1_1"], since=SUBMIT)
    assert (found["1_0"].state, found["1_1"].exit_code) == (JobState.COMPLETED, 2)


def test_an_array_is_found_by_its_tag(slurm: "FakeCommands") -> None:
    slurm.answer("squeue", "35_[2-3]|PENDING|1|N/A|N/A||tag|None\n35_0|RUNNING|1|1|2|n|tag|None\n")
    scheduler = SlurmScheduler()
    assert scheduler.find("tag") == "35"
    assert scheduler.task_id("35", 2) == "35_2"
    assert scheduler.array_id("35_2") == scheduler.array_id("35") == "35"
