"""What Slurm and PBS have in common, with their commands pretended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from grammar import directives
from job_requests import change

from pipectl.batch import JobState, Scheduler, Template, get_scheduler, process
from pipectl.batch.pbs import PbsScheduler
from pipectl.batch.process import NoAnswerError
from pipectl.batch.slurm import SlurmScheduler
from pipectl.directives import QSUB, SBATCH, Value, fault_of_option
from pipectl.errors import InvalidInputError, SchedulerError

if TYPE_CHECKING:
    from tests.batch.conftest import FakeCommands

SCRIPT = Path("/runs/job.sh")
SYNTAX = {"slurm": SBATCH, "pbs": QSUB}


class System(NamedTuple):
    """A batch system, and the command that hands a script to it."""

    name: str
    scheduler: Scheduler
    submit: str
    fake: FakeCommands


@pytest.fixture(params=["slurm", "pbs"])
def system(request, slurm, pbs):
    if request.param == "slurm":
        return System("slurm", SlurmScheduler(), "sbatch", slurm)
    return System("pbs", PbsScheduler(), "qsub", pbs)


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


def test_submit_returns_the_id_in_the_answer(system, make_request):
    request = make_request()
    for text, job_id in IDS[system.name].items():
        system.fake.answer(system.submit, text)
        if job_id is not None:
            assert system.scheduler.submit(SCRIPT, request) == job_id
            continue
        with pytest.raises(NoAnswerError, match="gave no job id"):
            system.scheduler.submit(SCRIPT, request)
    options = ["--parsable"] if system.name == "slurm" else ["-C", "#PBS"]
    assert system.fake.calls(system.submit)[0] == [*options, "/runs/job.sh"]


def test_variables_that_overrule_the_script_are_removed(system, make_request, monkeypatch):
    removed = {
        "slurm": {"SBATCH_PARTITION", "SLURM_JOB_ID", "SLURM_NTASKS", "SQUEUE_PARTITION"},
        "pbs": {"PBS_DPREFIX", "PBS_JOBID"},
    }[system.name]
    kept = {"SLURM_CONF", "SLURM_CLUSTERS", "PBS_SERVER", "MY_SETTING"}
    for name in removed | kept:
        monkeypatch.setenv(name, "x")
    system.fake.answer(system.submit, "5\n")
    system.scheduler.submit(SCRIPT, make_request())
    environment = system.fake.environment(system.submit).keys()
    assert not removed & environment
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
    ],
    "pbs": [
        ("qsub-badqueue.txt", "Unknown queue", "pbs.queue"),
        ("qsub-badres.txt", "Unknown resource: foo", "pbs.select"),
        ("qsub-badwalltime.txt", "Resource_List.walltime", "resources.walltime"),
        ("qsub-badopt.txt", "invalid option", "pbs.options"),
        ("qsub-group.txt", "Bad GID", "job spec"),
    ],
}


def test_refusals_name_a_cure(system, make_request):
    for answer, message, cure in REFUSALS[system.name]:
        if answer.endswith(".txt"):
            system.fake.replay(system.submit, answer)
        else:
            system.fake.answer(system.submit, stderr=answer, rc=1)
        with pytest.raises(SchedulerError, match=message) as caught:
            system.scheduler.submit(SCRIPT, make_request())
        assert cure in (caught.value.cure or "")
    assert system.fake.calls("squeue") == system.fake.calls("qselect") == [], "no search for a job"


def test_an_unreachable_server_is_no_refusal(system, make_request):
    answers = {
        "slurm": "sbatch: fatal: Could not establish a configuration source",
        "pbs": "qsub: cannot connect to server pbs (errno=15010)",
    }
    system.fake.answer(system.submit, stderr=answers[system.name], rc=1)
    with pytest.raises(
        SchedulerError, match=f"^{system.scheduler.title} does not answer:\n"
    ) as caught:
        system.scheduler.submit(SCRIPT, make_request())
    assert "cannot be reached" in (caught.value.cure or "")


def test_missing_commands_are_named(system, make_request, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match=system.submit) as caught:
        system.scheduler.submit(SCRIPT, make_request())
    assert "launch.scheduler: local" in (caught.value.cure or "")


@pytest.mark.parametrize("hangs", [True, False])
def test_a_lost_answer_is_looked_up_by_tag(system, make_request, hangs):
    """And a job that is not found is not submitted twice."""

    system.scheduler.timeout_s = 0.6

    def submit(**changes):
        return system.scheduler.submit(SCRIPT, make_request(**changes))

    unsure = {"slurm": "error: Unable to contact slurm", "pbs": "error: Communication failure."}
    if hangs:
        system.fake.hang(system.submit)
    else:
        system.fake.answer(system.submit, stderr=unsure[system.name], rc=1)
    with pytest.raises(NoAnswerError, match=r"tag-1' is listed: .*(error|no answer)"):
        submit()
    lists = "squeue" if system.name == "slurm" else "qselect"
    system.fake.answer(lists, stderr=f"{lists} is down", rc=1)
    with pytest.raises(NoAnswerError, match=rf"(error|no answer).*{lists} is down"):
        submit()
    assert len(system.fake.calls(system.submit)) == 2
    if system.name == "slurm":
        system.fake.replay("squeue", "squeue-format.txt")
        assert submit(tag="tag-run") == "36"
    else:
        row = "Job Id: {}\n    Job_Name = {}\n    job_state = R\n"
        jobs = {"9.vm": "demo.abc1", "10.vm": "demo.abc1", "11.vm": "demo.other"}
        system.fake.replay("qselect", "qselect.txt")
        system.fake.answer("qstat", "".join(row.format(*job) for job in jobs.items()))
        assert submit(tag="20261120-152233-demo abc1") == "10.vm"


def test_undecodable_output_is_shown_as_it_can_be():
    assert process.run(["bash", "-c", "printf 'a\\377b'"], cure="-").stdout == "a\ufffdb"


def test_cancel_of_what_is_gone_is_no_error(system):
    command = "scancel" if system.name == "slurm" else "qdel"
    system.fake.replay(command, f"{command}-unknown.txt")
    system.scheduler.cancel("99999")
    assert system.fake.calls(command) == [["99999"]]
    system.fake.answer(command, stderr="Access/permission denied", rc=159)
    with pytest.raises(SchedulerError, match="permission denied"):
        system.scheduler.cancel("1")


def test_a_system_that_does_not_answer_is_an_error_not_an_absence(system):
    command = "squeue" if system.name == "slurm" else "qstat"
    system.fake.answer(command, stderr="cannot connect to server vm (errno=15010)", rc=162)
    with pytest.raises(SchedulerError, match="cannot connect"):
        system.scheduler.query(["9"])
    system.fake.hang(command)
    system.scheduler.timeout_s = 0.6
    with pytest.raises(NoAnswerError, match="no answer within 1 s"):
        system.scheduler.query(["9"])
    assert system.scheduler.query([]) == {}


REFUSED: dict[str, list[tuple[str, Value, str]]] = {
    "slurm": [
        ("array", "1-4", "sweep"), ("a", "1-4", "sweep"), ("err", "x", "job.log"),
        ("exp", "NONE", "environment.variables"), ("n", "4", "resources.tasks_per_node"),
        ("clusters", "east", "SLURM_CLUSTERS"), ("M", "east,west", "SLURM_CLUSTERS"),
        ("test-only", True, "submit --test-only"), ("W", True, "submit --wait"),
        ("wra", "id", "remove it"), ("part", "x", "slurm.partition"), ("A", "x", "slurm.account"),
        ("N", ("4",), "resources.nodes"), ("time", "10", "resources.walltime"),
        ("cpus-per-task", "4", "resources.cpus_per_task"), ("no-requeue", True, "max_requeues"),
        ("tasks-per-node", "4", "resources.tasks_per_node"), ("-qos", "x", "write qos"),
        ("H", "a1-3", "takes no value; write H: true"), ("H", "Mother", "write H: true"),
        ("s", ("N4",), "write s: true"), ("W", "x", "submit --wait"),
        ("gpus-per-nod", "a100:4", "write gpus-per-node"), ("mem-per-c", "1G", "mem-per-cpu"),
        ("gpus-per-n", "a100:4", "write gpus-per-node"), ("help", True, "remove it"),
        ("h", True, "remove it"), ("usage", True, "remove it"), ("V", True, "remove it"),
        ("t", False, "write time: false"), ("c", False, "write cpus-per-task: false"),
    ],
    "pbs": [
        ("l", "select=2", "resources"), ("l", "Walltime=1:00", "resources.walltime"),
        ("l", ("software=x", "walltime=1:00"), "resources.walltime"), ("l", True, "needs a value"),
        ("l", "x=y;touch", "resource list"), ("f", True, "remove it"), ("J", "0-3", "sweep"),
        ("V", True, "environment.variables"), ("W", "group_list=x,Block=true", "submit --wait"),
        ("q", "x", "pbs.queue"), ("r", "y", "max_requeues"), ("N", "x", "name"),
        ("h", "-J0-3", "takes no value; write h: true"), ("h", "z", "write h: true"),
        ("X", "I", "write X: true"), ("p", True, "needs a value"), ("J", True, "sweep"),
    ],
}  # fmt: skip
ALLOWED: dict[str, list[tuple[str, Value]]] = {
    "slurm": [
        ("begin", "now"), ("gpus", "4"), ("S", "1"), ("nice", "5"), ("mem", "0"), ("s", True),
        ("time-min", "10"), ("ntasks-per-core", "1"), ("wait-all-nodes", "1"), ("time", False),
        ("nodelist", "n1"), ("export-file", "x"), ("mem", False), ("mem-per-cpu", "1G"),
        ("gpus-per-node", "a100:4"), ("gpus-per-task", "1"), ("H", True),
        ("dependency", "singleton"), ("verbose", True), ("G", "4"),
    ],
    "pbs": [
        ("l", ("place=pack", "software=matlab")), ("W", "group_list=x"), ("W", "depend=on:1"),
        ("p", "5"), ("h", True), ("X", True),
    ],
}  # fmt: skip


@pytest.mark.parametrize("scheduler", SYNTAX)
def test_options_of_the_user(scheduler):
    """Those that are not name what is."""
    for name, value, cure in REFUSED[scheduler]:
        assert cure in fault_of_option(SYNTAX[scheduler], name, value), (name, value)
    for name, value in ALLOWED[scheduler]:
        assert fault_of_option(SYNTAX[scheduler], name, value) == "", (name, value)


DIRECTIVES = "{{% extends base %}}{{% block directives %}}\n{}\n{{% endblock %}}"


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [
        ("slurm", "--begin=now"),
        ("slurm", "--switches=1@10 --nice=5"),
        ("slurm", "--bb='x --array=5'"),
        ("slurm", "-sH"),
        ("slurm", "-HN4"),
        ("slurm", "--partition=x"),
        ("pbs", "-N mine -q x"),
        ("pbs", "-r y"),
    ],
)
def test_directives_of_a_template_come_first_so_that_those_of_pipectl_win(
    make_request, scheduler, line
):
    """sbatch and qsub take the last of two options."""
    plain = make_request(slurm={"partition": "y"}, pbs={"queue": "y"})
    mark = "#SBATCH" if scheduler == "slurm" else "#PBS"
    template = Template("t", DIRECTIVES.format(f"{mark} {line}"))
    own = get_scheduler(scheduler).render(change(plain, template=template)).splitlines()
    ours = get_scheduler(scheduler).render(plain).splitlines()
    assert own[: own.index("")] == [ours[0], f"{mark} {line}", *ours[1 : ours.index("")]]


@pytest.mark.parametrize(
    ("scheduler", "line", "cure"),
    [
        ("slurm", "--nice=5 -e x", "job.log"),
        ("slurm", "-sn4", "resources.tasks_per_node"),
        ("slurm", "--switches=1 -n 5 # tasks", "resources.tasks_per_node"),
        ("slurm", "--begin now -n2", "resources.tasks_per_node"),
        ("slurm", "--clu=east", "SLURM_CLUSTERS"),
        ("slurm", "--nice=5 -sMeast", "SLURM_CLUSTERS"),
        ("slurm", "-HW", "submit --wait"),
        ("slurm", "--nice=1 '--wr'\"ap\"=x", "remove it"),
        ("slurm", "--nice=1 '--wr\\ap=x'", "without a backslash"),
        ("slurm", "mail-type=END", "command line"),
        ("pbs", "-hl select=2", "resources"),
        ("pbs", "-fl Walltime=1:00", "remove it"),
        ("pbs", "-l software=x -lselect=2", "resources"),
        ("pbs", "-p 5 -J 0-3", "sweep"),
        ("pbs", "-hV", "environment.variables"),
        ("pbs", "-W Block=true", "submit --wait"),
        ("pbs", "walltime=3", "command line"),
    ],
)
def test_directives_of_a_template_that_order_does_not_settle_are_refused(
    make_request, scheduler, line, cure
):
    mark, other = ("#SBATCH", "pbs") if scheduler == "slurm" else ("#PBS", "slurm")
    text = DIRECTIVES.format(f"{mark} {line}")
    request = make_request(template=Template("site.sh", text))
    with pytest.raises(InvalidInputError, match=r"site\.sh:2:1: ") as caught:
        get_scheduler(scheduler).render(request)
    assert cure in (caught.value.cure or "")
    assert f"{mark} {line}" in get_scheduler(other).render(request), "it means nothing there"


@pytest.mark.parametrize(
    ("scheduler", "name", "value"),
    [
        ("slurm", "dependency", "on:1"),
        ("slurm", "dep", "on:1"),
        ("slurm", "d", "on:1"),
        ("slurm", "kill-on-invalid-dep", "on:1"),
        ("pbs", "W", "depend=on:1"),
        ("pbs", "W", ("group_list=x", "a=b,Depend=on:1")),
    ],
)
def test_a_dependency_of_the_users_goes_with_none_of_ours(make_request, scheduler, name, value):
    request = make_request(**{scheduler: {"options": {name: value}}})
    script = get_scheduler(scheduler).render(request)
    assert any("on:1" in words[-1] for words in directives(script, scheduler))
    with pytest.raises(InvalidInputError, match=rf"{scheduler}\.options\.{name}: .* --after"):
        get_scheduler(scheduler).render(change(request, after=("41",)))


@pytest.mark.parametrize(
    ("scheduler", "variable", "others"),
    [
        ("slurm", "HYDRA_LAUNCHER", None),
        ("slurm", "HYDRA_LAUNCHER_EXEC", None),
        ("slurm", "HYDRA_BOOTSTRAP", None),
        ("pbs", "HYDRA_LAUNCHER", "PRTE_MCA_plm_ssh_agent="),
        ("pbs", "PRTE_MCA_plm", "HYDRA_LAUNCHER_EXEC="),
    ],
)
def test_a_job_with_a_launcher_of_its_own_in_its_variables_gets_no_other(
    make_request, scheduler, variable, others
):
    request = make_request(nodes=2, mpi="hydra")
    assert "HYDRA_LAUNCHER_EXEC=" in get_scheduler(scheduler).render(request)
    script = get_scheduler(scheduler).render(change(request, variables={variable: "ssh"}))
    agent = variable.partition("_")[0]
    assert not any(line.strip().startswith(f"export {agent}") for line in script.splitlines())
    assert others is None or others in script


@pytest.mark.parametrize("launcher", ["auto", "srun"])
@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "local"])
def test_a_command_alone_is_started_without_mpi(make_request, launcher, scheduler):
    request = make_request(alone=True, launcher=launcher, command=("measure", "this model"))
    script = get_scheduler(scheduler).render(request)
    assert "\nrun with_variables measure 'this model'\n" in script
    assert not {"mpiexec", "srun"} & set(script.replace(os.sep, " ").split())


WAITS = {JobState.QUEUED, JobState.HELD}
RUNS = {JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING}


def test_a_job_waits_or_runs_or_is_over_or_nobody_knows():
    assert {state for state in JobState if state.waits} == WAITS
    assert {state for state in JobState if state.alive} == WAITS | RUNS
    assert {state for state in JobState if not state.final} == WAITS | RUNS | {JobState.UNKNOWN}
