"""Slurm: directives, its commands pretended, and its output as recorded."""

from pathlib import Path

import pytest
from grammar import directives
from job_requests import change

from pipectl.batch import JobRequest, JobState, Queue
from pipectl.batch.slurm import (
    SACCT_FORMAT,
    SINFO_FORMAT,
    SQUEUE_FORMAT,
    SlurmScheduler,
    parse_sacct,
    parse_sinfo,
    parse_squeue,
    parse_state,
)
from pipectl.directives import REPLACEMENTS
from pipectl.errors import SchedulerError
from pipectl.spec.models import Checkpoint

SAMPLES = Path(__file__).parents[1] / "data" / "scheduler" / "slurm"
SUBMIT = 1795228138.0
MIB = 2**20


def sample(name: str) -> str:
    return "\n".join((SAMPLES / name).read_text().splitlines()[1:-1])


def options(request: JobRequest) -> list[str]:
    return [" ".join(words) for words in directives(SlurmScheduler().render(request), "slurm")]


def test_memory_is_rounded_up(make_request):
    assert "--mem=2M" in options(make_request(memory_per_node=2**20 + 1))


def test_options_of_a_site(make_request):
    """As sbatch's manual writes them: long ones, letters, without a value, several times."""
    own = {"qos": "a b", "exclusive": True, "x": "node[1-2]", "s": True, "bb": ("x", "y")}
    asked = options(make_request(slurm={"partition": "gpu", "account": "it's", "options": own}))
    assert asked[:6] == ["--qos=a b", "--exclusive", "-xnode[1-2]", "-s", "--bb=x", "--bb=y"]
    assert {"--partition=gpu", "--account=it's"} < set(asked)


def test_options_that_the_site_refuses_are_not_written(make_request):
    request = make_request(launcher="srun", mpi="pmi2", gpus_per_node=2, memory_per_node=2**30)
    script = SlurmScheduler().render(request)
    assert all(f"#SBATCH --{name}=" in script for name in REPLACEMENTS)
    script = SlurmScheduler().render(
        change(request, slurm={"options": dict.fromkeys(REPLACEMENTS, False)})
    )
    assert not any(f"--{name}" in script for name in REPLACEMENTS)


@pytest.mark.parametrize(("time", "lead_s"), [({}, 150), ({"time": False}, 400)])
def test_the_lead_time_is_cut_only_if_the_walltime_is_known(make_request, time, lead_s):
    saves, slurm = Checkpoint(lead_time=400), {"options": time}
    request = make_request(walltime=600, checkpoint=saves, slurm=slurm)
    assert f"--signal=B:USR2@{lead_s}" in options(request)


@pytest.mark.parametrize("memory", ["mem", "mem-per-cpu", "mem-per-gpu"])
def test_options_may_say_what_resources_cannot(make_request, memory):
    """Of options for memory, sbatch takes only one."""
    slurm = {"options": {"gpus-per-node": "a100:2", memory: "0"}}
    asked = options(make_request(gpus_per_node=2, memory_per_node=2**30, slurm=slurm))
    sizes = [line for line in asked if line.startswith(("--mem", "--gpus"))]
    assert sizes == ["--gpus-per-node=a100:2", f"--{memory}=0"]


def test_the_latest_job_or_array_of_a_tag_is_found(slurm):
    row = "{}|RUNNING|1|N/A|N/A|node1|tag|None\n"
    slurm.answer("squeue", row.format(9) + row.format(10) + row.format(8))
    scheduler = SlurmScheduler()
    assert (scheduler.find("tag"), scheduler.find("other")) == ("10", None)
    assert slurm.calls("squeue")[0] == ["-h", "-r", "-t", "all", "-o", SQUEUE_FORMAT, "--me"]
    waiting = "35_[2-3]|PENDING|1|N/A|N/A||tag|None\n"
    slurm.answer("squeue", waiting + row.format("35_0"))
    assert scheduler.find("tag") == "35"
    assert scheduler.task_id("35", 2) == "35_2"
    assert scheduler.array_id("35_2") == scheduler.array_id("35") == "35"


def test_query_asks_the_queue_once_about_all(slurm):
    """And what is no id hides no other job."""
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
    assert found["37"].start is None
    ids = ",".join([*states, "2"])
    assert slurm.calls("squeue") == [["-h", "-r", "-t", "all", "-o", SQUEUE_FORMAT, "-j", ids]]
    assert slurm.environment("squeue")["SLURM_TIME_FORMAT"] == "%s"
    assert SlurmScheduler().find("t;a%j b\\c\"d'e$HOME") == "26"


def test_finished_jobs_get_their_exit_code_from_the_accounting(slurm):
    slurm.answer("squeue", "2|FAILED|1|1795228139|1795228139|node1|t|NonZeroExitCode\n")
    slurm.replay("sacct", "sacct-format.txt")
    found = SlurmScheduler().query(["1", "2", "3", "6"], since=SUBMIT)
    failed = found["2"]
    assert (failed.state, failed.exit_code, failed.source) == (JobState.FAILED, 3, "queue")
    assert (found["1"].state, found["1"].source) == (JobState.COMPLETED, "accounting")
    assert found["3"].state is JobState.CANCELLED
    assert found["6"].state is JobState.COMPLETED, "the latest attempt of a requeued job"
    ((*flags, ids, output, columns, start, day),) = slurm.calls("sacct")
    assert flags == ["-X", "-D", "-n", "-P", "-j"]
    assert (ids, start, output, columns) == ("1,2,3,6", "-S", "-o", SACCT_FORMAT)
    assert day in {"2026-11-19", "2026-11-20"}, "the day before, in local time"


def test_a_recycled_id_is_not_taken_for_ours(slurm):
    slurm.replay("sacct", "sacct-format.txt")
    assert "2" in SlurmScheduler().query(["2"], since=SUBMIT + 59)
    assert SlurmScheduler().query(["2"], since=SUBMIT + 61) == {}


def test_jobs_that_nobody_knows_are_absent(slurm):
    assert SlurmScheduler().query(["99"]) == {}, "there is no accounting"
    slurm.replay("sacct", "sacct-unknown.txt")
    assert SlurmScheduler().query(["99"]) == {}


def test_an_accounting_that_missed_the_end_decides_nothing(slurm):
    slurm.answer("sacct", "7|RUNNING|0:0|1795228138|1795228139|Unknown|node1\n")
    status = SlurmScheduler().query(["7"])["7"]
    assert status.state is JobState.UNKNOWN
    assert "RUNNING" in status.reason


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


def test_sacct_rows_of_all_attempts():
    rows = list(parse_sacct(sample("sacct-format.txt")))
    seen = [(row.job_id, row.status.state.value, row.status.exit_code) for row in rows]
    assert seen == [
        ("1", "COMPLETED", 0),
        ("2", "FAILED", 3),
        ("3", "CANCELLED", None),
        ("4", "FAILED", 137),
        ("5", "QUEUED", None),
        ("6", "QUEUED", None),
        ("6", "COMPLETED", 0),
    ]
    assert rows[1].submitted_at == 1795228138.0
    assert (rows[1].status.end, rows[1].status.nodes) == (1795228139.0, "node1")
    assert (rows[4].status.start, rows[4].status.nodes) == (None, "")
    assert {row.status.source for row in rows} == {"accounting"}


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("COMPLETED,COMPLETING", JobState.COMPLETING),
        ("FAILED,REQUEUED", JobState.QUEUED),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("DEADLINE", JobState.TIMEOUT),
        ("BOOT_FAIL", JobState.NODE_FAIL),
        ("CONFIGURING", JobState.QUEUED),
        ("STOPPED", JobState.SUSPENDED),
        ("REQUEUE_HOLD", JobState.HELD),
        ("LAUNCH_FAILED,FAILED", JobState.FAILED),
        ("SOMETHING_NEW", JobState.UNKNOWN),
        ("?", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_states(text, state):
    assert parse_state(text) is state


@pytest.mark.parametrize(
    ("row", "job_ids", "state", "reason"),
    [
        ("5|NOVEL_STATE|1|N/A|N/A||t|None", ["5"], "UNKNOWN", "'NOVEL_STATE'"),
        ("5|CONFIGURING|1|N/A|N/A||t|None", ["5"], "QUEUED", "nodes are booting"),
        ("35_[1-2,...]|PENDING|1|N/A|N/A||t|None", ["35_[1-2,...]"], "QUEUED", ""),
        ("35_[1-2,7%2]|PENDING|1|N/A|N/A||t|None", ["35_1", "35_2", "35_7"], "QUEUED", ""),
        ("slurm_load_jobs error: Invalid job id specified\n", [], "", ""),
    ],
)
def test_unusual_rows_of_squeue(row, job_ids, state, reason):
    rows = list(parse_squeue(row))
    assert [found.job_id for found in rows] == job_ids
    for found in rows:
        assert found.status.state == state
        assert reason in found.status.reason


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("infinite", None), ("2-00:00:00", 172800), ("30:00", 1800), ("1:00:00", 3600),
        ("n/a", None), ("UNLIMITED", None), ("", None), ("0:00", None),
    ],
)  # fmt: skip
def test_limits_of_time(limit, seconds):
    (queue,) = parse_sinfo(f"p|{limit}|1|2|1000|(null)|up")
    assert queue.walltime_s == seconds


@pytest.mark.parametrize(
    ("text", "queue"),
    [
        (
            sample("sinfo.txt"),
            Queue("debug", True, True, 3600, nodes=4, cores=4, memory_bytes=4000 * MIB, gpus=2),
        ),
        (
            "gpu|infinite|2|64+|250000+|gpu:a100:4(S:0-1),nvme:1|up\n"
            "gpu|infinite|3|32|90000|(null)|up",  # what all nodes have
            Queue("gpu", nodes=5, cores=32, memory_bytes=90000 * MIB),
        ),
        (
            "p|infinite|1|8|9000|gpu:a100:2,gpu:h200:3(S:1),gres:gpux:7|up",
            Queue("p", nodes=1, cores=8, memory_bytes=9000 * MIB, gpus=5),
        ),
        ("p|infinite|1|8|1|(null)|up", Queue("p", nodes=1, cores=8)),  # nobody told Slurm
        ("p|x|y|z|w|v|u", Queue("p", open=False)),
        ("garbage\na|b\n|||||||||\n", None),
    ],
)
def test_partitions(slurm, text, queue):
    slurm.answer("sinfo", text)
    assert SlurmScheduler().queues() == (() if queue is None else (queue,))
    assert slurm.calls("sinfo") == [["-h", "-o", SINFO_FORMAT]]


def test_a_controller_that_lists_no_partitions_is_an_error(slurm):
    slurm.answer("sinfo", stderr="slurm_load_partitions: Unable to contact slurm controller", rc=1)
    with pytest.raises(SchedulerError, match="Unable to contact"):
        SlurmScheduler().queues()
