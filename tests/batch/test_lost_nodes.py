"""Job scripts of Slurm whose ranks fail as a node is lost, with pretended commands of Slurm."""

import os

import pytest

from pipectl.runs import RunDirectory, read_errors
from pipectl.spec.launch import Resources
from pipectl.spec.models import Checkpoint
from tests.batch.job_requests import change, end, start, wait_until
from tests.batch.test_script import never_sleep

SRUN = """\
#!/bin/bash
for word; do [[ $word == --nodelist=* ]] && nodes=${word#*=}; done
echo "srun $nodes" >>calls
[[ ! -p answer ]] || read -r <answer
for node in ${nodes//,/ }; do
    [[ -e lost-$node ]] && exit 1
    [[ ! -e late-$node ]] || { [[ $nodes == *,* ]] || rm "late-$node"; exit 1; }
done
exit 0
"""
SCONTROL = """\
#!/bin/bash
[[ $1 != show ]] || { printf '%s\\n' ${3//,/ }; exit; }
echo "$*" >>calls
"""
SQUEUE = "#!/bin/bash\nprintf '%s\\n' 7.batch 7.0 7.extern\n"
SCANCEL = '#!/bin/bash\necho "scancel $*" >>calls\n'
FAILS = (
    "rm $PIPECTL_START/starting; : >$PIPECTL_START/errors/rank-0001.json; "
    "[[ $PIPECTL_START == */1 ]] || exit 0; "
)
LOSES = f"{FAILS}: >lost-n2; exit 9"
ENDS_STEPS = "scancel --signal=KILL 7.0"


@pytest.fixture
def job(make_request, tmp_path, monkeypatch):
    """``job(nodes, rank, **fields)``: the exit code, the output, and what Slurm was asked."""
    commands = {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE, "scancel": SCANCEL}
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    never_sleep(folder)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")

    def begin(nodes, rank, *, lost=(), names="n1,n2,n3", waits=True, **fields):
        monkeypatch.setenv("SLURM_JOB_NODELIST", names)
        fields = {"checkpoint": Checkpoint(max_requeues=2), "tasks_per_node": 1, **fields}
        request = change(make_request(), nodes=Resources(nodes=nodes).nodes, **fields)
        request.run_directory.mkdir(exist_ok=True)
        for node in lost:
            (request.run_directory / f"lost-{node}").touch()
        process = start(request, "bash", "-c", rank, scheduler="slurm")
        if not waits:
            return process, request
        code, output = end(process, request)
        calls = request.run_directory / "calls"
        assert not read_errors(RunDirectory(request.run_directory).start) or code != 75
        return code, output, calls.read_text().splitlines() if calls.exists() else []

    return begin


@pytest.mark.parametrize(("nodes", "options"), [(3, {}), ("2-3", {}), ("3-4", {"no-kill": True})])
def test_a_job_that_has_lost_a_node_is_requeued(job, nodes, options):
    """Also one that Slurm would leave the others, if these are too few."""
    code, output, calls = job(nodes, LOSES, slurm={"options": options})
    assert code == 75
    assert output.endswith("pipectl: n2 no longer answers: the job is requeued\n")
    assert calls[:2] == [ENDS_STEPS, "srun n1,n2,n3"]
    assert sorted(calls[2:]) == ["requeue 7", "srun n1", "srun n2", "srun n3"]
    assert calls[-1] == "requeue 7"


def test_a_signal_to_ranks_alone_is_that_of_srun_as_it_loses_a_node(job):
    assert job(3, f"printf TERM >$PIPECTL_START/stop; {LOSES}")[0] == 75


def test_a_job_whose_nodes_all_answer_fails(job):
    assert job(3, f"{FAILS}exit 9") == (9, "", [ENDS_STEPS, "srun n1,n2,n3"])


@pytest.mark.parametrize(
    ("rank", "fields"),
    [
        (f"kill -s INT $PPID; until [[ -s $PIPECTL_START/stop ]]; do :; done; {LOSES}", {}),
        (LOSES, {"checkpoint": Checkpoint(max_requeues=0)}),
        (LOSES, {"checkpoint": None}),
        (LOSES, {"nodes": 1}),
        (LOSES, {"single_process": True}),
    ],
)
def test_others_fail_at_once(job, rank, fields):
    """Those that are to end, that do not start again, or that have one node."""
    nodes = fields.pop("nodes", 3)
    assert job(nodes, rank, **fields) == (9, "", [])


def test_where_no_step_can_be_started_nothing_is_known_of_nodes(job):
    code, _, calls = job(3, f"{FAILS}touch lost-n1 lost-n2 lost-n3; exit 9")
    assert code == 9
    assert "requeue 7" not in calls


def test_nodes_are_asked_again_if_that_of_the_script_does_not_answer(job):
    code, _, calls = job(3, f"{FAILS}: >lost-n2; : >late-n1; exit 9")
    assert code == 75
    assert calls.count("srun n1") == 2
    assert "requeue 7" in calls


def test_a_range_goes_on_with_the_nodes_that_are_left_in_the_same_allocation(job):
    keeps = {"slurm": {"options": {"no-kill": True}}, "inherit": "all"}  # no profile changes PATH
    shows = 'echo "${PIPECTL_START##*/}: $SLURM_JOB_NODELIST $SLURM_NTASKS"; '
    code, output, calls = job("2-3", shows + LOSES, **keeps)
    assert code == 0
    assert output.splitlines() == [
        "1: n1,n2,n3 3",
        "pipectl: n2 no longer answers: the job goes on with n1 n3",
        "2: n1,n3 2",
    ]
    assert "requeue 7" not in calls


def test_a_signal_ends_a_start_that_waits_for_the_answers_of_its_nodes(job, make_request):
    request = make_request()
    run = RunDirectory(request.run_directory)
    run.start.path.mkdir(parents=True)
    run.start.begun.touch()
    os.mkfifo(run.path / "answer")
    process, request = job("2-3", "exit 0", waits=False)
    calls = run.path / "calls"
    wait_until(lambda: calls.exists() and calls.read_text())
    process.terminate()
    assert end(process, request)[0] == 143
    with (run.path / "answer").open("w") as answer:
        answer.write("yes\n")


def test_a_start_of_a_range_waits_for_nodes_if_too_few_answer(job, make_request):
    run = RunDirectory(make_request().run_directory)
    run.start.path.mkdir(parents=True)
    run.start.begun.touch()
    code, output, calls = job("3-4", "exit 0", lost=("n3",))
    assert code == 75
    assert "of n1 n2 n3, only n1 n2 answer, and resources.nodes is 3-4" in output
    assert calls[-1] == "requeue 7"
