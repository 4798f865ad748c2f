"""PBS: directives read back by the grammar of qsub, pretended commands, recorded output."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from job_requests import change

from pipectl.batch import Array, JobRequest, JobState, Queue, Template
from pipectl.batch.pbs import PbsScheduler, parse_blocks, parse_qstat, parse_queues
from pipectl.batch.process import NoAnswerError
from pipectl.directives import QSUB, Value, fault_of_option
from pipectl.errors import InvalidInputError, PipectlError, SchedulerError
from pipectl.spec.models import Checkpoint

if TYPE_CHECKING:
    from conftest import FakeCommands

MakeRequest = Callable[..., JobRequest]
SAMPLES = Path(__file__).parents[1] / "data" / "scheduler" / "pbs"
SCRIPT = Path("/runs/job.sh")
DIRECTIVES = "{{% extends base %}}{{% block directives %}}\n#PBS {}\n{{% endblock %}}"
ROW = "Job Id: {}\n    Job_Name = {}\n    job_state = R\n"
WITH_VALUE = set("aAcCeJjklmMNopPqrRSuvW")
"""Options that take a value, from qsub(1B)."""
RESOURCE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*=[^,]+")
CHUNK = re.compile(r"[1-9][0-9]*(:[A-Za-z][A-Za-z0-9_-]*=[A-Za-z0-9_.+*~/@-]+)*")


def words(line: str) -> list[str]:
    """As make_argv of qsub splits them: quotes group, a backslash in them is one."""
    found, word, quote, begun = [], "", "", False
    for letter in line:
        if quote:
            if letter == quote:
                quote = ""
            else:
                word += letter
        elif letter in "'\"":
            quote, begun = letter, True
        elif letter.isspace():
            if begun:
                found.append(word)
            word, begun = "", False
        else:
            word, begun = word + letter, True
    assert not quote, f"unmatched quote in {line!r}"
    return [*found, word] if begun else found


def directives(script: str) -> list[tuple[str, ...]]:
    """Options and values; they end with the first line that is a command."""
    first, *lines = script.splitlines()
    assert first == "#!/bin/bash"
    found = []
    for line in lines:
        if not line.startswith("#"):
            break
        option, *rest = words(line.removeprefix("#PBS "))
        assert re.fullmatch("-[A-Za-z]", option), line
        assert len(rest) == (option[1] in WITH_VALUE), line
        found.append((option, *rest))
    assert "\n#PBS" not in script.split("\n\n", 1)[1]
    return found


def test_the_golden_script_is_read_back() -> None:
    given = resources((Path(__file__).parents[2] / "slurm/golden/pbs.sh").read_text())
    assert all(CHUNK.fullmatch(chunk) for chunk in given["select"].split("+"))


def resources(script: str) -> dict[str, str]:
    found = {}
    for option, *rest in directives(script):
        if option == "-l":
            (value,) = rest
            assert RESOURCE.fullmatch(value)
            name, _, what = value.partition("=")
            assert name not in found, "PBS takes the first of two"
            found[name] = what
    return found


def test_resources_are_counted_by_chunk(make_request: MakeRequest) -> None:
    request = make_request(
        nodes=3,
        tasks_per_node=4,
        cpus_per_task=16,
        gpus_per_node=4,
        memory_per_node=240 * 2**30 + 1,
        walltime=36 * 3600,
        pbs={"select": "model=icelake"},
    )
    asked = resources(PbsScheduler().render(request))
    assert CHUNK.fullmatch(asked["select"])
    assert asked == {
        "select": "3:ncpus=64:mpiprocs=4:ompthreads=16:ngpus=4:mem=245761mb:model=icelake",
        "place": "scatter",
        "walltime": "36:00:00",
    }


def test_one_node_is_placed_as_the_site_likes(make_request: MakeRequest) -> None:
    assert "place" not in resources(PbsScheduler().render(make_request()))
    packed = make_request(nodes=2, pbs={"options": {"l": "place=pack:excl"}})
    assert resources(PbsScheduler().render(packed))["place"] == "pack:excl"


def test_the_options_of_a_site(make_request: MakeRequest) -> None:
    own = {"P": "p'q", "m": "ae", "M": "a@b.org", "p": "5", "h": True}
    pbs = {"queue": "gpu", "account": "a b", "options": own}
    tag = "20261120-152233-demo 7f3a9c"
    request = make_request(pbs=pbs, tag=tag, after=("4.vm", "5.vm"))
    found = directives(PbsScheduler().render(request))
    options = {option: "".join(value) for option, *value in found}
    del options["-l"]
    assert options == {
        "-q": "gpu",
        "-A": "a b",
        "-P": "p'q",
        "-m": "ae",
        "-M": "a@b.org",
        "-p": "5",
        "-h": "",
        "-j": "oe",
        "-k": "doe",
        "-r": "n",
        "-S": "/bin/bash",
        "-N": "demo.7f3a9c",
        "-W": "depend=afterok:4.vm:5.vm",
        "-o": f"{request.run_directory}/logs/pbs.log",
    }


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("l", "select=2", "resources"),
        ("l", ("software=x", "walltime=1:00"), "resources.walltime"),
        ("l", "Walltime=1:00", "resources.walltime"),
        ("l", "x=y;touch", "resource list"),
        ("f", True, "remove it"),
        ("J", "0-3", "sweep"),
        ("V", True, "environment.variables"),
        ("W", "group_list=x,Block=true", "submit --wait"),
        ("q", "x", "pbs.queue"),
        ("r", "y", "max_requeues"),
        ("N", "x", "name"),
        ("h", "-J0-3", "takes no value; write h: true"),
        ("h", "z", "write h: true"),
        ("X", "I", "write X: true"),
        ("p", True, "needs a value"),
        ("l", True, "needs a value"),
        ("J", True, "sweep"),
    ],
)
def test_options_that_are_not_the_users_name_what_is(name: str, value: Value, cure: str) -> None:
    assert cure in fault_of_option(QSUB, name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("l", ("place=pack", "software=matlab")),
        ("W", "group_list=x"),
        ("W", "depend=on:1"),
        ("p", "5"),
        ("h", True),
        ("X", True),
    ],
)
def test_options_that_are_the_users(name: str, value: Value) -> None:
    assert fault_of_option(QSUB, name, value) == ""


@pytest.mark.parametrize(
    ("directive", "cure"),
    [
        ("-hl select=2", "resources"),
        ("-fl Walltime=1:00", "remove it"),
        ("-l software=x -lselect=2", "resources"),
        ("-p 5 -J 0-3", "sweep"),
        ("-hV", "environment.variables"),
        ("-W Block=true", "submit --wait"),
        ("walltime=3", "command line"),
    ],
)
def test_directives_of_a_template_that_order_does_not_settle_are_refused(
    make_request: MakeRequest, directive: str, cure: str
) -> None:
    template = Template("site.sh", DIRECTIVES.format(directive))
    with pytest.raises(InvalidInputError, match=r"site\.sh:2") as caught:
        PbsScheduler().render(make_request(template=template))
    assert cure in (caught.value.cure or "")


def test_directives_of_a_template_come_first_so_that_those_of_pipectl_win(
    make_request: MakeRequest,
) -> None:
    template = Template("site.sh", DIRECTIVES.format("-N mine -q x\n#PBS -r y"))
    request = make_request(pbs={"queue": "y"}, template=template)
    script = PbsScheduler().render(request)
    assert script.index("#PBS -N mine") < script.index("#PBS -N demo") < script.index("#PBS -q y")
    assert script.index("#PBS -r y") < script.index("#PBS -r n"), "qsub takes the last of two"


@pytest.mark.parametrize("place", ["place", "Place"])
def test_a_resource_that_is_not_ours_may_be_asked_for(
    make_request: MakeRequest, place: str
) -> None:
    own = {"l": ("software=matlab", f"{place}=pack")}
    script = PbsScheduler().render(make_request(nodes=2, pbs={"options": own}))
    assert f"#PBS -l {place}=pack" in script
    assert "place=scatter" not in script
    assert resources(script)["software"] == "matlab"


@pytest.mark.parametrize("value", ["depend=on:1", ("group_list=x", "a=b,Depend=on:1")])
def test_a_dependency_of_the_users_goes_with_none_of_ours(
    make_request: MakeRequest, value: Value
) -> None:
    request = make_request(pbs={"options": {"W": value}})
    assert "=on:1" in PbsScheduler().render(request)
    with pytest.raises(InvalidInputError, match=r"pbs\.options\.W: .* --after"):
        PbsScheduler().render(change(request, after=("4.vm",)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run_directory": Path("/scratch/a:b")}, r"output\.directory"),  # would name a host
        ({"launcher": "srun"}, "srun needs Slurm"),
        ({"array": Array((Path("/runs/a"),))}, "single job"),
    ],
)
def test_what_pbs_cannot_run_is_refused(
    make_request: MakeRequest, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(PipectlError, match=words):
        PbsScheduler().render(make_request(**changes))


def script_of(request: JobRequest, rank: str) -> Path:
    """The script with bash as the launcher of a rank that is written in bash."""
    mpiexec = request.run_directory / "mpiexec"
    (request.run_directory / "logs").mkdir(parents=True, exist_ok=True)
    mpiexec.write_text('#!/bin/bash\nshift 2\nexec "$@"\n')
    mpiexec.chmod(0o755)
    request = change(request, mpiexec=str(mpiexec), command=("bash", "-c", rank))
    script = request.run_directory / "job.sh"
    script.write_text(PbsScheduler().render(request))
    return script


WAITS = "until [[ -e stop ]]; do sleep 0.05; done; : >stopped"


def test_it_stops_before_the_walltime_and_submits_itself_again(
    pbs: FakeCommands, make_request: MakeRequest
) -> None:
    pbs.answer("qsub", "12.vm\n")
    request = make_request(walltime=11, checkpoint=Checkpoint(lead_time=10, max_requeues=1))
    script = script_of(request, WAITS)
    for attempt in (1, 2):
        done = subprocess.run(["bash", str(script)], timeout=30, check=False)
        assert done.returncode == 75
        assert len(pbs.calls("qsub")) == 1, attempt
    assert pbs.calls("qsub") == [["-C", "#PBS", str(script)]]
    assert (request.run_directory / "resubmitted").read_text() == "12.vm\n"


def test_a_site_that_lets_jobs_submit_none(pbs: FakeCommands, make_request: MakeRequest) -> None:
    pbs.answer("qsub", stderr="qsub: Bad UID for job execution\n", rc=15)
    request = make_request(walltime=11, checkpoint=Checkpoint(lead_time=10, max_requeues=1))
    done = subprocess.run(["bash", str(script_of(request, WAITS))], timeout=30, check=False)
    assert done.returncode == 75
    log = (request.run_directory / "logs" / "job.log").read_text()
    assert "qsub: Bad UID for job execution\npipectl: this job may not submit another" in log
    said = (request.run_directory / "requeue_error").read_text()
    assert said == "qsub: Bad UID for job execution\n"
    assert not (request.run_directory / "resubmitted").exists()


def test_a_job_that_is_deleted_does_not_come_back(
    pbs: FakeCommands, make_request: MakeRequest
) -> None:
    request = make_request(walltime=600, checkpoint=Checkpoint(lead_time=10, max_requeues=1))
    rank = "trap '' TERM; : >begun; until [[ -s stop ]]; do sleep 0.05; done; : >stopped"
    job = subprocess.Popen(["bash", str(script_of(request, rank))])
    while not (request.run_directory / "begun").exists():
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 75
    assert pbs.calls("qsub") == []


def test_other_nodes_are_reached_by_the_task_manager(
    pbs: FakeCommands, make_request: MakeRequest
) -> None:
    pbs.answer("pbs_tmrsh")
    rank = '"$HYDRA_LAUNCHER_EXEC" -x -q n2 "echo \'a  b\'" c; echo "$HYDRA_LAUNCHER"'
    request = make_request(nodes=2)
    subprocess.run(["bash", str(script_of(request, rank))], timeout=30, check=True)
    assert (request.run_directory / "logs" / "job.log").read_text() == "ssh\n"
    assert pbs.calls("pbs_tmrsh") == [["n2", "/bin/bash", "-c", "echo 'a  b' c"]]


@pytest.mark.parametrize(
    ("name", "kept"),
    [("HYDRA_LAUNCHER", "PRTE_MCA_plm_ssh_agent="), ("PRTE_MCA_plm", "HYDRA_LAUNCHER_EXEC=")],
)
def test_a_job_with_a_launcher_of_its_own_in_its_variables_gets_no_other(
    make_request: MakeRequest, name: str, kept: str
) -> None:
    script = PbsScheduler().render(make_request(nodes=2, variables={name: "ssh"}))
    assert f"export {name}" not in script
    assert kept in script


def test_submit_returns_the_id_and_makes_the_log_folder(
    pbs: FakeCommands, make_request: MakeRequest
) -> None:
    pbs.replay("qsub", "qsub.txt")
    request = make_request()
    assert PbsScheduler().submit(SCRIPT, request) == "4.vm"
    assert pbs.calls("qsub") == [["-C", "#PBS", "/runs/job.sh"]]
    assert (request.run_directory / "logs").is_dir()


def test_variables_that_overrule_the_script_are_removed(
    pbs: FakeCommands, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
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
        ("qsub-badres.txt", "Unknown resource: foo", "pbs.select"),
        ("qsub-badwalltime.txt", "Resource_List.walltime", "resources.walltime"),
        ("qsub-badopt.txt", "invalid option", "pbs.options"),
        ("qsub-group.txt", "Bad GID", "job spec"),
    ],
)
def test_refusals_name_a_cure(
    pbs: FakeCommands, make_request: MakeRequest, sample: str, message: str, cure: str
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
    pbs: FakeCommands, make_request: MakeRequest
) -> None:
    pbs.hang("qsub")
    pbs.replay("qselect", "qselect.txt")
    names = ROW.format("9.vm", "demo.abc1") + ROW.format("10.vm", "demo.abc1")
    pbs.answer("qstat", names + ROW.format("11.vm", "demo.other"))
    scheduler = PbsScheduler(timeout_s=1.0)
    assert scheduler.submit(SCRIPT, make_request(tag="20261120-152233-demo abc1")) == "10.vm"
    assert pbs.calls("qselect")[0][:2] == ["-x", "-u"]
    assert pbs.calls("qstat") == [["-x", "-f", "4.vm", "8.vm", "10.vm", "12.vm"]]


def test_a_lost_job_is_not_submitted_twice(pbs: FakeCommands, make_request: MakeRequest) -> None:
    pbs.answer("qsub", stderr="qsub: Communication failure.", rc=1)
    with pytest.raises(NoAnswerError, match=r"ends in '\.tag-1' is listed: qsub: Comm"):
        PbsScheduler().submit(SCRIPT, make_request())
    assert len(pbs.calls("qsub")) == 1


def test_query_asks_once_for_all(pbs: FakeCommands) -> None:
    pbs.answer("qstat", ROW.format("9.vm", "a") + ROW.format("10.vm", "b"), rc=153)
    found = PbsScheduler().query(["9.vm", "10.vm", "99999.vm"])
    assert {job_id: status.state for job_id, status in found.items()} == {
        "9.vm": JobState.RUNNING,
        "10.vm": JobState.RUNNING,
    }
    assert PbsScheduler().query([]) == {}
    assert pbs.calls("qstat") == [["-x", "-f", "9.vm", "10.vm", "99999.vm"]]


@pytest.mark.parametrize("sample", ["qstat-unknown.txt", "qstat-finished-nox.txt"])
def test_a_job_that_the_server_has_forgotten_is_absent(pbs: FakeCommands, sample: str) -> None:
    pbs.replay("qstat", sample)
    assert PbsScheduler().query(["99999.vm"]) == {}


def test_a_server_that_is_down_is_an_error(pbs: FakeCommands) -> None:
    pbs.answer("qstat", stderr="qstat: cannot connect to server vm (errno=15010)", rc=162)
    with pytest.raises(SchedulerError, match="cannot connect"):
        PbsScheduler().query(["9.vm"])


def test_cancel_of_what_is_gone_is_no_error(pbs: FakeCommands) -> None:
    pbs.replay("qdel", "qdel-unknown.txt")
    PbsScheduler().cancel("99999.vm")
    assert pbs.calls("qdel") == [["99999.vm"]]
    pbs.answer("qdel", stderr="qdel: Unauthorized Request 9.vm", rc=159)
    with pytest.raises(SchedulerError, match="Unauthorized"):
        PbsScheduler().cancel("9.vm")


def test_jobs_of_an_array(pbs: FakeCommands) -> None:
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


def listed(**fields: object) -> str:
    lines = (f"    {name} = {value}" for name, value in fields.items())
    return "\n".join(("Job Id: 7.vm", *lines, ""))


def test_a_job_that_waits() -> None:
    text = (SAMPLES / "qstat-f.txt").read_text()
    (status,) = parse_qstat(text).values()
    assert list(parse_qstat(text)) == ["44.vm"]
    assert (status.state, status.reason) == (JobState.QUEUED, "Not enough free nodes available")
    assert (status.start, status.end, status.exit_code, status.nodes) == (None, None, None, "")
    assert parse_blocks(text)["44.vm"]["Job_Name"] == "mpi_run"


def test_a_job_that_runs_on_two_nodes() -> None:
    text = listed(
        job_state="R",
        exec_host="pbsn1/0*2+pbsn2/0*2",
        stime="Fri Nov 20 16:34:21 2026",
        comment="Job run at Fri Nov 20 at 16:34 on (pbsn1:ncpus=2)+(pbsn2:ncpus=2)",
    )
    status = parse_qstat(text)["7.vm"]
    assert (status.state, status.nodes, status.reason) == (JobState.RUNNING, "pbsn1,pbsn2", "")
    assert status.start == datetime(2026, 11, 20, 16, 34, 21).timestamp()


@pytest.mark.parametrize(
    ("fields", "state", "code", "reason"),
    [
        ({"substate": 92, "Exit_status": 0}, "COMPLETED", 0, ""),
        ({"substate": 93, "Exit_status": 3}, "FAILED", 3, "exit code 3"),
        ({"substate": 93, "Exit_status": 75}, "FAILED", 75, "exit code 75"),
        ({"substate": 93, "Exit_status": 265}, "FAILED", 137, "ended by signal 9"),
        ({"substate": 91, "Exit_status": 271}, "CANCELLED", 143, ""),
        ({"substate": 91}, "CANCELLED", None, ""),
        ({"substate": 92}, "CANCELLED", None, "never ran"),
        ({"substate": 93, "Exit_status": -29}, "TIMEOUT", None, "over its walltime"),
        ({"substate": 93, "Exit_status": -27}, "OUT_OF_MEMORY", None, "over its memory"),
        ({"substate": 93, "Exit_status": -20}, "NODE_FAIL", None, "its first node was lost"),
        ({"substate": 93, "Exit_status": -3}, "FAILED", None, "(status -3)"),
        ({"substate": 94}, "UNKNOWN", None, "another server"),
        ({}, "FAILED", None, "left no exit code"),
    ],
)
def test_ends(fields: dict[str, int], state: str, code: int | None, reason: str) -> None:
    text = listed(job_state="F", mtime="Fri Nov 20 16:34:21 2026", **fields)
    status = parse_qstat(text)["7.vm"]
    assert (status.state.value, status.exit_code) == (state, code)
    assert reason in status.reason
    assert (status.end is not None) == status.state.final


@pytest.mark.parametrize(
    ("letter", "state"),
    [
        ("Q", "QUEUED"), ("W", "QUEUED"), ("T", "QUEUED"), ("H", "HELD"), ("R", "RUNNING"),
        ("B", "RUNNING"), ("S", "SUSPENDED"), ("U", "SUSPENDED"), ("E", "COMPLETING"),
        ("M", "UNKNOWN"), ("?", "UNKNOWN"), ("", "UNKNOWN"),
    ],
)  # fmt: skip
def test_letters(letter: str, state: str) -> None:
    assert parse_qstat(listed(job_state=letter))["7.vm"].state.value == state


def test_a_held_job_says_for_what() -> None:
    held = parse_qstat(listed(job_state="H", depend="afterok:4.vm@vm"))["7.vm"]
    assert held.reason == "waits for afterok:4.vm@vm"


def test_the_environment_of_a_job_says_nothing_of_its_state() -> None:
    text = listed(job_state="R", Variable_List="A=1,") + "\tB=\n    job_state = F\n"
    assert parse_qstat(text)["7.vm"].state is JobState.RUNNING


def test_several_jobs_and_long_lines() -> None:
    text = (
        listed(job_state="R", exec_host="n1/0+") + "\tn2/0\n\nJob Id: 8[3].vm\n    job_state = Q\n"
    )
    found = parse_qstat(text)
    assert found["7.vm"].nodes == "n1,n2"
    assert found["8[3].vm"].state is JobState.QUEUED


@pytest.mark.parametrize("text", ["", "\n", "qstat: Unknown Job Id 99999.vm", "    job_state = F"])
def test_nothing_is_found_in_other_text(text: str) -> None:
    assert parse_qstat(text) == {}


@pytest.mark.parametrize(
    ("text", "job_id"),
    [
        ("4.vm\n", "4.vm"),
        ("Welcome to the cluster\n12345.pbs-1.site.org\n", "12345.pbs-1.site.org"),
        ("5[].vm", "5[].vm"),
        ("77", "77"),
        ("no id here", None),
        ("", None),
    ],
)
def test_the_id_in_the_answer(
    pbs: FakeCommands, make_request: MakeRequest, text: str, job_id: str | None
) -> None:
    pbs.answer("qsub", text)
    if job_id is None:
        with pytest.raises(NoAnswerError, match="gave no job id"):
            PbsScheduler().submit(SCRIPT, make_request())
    else:
        assert PbsScheduler().submit(SCRIPT, make_request()) == job_id


def test_queues(pbs: FakeCommands) -> None:
    for command, name in (("qstat", "qstat-Q-f.txt"), ("pbsnodes", "pbsnodes-a.txt")):
        pbs.replay(command, name)
    assert [queue.name for queue in PbsScheduler().queues()] == ["workq", "small", "closed"]
    names = ("qstat-Q-f.txt", "qstat-B-f.txt", "pbsnodes-a.txt")
    texts = ("\n".join((SAMPLES / name).read_text().splitlines()[1:-1]) for name in names)
    node = {"cores": 4, "memory_bytes": 4026532 * 1024, "gpus": 1}
    assert parse_queues(*texts) == (
        Queue("workq", True, True, 86400, nodes=2, **node),  # type: ignore[arg-type]
        Queue("small", False, True, 300, nodes=1, **node),  # type: ignore[arg-type]
        Queue("closed", False, False, None, nodes=2, **node),  # type: ignore[arg-type]
    )
    assert parse_queues("garbage", "a|b", "|||||") == ()
