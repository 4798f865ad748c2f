"""Slurm: directives, its commands pretended, and its output as recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from job_requests import change

from pipectl.batch import JobRequest, JobState, Queue, Template, get
from pipectl.batch.process import NoAnswerError
from pipectl.batch.slurm import (
    SACCT_FORMAT,
    SINFO_FORMAT,
    SQUEUE_FORMAT,
    SlurmScheduler,
    parse_exit_code,
    parse_sacct,
    parse_shown,
    parse_sinfo,
    parse_squeue,
    parse_state,
)
from pipectl.directives import SBATCH, Value, fault_of_option
from pipectl.errors import InvalidInputError, SchedulerError

if TYPE_CHECKING:
    from conftest import FakeCommands

MakeRequest = Callable[..., JobRequest]
SAMPLES = Path(__file__).parents[1] / "data" / "scheduler" / "slurm"
SCRIPT = Path("/runs/job.sh")
SUBMIT = 1795228138.0
MIB = 2**20
DIRECTIVES = "{{% extends base %}}{{% block directives %}}\n#SBATCH {}\n{{% endblock %}}"


def sample(name: str) -> str:
    return "\n".join((SAMPLES / name).read_text().splitlines()[1:-1])


def options(request: JobRequest) -> list[str]:
    """The options in the script's head, before the first command."""
    lines = SlurmScheduler().render(request).splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    return [line.removeprefix("#SBATCH ") for line in lines[1:first] if line]


def test_what_is_not_asked_for_is_not_written(make_request: MakeRequest) -> None:
    assert [line.split("=")[0] for line in options(make_request())] == [
        "--job-name",
        "--comment",
        "--nodes",
        "--ntasks-per-node",
        "--cpus-per-task",
        "--time",
        "--chdir",
        "--output",
        "--open-mode",
        "--no-requeue",
    ]
    assert "--mem=2M" in options(make_request(memory_per_node=2**20 + 1)), "rounded up"


@pytest.mark.parametrize("launcher", ["auto", "srun"])
@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_a_command_alone_is_started_without_mpi(
    make_request: MakeRequest, launcher: str, scheduler: str
) -> None:
    request = make_request(alone=True, launcher=launcher, command=("measure", "this model"))
    script = get(scheduler).render(request)
    assert "\nrun with_variables measure 'this model'\n" in script
    assert "mpiexec" not in script
    assert "srun" not in script


def test_options_of_a_site(make_request: MakeRequest) -> None:
    """As sbatch's manual writes them: long ones, letters, without a value, several times."""
    own = {"qos": "a b", "exclusive": True, "x": "node[1-2]", "s": True, "bb": ("x", "y")}
    slurm = {"partition": "gpu", "account": "it's", "options": own}
    found = options(make_request(slurm=slurm))
    assert found[:6] == ['--qos="a b"', "--exclusive", '-x"node[1-2]"', "-s", "--bb=x", "--bb=y"]
    assert {"--partition=gpu", '--account="it\'s"'} < set(found)


def test_options_that_the_site_refuses_are_not_written(make_request: MakeRequest) -> None:
    names = ("cpus-per-task", "time", "gpus-per-node", "mem")
    slurm = {"options": dict.fromkeys(names, False)}
    request = make_request(launcher="srun", gpus_per_node=2, memory_per_node=2**30, slurm=slurm)
    script = SlurmScheduler().render(request)
    assert not any(f"--{name}" in script for name in names)


@pytest.mark.parametrize("memory", ["mem", "mem-per-cpu", "mem-per-gpu"])
def test_options_may_say_what_resources_cannot(make_request: MakeRequest, memory: str) -> None:
    """Of options for memory, sbatch takes only one."""
    slurm = {"options": {"gpus-per-node": "a100:2", memory: "0"}}
    asked = options(make_request(gpus_per_node=2, memory_per_node=2**30, slurm=slurm))
    sizes = [line for line in asked if line.startswith(("--mem", "--gpus"))]
    assert sizes == ["--gpus-per-node=a100:2", f"--{memory}=0"]


@pytest.mark.parametrize("name", ["dependency", "dep", "d", "kill-on-invalid-dep"])
def test_a_dependency_of_the_users_goes_with_none_of_ours(
    make_request: MakeRequest, name: str
) -> None:
    request = make_request(slurm={"options": {name: "x"}})
    assert any("x" in line for line in options(request))
    with pytest.raises(InvalidInputError, match=rf"slurm\.options\.{name}: .* --after"):
        options(change(request, after=("41",)))


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("array", "1-4", "sweep"),
        ("a", "1-4", "sweep"),
        ("err", "x", "job.log"),
        ("exp", "NONE", "environment.variables"),
        ("n", "4", "resources.tasks_per_node"),
        ("clusters", "east", "SLURM_CLUSTERS"),
        ("M", "east,west", "SLURM_CLUSTERS"),
        ("test-only", True, "submit --test-only"),
        ("W", True, "submit --wait"),
        ("wra", "id", "remove it"),
        ("part", "x", "slurm.partition"),
        ("A", "x", "slurm.account"),
        ("N", ("4",), "resources.nodes"),
        ("time", "10", "resources.walltime"),
        ("cpus-per-task", "4", "resources.cpus_per_task"),
        ("no-requeue", True, "max_requeues"),
        ("-qos", "x", "write qos"),
        ("H", "a1-3", "takes no value; write H: true"),
        ("H", "Mother", "write H: true"),
        ("s", ("N4",), "write s: true"),
        ("Q", "W", "write Q: true"),
        ("W", "x", "submit --wait"),
        ("gpus-per-nod", "a100:4", "write gpus-per-node"),
        ("gpus-per-n", "a100:4", "write gpus-per-node"),
        ("mem-per-c", "1G", "write mem-per-cpu"),
        ("tasks-per-node", "4", "resources.tasks_per_node"),
        ("help", True, "remove it"),
        ("h", True, "remove it"),
        ("usage", True, "remove it"),
        ("version", True, "remove it"),
        ("V", True, "remove it"),
        ("t", False, "write time: false"),
        ("c", False, "write cpus-per-task: false"),
    ],
)
def test_options_that_are_not_the_users_name_what_is(name: str, value: Value, cure: str) -> None:
    assert cure in fault_of_option(SBATCH, name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("begin", "now"), ("gpus", "4"), ("S", "1"), ("nice", "5"), ("mem", "0"), ("s", True),
        ("time-min", "10"), ("ntasks-per-core", "1"), ("wait-all-nodes", "1"), ("time", False),
        ("nodelist", "n1"), ("export-file", "x"), ("mem", False), ("mem-per-cpu", "1G"),
        ("gpus-per-node", "a100:4"), ("gpus-per-task", "1"), ("H", True),
        ("dependency", "singleton"), ("verbose", True), ("G", "4"),
    ],
)  # fmt: skip
def test_options_that_are_the_users(name: str, value: Value) -> None:
    assert fault_of_option(SBATCH, name, value) == ""


@pytest.mark.parametrize(
    "directive", ["--begin=now", "--switches=1@10 --nice=5", "--bb='x --array=5'", "-sH", "-HN4"]
)
def test_directives_of_a_template_come_first_so_that_those_of_pipectl_win(
    make_request: MakeRequest, directive: str
) -> None:
    template = Template("t", DIRECTIVES.format(directive))
    request = make_request(slurm={"partition": "y"}, template=template)
    assert options(request)[0] == directive


@pytest.mark.parametrize(
    ("directive", "cure"),
    [
        ("--nice=5 -e x", "job.log"),
        ("-sn4", "resources.tasks_per_node"),
        ("--begin now -n2", "resources.tasks_per_node"),
        ("--clu=east", "SLURM_CLUSTERS"),
        ("--nice=5 -sMeast", "SLURM_CLUSTERS"),
        ("-HW", "submit --wait"),
        ("--nice=1 '--wr'\"ap\"=x", "remove it"),
        ("--nice=1 '--wr\\ap=x'", "without a backslash"),
        ("mail-type=END", "command line"),
    ],
)
def test_directives_that_order_does_not_settle_are_refused(
    make_request: MakeRequest, directive: str, cure: str
) -> None:
    with pytest.raises(InvalidInputError, match=r"site\.sh:2") as caught:
        options(make_request(template=Template("site.sh", DIRECTIVES.format(directive))))
    assert cure in (caught.value.cure or "")


@pytest.mark.parametrize("key", ["partition", "options"])
def test_control_characters_in_options_are_refused(make_request: MakeRequest, key: str) -> None:
    value = {"mail-type": "a\nb"} if key == "options" else "a\nb"
    with pytest.raises(InvalidInputError, match=rf"slurm\.{key}"):
        options(make_request(slurm={key: value}))


@pytest.mark.parametrize("name", ["HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "HYDRA_BOOTSTRAP"])
def test_a_job_with_a_launcher_of_its_own_in_its_variables_gets_no_other(
    make_request: MakeRequest, name: str
) -> None:
    request = make_request(mpi="hydra", launcher="mpiexec")
    assert "HYDRA_LAUNCHER_EXEC=" in SlurmScheduler().render(request)
    script = SlurmScheduler().render(change(request, variables={name: "ssh"}))
    assert "HYDRA_" not in script.replace(f"({name})", "")


def test_submit_returns_the_id_and_makes_the_log_folder(
    slurm: FakeCommands, make_request: MakeRequest
) -> None:
    slurm.replay("sbatch", "sbatch-parsable.txt")
    request = make_request()
    assert SlurmScheduler().submit(SCRIPT, request) == "28"
    assert slurm.calls("sbatch") == [["--parsable", "/runs/job.sh"]]
    assert (request.run_directory / "logs").is_dir()


def test_variables_that_overrule_the_script_are_removed(
    slurm: FakeCommands, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
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
        ("sbatch-badopt.txt", "unrecognized option", "slurm.options"),
        ("sbatch-gpu.txt", "Invalid generic resource", "resources.gpus_per_node"),
        ("sbatch-noshebang.txt", "does not look like a batch script", "job spec"),
    ],
)
def test_refusals_name_a_cure(
    slurm: FakeCommands, make_request: MakeRequest, sample: str, message: str, cure: str
) -> None:
    slurm.replay("sbatch", sample)
    with pytest.raises(SchedulerError, match=message) as caught:
        SlurmScheduler().submit(SCRIPT, make_request())
    assert cure in (caught.value.cure or "")
    assert slurm.calls("squeue") == [], "a refusal needs no search for the job"


@pytest.mark.parametrize(
    ("refusal", "cure"),
    [
        ("Invalid account or account/partition combination specified", "set slurm.account"),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "lower resources",
        ),
    ],
)
def test_a_refusal_that_names_several_things_has_the_cure_of_its_own(
    slurm: FakeCommands, make_request: MakeRequest, refusal: str, cure: str
) -> None:
    slurm.answer("sbatch", stderr=f"sbatch: error: Batch job submission failed: {refusal}\n", rc=1)
    with pytest.raises(SchedulerError) as caught:
        SlurmScheduler().submit(SCRIPT, make_request())
    assert (caught.value.cure or "").startswith(cure)


def test_missing_slurm_is_named(
    make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="sbatch") as caught:
        SlurmScheduler().submit(SCRIPT, make_request())
    assert "launch.scheduler: local" in (caught.value.cure or "")


def test_a_lost_answer_is_looked_up_by_tag(slurm: FakeCommands, make_request: MakeRequest) -> None:
    slurm.hang("sbatch")
    slurm.replay("squeue", "squeue-format.txt")
    scheduler = SlurmScheduler(timeout_s=1.0)
    assert scheduler.submit(SCRIPT, make_request(tag="tag-run")) == "36"
    assert slurm.calls("squeue") == [["-h", "-r", "-t", "all", "-o", SQUEUE_FORMAT, "--me"]]


def test_an_uncertain_failure_is_looked_up_too(
    slurm: FakeCommands, make_request: MakeRequest
) -> None:
    slurm.answer("sbatch", stderr="sbatch: error: Socket timed out on send/recv operation", rc=1)
    slurm.replay("squeue", "squeue-format.txt")
    assert SlurmScheduler().submit(SCRIPT, make_request(tag="tag-held")) == "35"


def test_a_lost_job_is_not_submitted_twice(slurm: FakeCommands, make_request: MakeRequest) -> None:
    slurm.answer("sbatch", stderr="Unable to contact slurm controller", rc=1)
    with pytest.raises(NoAnswerError, match="'tag-1' is listed: Unable to contact"):
        SlurmScheduler().submit(SCRIPT, make_request())
    slurm.answer("squeue", stderr="squeue is down", rc=1)
    with pytest.raises(NoAnswerError, match=r"Unable to contact.*squeue is down"):
        SlurmScheduler().submit(SCRIPT, make_request())
    assert len(slurm.calls("sbatch")) == 2


def test_the_latest_job_or_array_of_a_tag_is_found(slurm: FakeCommands) -> None:
    row = "{}|RUNNING|1|N/A|N/A|node1|tag|None\n"
    slurm.answer("squeue", row.format(9) + row.format(10) + row.format(8))
    scheduler = SlurmScheduler()
    assert (scheduler.find("tag"), scheduler.find("other")) == ("10", None)
    waiting = "35_[2-3]|PENDING|1|N/A|N/A||tag|None\n"
    slurm.answer("squeue", waiting + row.format("35_0"))
    assert scheduler.find("tag") == "35"
    assert scheduler.task_id("35", 2) == "35_2"
    assert scheduler.array_id("35_2") == scheduler.array_id("35") == "35"


def test_query_of_live_jobs_asks_the_queue_once(slurm: FakeCommands) -> None:
    slurm.replay("squeue", "squeue-format.txt")
    found = SlurmScheduler().query(["36", "37"])
    assert found["36"].state is JobState.RUNNING
    assert found["37"].state is JobState.QUEUED
    assert slurm.calls("squeue") == [
        ["-h", "-r", "-t", "all", "-o", SQUEUE_FORMAT, "-j", "36,37,36"]
    ]
    assert slurm.environment("squeue")["SLURM_TIME_FORMAT"] == "%s"
    assert slurm.calls("sacct") == slurm.calls("scontrol") == []


def test_what_is_no_id_hides_no_other_job(slurm: FakeCommands) -> None:
    assert SlurmScheduler().query([]) == {}
    assert slurm.calls("squeue") == []
    slurm.replay("squeue", "squeue-format.txt")
    assert list(SlurmScheduler().query(["7.vm", "36", "12.34@here"])) == ["36"]
    assert slurm.calls("squeue")[0][-1] == "36,36"


def test_finished_jobs_get_their_exit_code_from_the_accounting(slurm: FakeCommands) -> None:
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


def test_the_latest_attempt_of_a_requeued_job_counts(slurm: FakeCommands) -> None:
    slurm.replay("sacct", "sacct-format.txt")
    assert SlurmScheduler().query(["6"], since=SUBMIT)["6"].state is JobState.COMPLETED


def test_a_recycled_id_is_not_taken_for_ours(slurm: FakeCommands) -> None:
    slurm.replay("sacct", "sacct-format.txt")
    assert "2" in SlurmScheduler().query(["2"], since=SUBMIT + 59)
    assert SlurmScheduler().query(["2"], since=SUBMIT + 61) == {}


def test_without_accounting_the_controller_tells_the_exit_code(slurm: FakeCommands) -> None:
    slurm.answer("squeue", "2|FAILED|1|1795228139|1795228139|node1|t|NonZeroExitCode\n")
    slurm.replay("scontrol", "scontrol-2.txt")
    status = SlurmScheduler().query(["2"])["2"]
    assert (status.state, status.exit_code, status.reason) == (
        JobState.FAILED,
        3,
        "NonZeroExitCode",
    )
    assert slurm.calls("scontrol") == [["show", "job", "-o", "2"]]


def test_jobs_that_nobody_knows_are_absent(slurm: FakeCommands) -> None:
    slurm.replay("scontrol", "scontrol-unknown.txt")
    assert SlurmScheduler().query(["99"]) == {}
    slurm.replay("sacct", "sacct-unknown.txt")
    assert SlurmScheduler().query(["99"]) == {}


def test_an_accounting_that_missed_the_end_decides_nothing(slurm: FakeCommands) -> None:
    slurm.answer("sacct", "7|RUNNING|0:0|1795228138|1795228139|Unknown|node1\n")
    status = SlurmScheduler().query(["7"])["7"]
    assert status.state is JobState.UNKNOWN
    assert "RUNNING" in status.reason


def test_a_failing_squeue_is_an_error_not_an_absence(slurm: FakeCommands) -> None:
    slurm.answer("squeue", stderr="slurm_load_jobs error: Unable to contact", rc=1)
    with pytest.raises(SchedulerError, match="Unable to contact"):
        SlurmScheduler().query(["1"])
    slurm.hang("squeue")
    with pytest.raises(NoAnswerError, match="no answer within 1 s"):
        SlurmScheduler(timeout_s=1.0).query(["1"])


def test_cancel(slurm: FakeCommands) -> None:
    slurm.replay("scancel", "scancel-unknown.txt")
    SlurmScheduler().cancel("999999")
    assert slurm.calls("scancel") == [["999999"]]
    slurm.answer("scancel", stderr="Access/permission denied", rc=1)
    with pytest.raises(SchedulerError, match="permission denied"):
        SlurmScheduler().cancel("1")


def test_estimate_is_the_forecast(slurm: FakeCommands) -> None:
    slurm.replay("sbatch", "sbatch-testonly-toobig.txt")
    forecast = SlurmScheduler().estimate(SCRIPT) or ""
    assert forecast.startswith("Job 30 to start at 2026-11-20T15:36:53")
    assert slurm.calls("sbatch") == [["--test-only", "/runs/job.sh"]]
    slurm.replay("sbatch", "sbatch-testonly-5nodes.txt")
    with pytest.raises(SchedulerError, match="node configuration is not available") as caught:
        SlurmScheduler().estimate(SCRIPT)
    assert "lower resources" in (caught.value.cure or "")


def test_jobs_of_an_array_are_asked_about_together(slurm: FakeCommands) -> None:
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


def test_the_accounting_knows_jobs_of_an_array_by_their_place(slurm: FakeCommands) -> None:
    slurm.answer(
        "sacct",
        "1_0|COMPLETED|0:0|1795228138|1795228139|1795228141|node1\n"
        "1_1|FAILED|2:0|1795228138|1795228139|1795228141|node2\n",
    )
    found = SlurmScheduler().query(["1_0", "1_1"], since=SUBMIT)
    assert (found["1_0"].state, found["1_1"].exit_code) == (JobState.COMPLETED, 2)


def test_squeue_rows() -> None:
    rows = {row.job_id: row for row in parse_squeue(sample("squeue-format.txt"))}
    states = {job_id: row.status.state.value for job_id, row in rows.items()}
    assert states == {
        "2": "CANCELLED",
        "4": "COMPLETED",
        "16": "FAILED",
        "26": "FAILED",
        "35": "HELD",
        "36": "RUNNING",
        "37": "QUEUED",
        "38": "QUEUED",
        "39": "QUEUED",
    }
    running = rows["36"].status
    assert (running.nodes, running.start, running.end) == ("node[1-4]", 1795228077.0, None)
    assert (running.reason, rows["36"].comment) == ("", "tag-run")
    assert rows["37"].status.start is None
    assert rows["39"].status.reason == "PartitionNodeLimit"
    assert rows["35"].status.reason == "JobHeldUser"
    assert rows["16"].status.reason == "JobLaunchFailure"
    assert rows["2"].status.reason == "", "the reason for which it waited is stale"
    assert rows["26"].comment == "t;a%j b\\c\"d'e$HOME"


def test_sacct_rows_of_all_attempts() -> None:
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
def test_states(text: str, state: JobState) -> None:
    assert parse_state(text) is state


@pytest.mark.parametrize(
    ("row", "job_id", "state", "reason"),
    [
        ("5|NOVEL_STATE|1|N/A|N/A||t|None", "5", "UNKNOWN", "'NOVEL_STATE'"),
        ("5|CONFIGURING|1|N/A|N/A||t|None", "5", "QUEUED", "nodes are booting"),
        ("35_[1-2,...]|PENDING|1|N/A|N/A||t|None", "35_[1-2,...]", "QUEUED", ""),
        ("slurm_load_jobs error: Invalid job id specified\n", None, "", ""),
    ],
)
def test_unusual_rows_of_squeue(row: str, job_id: str | None, state: str, reason: str) -> None:
    rows = list(parse_squeue(row))
    assert [found.job_id for found in rows] == ([] if job_id is None else [job_id])
    for found in rows:
        assert found.status.state == state
        assert reason in found.status.reason


@pytest.mark.parametrize(
    ("text", "job_id"),
    [
        ("28\n", "28"),
        ("28;cluster1\n", "28"),
        ("Welcome to 2026\n****\n29\n", "29"),
        ("no id here\n", None),
        ("", None),
    ],
)
def test_the_id_in_the_answer(
    slurm: FakeCommands, make_request: MakeRequest, text: str, job_id: str | None
) -> None:
    slurm.answer("sbatch", text)
    if job_id is None:
        with pytest.raises(NoAnswerError, match="gave no job id"):
            SlurmScheduler().submit(SCRIPT, make_request())
    else:
        assert SlurmScheduler().submit(SCRIPT, make_request()) == job_id


def test_exit_codes_of_scontrol() -> None:
    codes = {}
    for line in (SAMPLES / "exitcodes.txt").read_text().splitlines():
        state = parse_state(line.split("JobState=")[1].split()[0])
        codes[line.split()[0]] = parse_exit_code(line, state)
    assert codes == {
        "JobId=46": 3,
        "JobId=47": None,
        "JobId=48": 128 + 11,
        "JobId=49": 0,
        "JobId=50": 137,
        "JobId=51": 128 + 15,
        "JobId=52": 127,
    }


def test_what_scontrol_says_of_jobs_of_an_array_and_of_none() -> None:
    lines = (
        "JobId=6 ArrayJobId=1 ArrayTaskId=1 JobState=FAILED ExitCode=3:0 Comment=a ExitCode=0:0\n"
        "JobId=1 ArrayJobId=1 ArrayTaskId=3 JobState=FAILED ExitCode=4:0\n"
        "JobId=9 JobName=x JobState=FAILED ExitCode=5:0\n"
    )
    shown = parse_shown(lines)
    codes = {job_id: parse_exit_code(line, JobState.FAILED) for job_id, line in shown.items()}
    assert codes == {"1_1": 3, "1_3": 4, "9": 5}
    assert parse_exit_code(sample("scontrol-unknown.txt"), JobState.FAILED) is None


def test_waiting_jobs_of_an_array_stand_in_one_row() -> None:
    rows = parse_squeue(
        "35_[1-2,7%2]|PENDING|1|N/A|N/A||tag|Resources\n35_0|RUNNING|1|1|2|n1|tag|None"
    )
    assert [(row.job_id, row.status.state) for row in rows] == [
        *((f"35_{index}", JobState.QUEUED) for index in (1, 2, 7)),
        ("35_0", JobState.RUNNING),
    ]
    assert [row.job_id for row in parse_sacct("35_[3]|PENDING|0:0|1|Unknown|Unknown|")] == ["35_3"]


def test_a_real_lab() -> None:
    assert parse_sinfo(sample("sinfo.txt")) == (
        Queue("debug", True, True, 3600, nodes=4, cores=4, memory_bytes=4000 * MIB, gpus=2),
    )


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("infinite", None), ("2-00:00:00", 172800), ("30:00", 1800), ("1:00:00", 3600),
        ("n/a", None), ("UNLIMITED", None), ("", None), ("0:00", None),
    ],
)  # fmt: skip
def test_limits_of_time(limit: str, seconds: int | None) -> None:
    (queue,) = parse_sinfo(f"p|{limit}|1|2|1000|(null)|up")
    assert queue.walltime_s == seconds


@pytest.mark.parametrize(
    ("text", "queue"),
    [
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
    ],
)
def test_partitions(text: str, queue: Queue) -> None:
    assert parse_sinfo(text) == (queue,)
    assert parse_sinfo("garbage\na|b\n|||||||||\n") == ()


def test_partitions_are_asked_as_written(slurm: FakeCommands) -> None:
    slurm.replay("sinfo", "sinfo.txt")
    assert SlurmScheduler().queues()[0].name == "debug"
    assert slurm.calls("sinfo") == [["-h", "-o", SINFO_FORMAT]]
    slurm.answer("sinfo", stderr="slurm_load_partitions: Unable to contact slurm controller", rc=1)
    with pytest.raises(SchedulerError, match="Unable to contact"):
        SlurmScheduler().queues()
