"""A run from submission to its end, with PBS's commands pretended."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipectl.errors import UsageError
from pipectl.runs import Record

PBS = ("--scheduler", "pbs")


@pytest.fixture
def run(cli, job, program):
    """A run that was submitted as job 7.vm."""
    program("qsub", "echo 7.vm")
    result = cli("submit", "job.yaml", *PBS)
    assert (result.code, "submitted: tiny (pbs job 7.vm)" in result.out) == (0, True), result.err
    (path,) = Path("runs").glob("*-tiny")
    return path


def told(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "record.json").read_text())
    return found


def listing(job_id: str, state: str, more: str = "") -> str:
    return f"printf 'Job Id: {job_id}\\n    job_state = {state}\\n{more}'"


def test_auto_is_pbs_where_its_commands_are(cli, run, program):
    local = cli("submit", "job.yaml", "--dry-run").out
    assert ("#PBS" in local, "#SBATCH" in local) == (False, False)
    program("qselect", "true")
    script = cli("submit", "job.yaml", "--dry-run", "-q", "long", "-A", "me").out
    assert "#PBS -l select=2:ncpus=1:mpiprocs=1" in script
    assert "#PBS -A me\n#PBS -q long\n" in script
    program("sbatch", "exit 1")
    assert cli("submit", "job.yaml", "--dry-run").out.count("#SBATCH") > 0


def test_a_run_that_submits_itself_again(cli, run, program):
    program("qstat", listing("7.vm", "Q", "    comment = Not Running: Host set is full\\n"))
    assert "Host set is full" in cli("status", "last").out

    (run / "resubmitted").write_text("12.vm\n")
    program("qstat", '[[ $* == "-x -f 12.vm" ]] && ' + listing("12.vm", "R"))
    shown = cli("status", "last", "--json").json
    assert (shown["job_id"], shown["state"]) == ("12.vm", "RUNNING")
    assert told(run)["job_id"] == "12.vm"
    assert [event["what"] for event in told(run)["history"]][-1] == "submitted"

    program("qdel", "[[ $* == 12.vm ]]")
    assert cli("cancel", "last").code == 0
    program("qstat", listing("12.vm", "F", "    substate = 91\\n    Exit_status = 271\\n"))
    assert "CANCELLED" in cli("status", "last").out


def test_why_a_job_could_not_submit_itself_again_is_the_reason_of_its_run(cli, run, program):
    (run / "exit_code").write_text("75\n")
    (run / "requeue_error").write_text("qsub: Bad UID for job execution\n")
    program("qstat", listing("7.vm", "F", "    substate = 93\n    Exit_status = 75\n"))
    shown = cli("status", "last", "--json").json
    assert shown["state"] == "PREEMPTED"
    assert shown["reason"].endswith("started again: qsub: Bad UID for job execution")


TOLD = 'echo 12.vm >"$run/resubmitted"; '


@pytest.mark.parametrize("told_by", [TOLD, ""])
def test_the_end_of_a_run_that_just_submits_itself_again(cli, run, program, place, told_by):
    """The script ends after its qsub, whether or not it gets to tell the id."""
    (run / "stopped").touch()
    name = f"tiny.{told(run)['tag'].split()[-1]}"
    named = "    Job_Name = " + name + "\\n"
    program("qstat", f"{listing('7.vm', 'R', named)}; {listing('12.vm', 'Q', named)}")
    program("qselect", "echo 7.vm; echo 12.vm")
    end = f"run={run.absolute()}; {told_by}echo 143 >$run/exit_code"
    program("qdel", f"echo $1 >>{place}/ended; [[ $1 != 7.vm ]] || {{ {end}; }}")
    assert cli("cancel", "last").code == 0
    assert (place / "ended").read_text().split() == ["7.vm", "12.vm"]
    assert (told(run)["job_id"], told(run)["state"]) == ("12.vm", "cancelled")


@pytest.mark.parametrize(
    ("state", "said"), [(listing("12.vm", "Q"), "is QUEUED"), ("exit 1", "submitted job 12.vm")]
)
def test_a_run_that_submits_itself_while_its_state_is_asked_for_is_not_resumed(
    cli, run, program, place, state, said
):
    program("qsub", f"echo >>{place}/submitted; echo 8.vm")
    (run / "exit_code").write_text("75\n")
    (run / "record.json").write_text(json.dumps({**told(run), "submitted_at": 1.7e9}))
    ended = listing("7.vm", "F", "    substate = 93\\n    Exit_status = 75\\n")
    first = f"echo 12.vm >{run.absolute()}/resubmitted; {ended}"
    program("qstat", f"if [[ $* == *12.vm* ]]; then {state}; else {first}; fi")
    result = cli("resume", "last", "--force")
    assert (result.code != 0, said in result.err) == (True, True), result.err
    assert not (place / "submitted").exists()


def test_a_run_that_nobody_else_may_write_is_shown(cli, run, program, monkeypatch):
    (run / "resubmitted").write_text("12.vm\n")
    program("qstat", '[[ $* == "-x -f 12.vm" ]] && ' + listing("12.vm", "R"))

    def refuse(self, path):
        raise UsageError(f"{path}: cannot be written", cure="")

    monkeypatch.setattr(Record, "save", refuse)
    shown = cli("status", "last", "--json").json
    assert (shown["job_id"], shown["state"]) == ("12.vm", "RUNNING")
    assert told(run)["job_id"] == "7.vm"


def test_what_a_script_left_there_is_no_argument(cli, run, program):
    program("qstat", listing("7.vm", "R"))
    for text in ("", "-x", "$(touch PWNED)", "12.vm\n;rm", "\0", "x" * 2000):
        (run / "resubmitted").write_text(text)
        assert cli("status", "last").code == 0
        assert told(run)["job_id"] == "7.vm", text


def test_a_cancellation_that_is_refused_is_not_recorded(cli, run, program):
    program("qstat", listing("7.vm", "R"))
    program("qdel", "echo 'qdel: cannot connect to server pbs (errno=15010)' >&2; exit 162")
    result = cli("cancel", "last")
    assert (result.code, "qdel 7.vm: " in result.err) == (5, True), result.err
    assert told(run)["state"] == "submitted"
