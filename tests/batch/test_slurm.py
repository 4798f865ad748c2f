"""What Slurm is asked, with its commands pretended, and its answers as recorded."""

import pytest

from pipectl.batch import JobState, Queue
from pipectl.batch.slurm import SACCT_FORMAT, SINFO_FORMAT, SQUEUE_FORMAT, SlurmScheduler
from pipectl.errors import SchedulerError

SUBMIT = 1795228138.0
ASKED = ["-h", "-r", "-t", "all", "-o", SQUEUE_FORMAT]


def test_the_latest_job_or_array_of_a_tag_is_found(slurm):
    row = "{}|RUNNING|1|N/A|N/A|node1|tag|None\n"
    slurm.answer("squeue", row.format(9) + row.format(10) + row.format(8))
    scheduler = SlurmScheduler()
    assert (scheduler.find("tag"), scheduler.find("other")) == ("10", None)
    assert slurm.calls("squeue")[0] == [*ASKED, "--me"]
    slurm.answer("squeue", f"35_[2-3]|PENDING|1|N/A|N/A||tag|None\n{row.format('35_0')}")
    assert scheduler.find("tag") == "35"
    assert scheduler.task_id("35", 2) == "35_2"
    assert scheduler.array_id("35_2") == scheduler.array_id("35") == "35"


def test_query_asks_the_queue_once_about_all_and_what_is_no_id_hides_no_other(slurm):
    slurm.replay("squeue", "squeue-format.txt")
    states = {
        "2": ("CANCELLED", ""),  # the reason for which it waited is stale
        "4": ("COMPLETED", ""),
        "16": ("FAILED", "JobLaunchFailure"),
        "26": ("FAILED", "NonZeroExitCode"),
        "35": ("HELD", "JobHeldUser"),
        "36": ("RUNNING", ""),
        "37": ("QUEUED", "Resources"),
        "38": ("QUEUED", "BeginTime"),
        "39": ("QUEUED", "PartitionNodeLimit"),
    }
    found = SlurmScheduler().query([*states, "7.vm", "12.34@here"])
    assert {job_id: (job.state.value, job.reason) for job_id, job in found.items()} == states
    running = found["36"]
    assert (running.nodes, running.start, running.end) == ("node[1-4]", 1795228077.0, None)
    ids = ",".join([*states, "2"])
    assert slurm.calls("squeue") == [[*ASKED, "-j", ids]]
    assert slurm.environment("squeue")["SLURM_TIME_FORMAT"] == "%s"
    assert SlurmScheduler().find("t;a%j b\\c\"d'e$HOME") == "26"


def test_ended_jobs_come_from_the_accounting_unless_they_are_older_ones_with_their_ids(slurm):
    slurm.answer("squeue", "2|FAILED|1|1795228139|1795228139|node1|t|NonZeroExitCode\n")
    slurm.replay("sacct", "sacct-format.txt")
    ids = ["1", "2", "3", "4", "5", "6"]
    found = SlurmScheduler().query(ids, since=SUBMIT)
    assert [(job.state.value, job.exit_code, job.source) for job in found.values()] == [
        ("COMPLETED", 0, "accounting"),
        ("FAILED", 3, "queue"),
        ("CANCELLED", None, "accounting"),
        ("FAILED", 137, "accounting"),
        ("UNKNOWN", None, "accounting"),  # it missed the end
        ("COMPLETED", 0, "accounting"),  # the latest attempt of a requeued job
    ]
    assert "still says QUEUED" in found["5"].reason
    assert (found["4"].start, found["4"].end, found["4"].nodes) == (SUBMIT + 1, SUBMIT + 1, "node1")
    ((*flags, asked, output, columns, start, day),) = slurm.calls("sacct")
    assert flags == ["-X", "-D", "-n", "-P", "-j"]
    assert (asked, start, output, columns) == (",".join(ids), "-S", "-o", SACCT_FORMAT)
    assert day in {"2026-11-19", "2026-11-20"}, "the day before, in local time"
    slurm.answer("squeue")
    assert "2" in SlurmScheduler().query(["2"], since=SUBMIT + 59)
    assert SlurmScheduler().query(["2"], since=SUBMIT + 61) == {}
    slurm.replay("sacct", "sacct-nodbd.txt")
    assert SlurmScheduler().query(["2"]) == {}, "there is no accounting"


def test_jobs_of_an_array_are_asked_about_together(slurm):
    slurm.answer(
        "squeue",
        "1_[2-3%2]|PENDING|1|N/A|N/A||t|JobArrayTaskLimit\n"
        "1_0|RUNNING|1|1795228139|1795228139|node1|t|None\n"
        "1_1|FAILED|1|1795228139|1795228139|node1|t|NonZeroExitCode\n",
    )
    slurm.answer(
        "sacct",
        "1_1|FAILED|2:0|1795228138|1795228139|1795228141|node2\n"
        "1_5|COMPLETED|0:0|1795228138|1795228139|1795228141|node1\n",
    )
    found = SlurmScheduler().query([f"1_{index}" for index in range(6)], since=SUBMIT)
    assert {job_id: status.state for job_id, status in found.items()} == {
        "1_0": JobState.RUNNING,
        "1_1": JobState.FAILED,
        "1_2": JobState.QUEUED,
        "1_3": JobState.QUEUED,
        "1_5": JobState.COMPLETED,
    }
    assert found["1_1"].exit_code == 2
    assert [call[-1] for call in slurm.calls("squeue")] == ["1,1"]


def test_estimate_is_the_forecast(slurm):
    slurm.replay("sbatch", "sbatch-testonly-toobig.txt")
    forecast = SlurmScheduler().estimate("#!/bin/bash\n") or ""
    assert forecast.startswith("Job 30 to start at 2026-11-20T15:36:53")
    assert slurm.calls("sbatch") == [["--test-only"]]
    slurm.replay("sbatch", "sbatch-testonly-5nodes.txt")
    with pytest.raises(SchedulerError, match="node configuration is not available") as caught:
        SlurmScheduler().estimate("#!/bin/bash\n")
    assert "lower resources" in (caught.value.cure or "")


def test_partitions_are_listed_or_the_controller_does_not_answer(slurm):
    slurm.replay("sinfo", "sinfo.txt")
    debug = Queue("debug", True, True, 3600, nodes=4, cores=4, memory_bytes=4000 * 2**20, gpus=2)
    assert SlurmScheduler().queues() == (debug,)
    assert slurm.calls("sinfo") == [["-h", "-o", SINFO_FORMAT]]
    slurm.answer("sinfo", stderr="slurm_load_partitions: Unable to contact slurm controller", rc=1)
    with pytest.raises(SchedulerError, match="Unable to contact"):
        SlurmScheduler().queues()
