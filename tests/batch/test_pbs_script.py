"""Directives of PBS, read back by a parser of the grammar that qsub documents."""

import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipectl.batch import JobRequest, PbsOptions, Stop
from pipectl.batch.pbs_script import render_script
from pipectl.errors import InvalidInputError, SchedulerError

if TYPE_CHECKING:
    from conftest import FakeCommands

MakeRequest = Callable[..., JobRequest]
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


def directives(script: str) -> list[tuple[str, str]]:
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
    assert "#PBS" not in script.split("\n\n", 1)[1]
    return found


def resources(script: str) -> dict[str, str]:
    found = {}
    for option, value in directives(script):
        if option == "-l":
            assert RESOURCE.fullmatch(value)
            name, _, what = value.partition("=")
            assert name not in found, "PBS takes the first of two"
            found[name] = what
    return found


def test_resources_are_counted_by_chunk(make_request: MakeRequest) -> None:
    request = make_request(
        ranks=12,
        nodes=3,
        tasks_per_node=4,
        cpus_per_task=16,
        gpus_per_node=4,
        memory_per_node_bytes=240 * 2**30 + 1,
        walltime_s=36 * 3600,
        pbs=PbsOptions(select_extra="model=icelake"),
    )
    asked = resources(render_script(request))
    assert CHUNK.fullmatch(asked["select"])
    assert asked == {
        "select": "3:ncpus=64:mpiprocs=4:ompthreads=16:ngpus=4:mem=245761mb:model=icelake",
        "place": "scatter",
        "walltime": "36:00:00",
    }


def test_mail_and_what_it_waits_for(make_request: MakeRequest) -> None:
    pbs = PbsOptions(mail="ae", mail_user="a@b.org", directives=("-W group_list=physics",))
    found = directives(render_script(make_request(pbs=pbs, after=("4.vm", "5.vm"))))
    assert {("-m", "ae"), ("-M", "a@b.org"), ("-W", "depend=afterok:4.vm:5.vm")} <= set(found)
    assert ("-W", "group_list=physics") in found


def test_one_node_is_placed_as_the_site_likes(make_request: MakeRequest) -> None:
    assert "place" not in resources(render_script(make_request()))
    packed = make_request(pbs=PbsOptions(place="pack:excl"))
    assert resources(render_script(packed))["place"] == "pack:excl"


def test_the_options_of_a_site(make_request: MakeRequest) -> None:
    request = make_request(
        pbs=PbsOptions(queue="gpu", account="a b", project="p'q", directives=("#PBS -p 5",)),
        tag="20261120-152233-demo 7f3a9c",
    )
    given = dict(directives(render_script(request)))
    assert given["-q"] == "gpu"
    assert (given["-A"], given["-P"], given["-p"]) == ("a b", "p'q", "5")
    assert given["-N"] == "demo.7f3a9c"
    assert given["-o"] == f"{request.run_directory}/logs/pbs.log"
    assert (given["-j"], given["-k"], given["-r"], given["-S"]) == ("oe", "doe", "n", "/bin/bash")


def test_nasty_values_arrive_unchanged(make_request: MakeRequest, nasty: list[str]) -> None:
    for value in nasty:
        pbs = PbsOptions(queue=value, account=value, project=value)
        given = dict(directives(render_script(make_request(pbs=pbs))))
        assert given["-q"] == given["-A"] == given["-P"] == value


@pytest.mark.parametrize("key", ["place", "select_extra"])
def test_nothing_else_comes_into_a_resource_list(
    make_request: MakeRequest, nasty: list[str], key: str
) -> None:
    for value in [*nasty, "a=b -l walltime", "x=y;touch PWNED", "x=$(id)"]:
        request = make_request(pbs=PbsOptions(**{key: value}))
        if re.fullmatch(r"[A-Za-z0-9_=:.,+*~/@-]*", value):
            assert value in render_script(request)
        else:
            with pytest.raises(InvalidInputError, match=rf"pbs\.{key}"):
                render_script(request)


@pytest.mark.parametrize(
    ("directive", "cure"),
    [
        ("-l select=2", "resources"),
        ("-lwalltime=1:00", "resources.walltime"),
        ("-l software=x,place=free", "pbs.place"),
        ("-Nother", "name"),
        ("-hNother", "name"),
        ("-hl select=2", "resources"),
        ("-fl Walltime=1:00", "resources.walltime"),
        ("-W Depend=afterok:1", "remove it"),
        ("-J 0-3", "remove"),
        ("-r y", "checkpoint.max_requeues"),
        ("#PBS -q x", "pbs.queue"),
        ("-m ae", "pbs.mail"),
        ("-W depend=afterok:1", "remove"),
        ("-p 5 -N x", "name"),
        ("-l software=x -lselect=2", "resources"),
        ("walltime=3", "command line"),
        ("-m a\n#PBS -q x", "one line"),
    ],
)
def test_directives_that_are_refused(make_request: MakeRequest, directive: str, cure: str) -> None:
    request = make_request(pbs=PbsOptions(directives=(directive,)))
    with pytest.raises(InvalidInputError, match=r"pbs\.directives") as caught:
        render_script(request)
    assert cure in (caught.value.cure or "")


def test_a_resource_that_is_not_ours_may_be_asked_for(make_request: MakeRequest) -> None:
    request = make_request(pbs=PbsOptions(directives=("-l software=matlab",)))
    assert resources(render_script(request))["software"] == "matlab"


def test_a_colon_would_name_a_host(make_request: MakeRequest) -> None:
    with pytest.raises(InvalidInputError, match=r"output\.directory"):
        render_script(make_request(run_directory=Path("/scratch/a:b")))


def test_srun_is_refused(make_request: MakeRequest) -> None:
    with pytest.raises(SchedulerError, match="srun needs Slurm"):
        render_script(make_request(launcher="srun"))


def script_of(request: JobRequest, rank: str) -> Path:
    """The script with bash as the launcher of a rank that is written in bash."""
    mpiexec = request.run_directory / "mpiexec"
    (request.run_directory / "logs").mkdir(parents=True, exist_ok=True)
    mpiexec.write_text('#!/bin/bash\nshift 2\nexec "$@"\n')
    mpiexec.chmod(0o755)
    request = replace(request, mpiexec=str(mpiexec), command=("bash", "-c", rank))
    script = request.run_directory / "job.sh"
    script.write_text(render_script(request))
    return script


WAITS = "until [[ -e stop ]]; do sleep 0.05; done; : >stopped"


def test_it_stops_before_the_walltime_and_submits_itself_again(
    pbs: "FakeCommands", make_request: MakeRequest
) -> None:
    pbs.answer("qsub", "12.vm\n")
    request = make_request(walltime_s=11, stop=Stop("USR2", 10, requeues=1))
    script = script_of(request, WAITS)
    for attempt in (1, 2):
        done = subprocess.run(["bash", str(script)], timeout=30, check=False)
        assert done.returncode == 75
        assert len(pbs.calls("qsub")) == 1, attempt
    assert pbs.calls("qsub") == [["-C", "#PBS", str(script)]]
    assert (request.run_directory / "resubmitted").read_text() == "12.vm\n"


def test_a_site_that_lets_jobs_submit_none(pbs: "FakeCommands", make_request: MakeRequest) -> None:
    pbs.answer("qsub", stderr="qsub: Bad UID for job execution\n", rc=15)
    request = make_request(walltime_s=11, stop=Stop("USR2", 10, requeues=1))
    done = subprocess.run(["bash", str(script_of(request, WAITS))], timeout=30, check=False)
    assert done.returncode == 75
    log = (request.run_directory / "logs" / "job.log").read_text()
    assert "qsub: Bad UID for job execution\npipectl: this job may not submit another" in log
    said = (request.run_directory / "requeue_error").read_text()
    assert said == "qsub: Bad UID for job execution\n"
    assert not (request.run_directory / "resubmitted").exists()


def test_a_job_that_is_deleted_does_not_come_back(
    pbs: "FakeCommands", make_request: MakeRequest
) -> None:
    request = make_request(walltime_s=600, stop=Stop("USR2", 10, requeues=1))
    rank = "trap '' TERM; : >begun; until [[ -s stop ]]; do sleep 0.05; done; : >stopped"
    job = subprocess.Popen(["bash", str(script_of(request, rank))])
    while not (request.run_directory / "begun").exists():
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 75
    assert pbs.calls("qsub") == []


def test_other_nodes_are_reached_by_the_task_manager(
    pbs: "FakeCommands", make_request: MakeRequest
) -> None:
    pbs.answer("pbs_tmrsh")
    rank = '"$HYDRA_LAUNCHER_EXEC" -x -q n2 "echo \'a  b\'" c; echo "$HYDRA_LAUNCHER"'
    request = make_request(nodes=2, ranks=4)
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
    script = render_script(make_request(nodes=2, ranks=4, variables={name: "ssh"}))
    assert f"export {name}" not in script
    assert kept in script
