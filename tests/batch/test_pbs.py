"""What PBS is asked, with its commands pretended, and what its job scripts do there."""

import signal
import subprocess
from datetime import datetime
from pathlib import Path

from job_requests import wait_until, write_script

from pipectl.batch import Queue
from pipectl.batch.pbs import PbsScheduler, parse_qstat, parse_queues
from pipectl.runs import RunDirectory
from pipectl.spec.models import Checkpoint

SAMPLES = Path(__file__).parents[1] / "data" / "scheduler" / "pbs"
WAITS = "until [[ -e stop ]]; do sleep 0.05; done; : >stopped"


def start(request, rank):
    """A job whose launcher starts a rank that is written in bash."""
    return subprocess.Popen(
        ["bash", str(write_script(request, "bash", "-c", rank, scheduler="pbs"))]
    )


def test_a_job_stops_before_the_walltime_and_submits_itself_again_if_the_site_lets_it(
    pbs, make_request
):
    request = make_request(walltime=1, checkpoint=Checkpoint(max_requeues=1))
    run = RunDirectory(request.run_directory)
    pbs.answer("qsub", stderr="qsub: Bad UID for job execution\n", rc=15)
    assert start(request, WAITS).wait(30) == 75
    log = run.job_log.read_text()
    assert "qsub: Bad UID for job execution\npipectl: this job may not submit another" in log
    assert run.requeue_error.read_text() == "qsub: Bad UID for job execution\n"
    assert not run.resubmitted.exists()
    pbs.answer("qsub", "12.vm\n")
    run.attempt.unlink()
    for attempt in (1, 2):
        assert start(request, WAITS).wait(30) == 75
        assert pbs.calls("qsub")[1:] == [["-C", "#PBS", str(run.script)]], attempt
    assert run.resubmitted.read_text() == "12.vm\n"


def test_a_job_that_is_deleted_does_not_come_back(pbs, make_request):
    request = make_request(checkpoint=Checkpoint(max_requeues=1))
    job = start(
        request, "trap '' TERM; : >begun; until [[ -s stop ]]; do sleep 0.05; done; : >stopped"
    )
    wait_until((request.run_directory / "begun").exists)
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 75
    assert pbs.calls("qsub") == []


def test_other_nodes_are_reached_by_the_task_manager(pbs, make_request):
    pbs.answer("pbs_tmrsh")
    request = make_request(nodes=2)
    rank = '"$HYDRA_LAUNCHER_EXEC" -x -q n2 "echo \'a  b\'" c; echo "$HYDRA_LAUNCHER"'
    assert start(request, rank).wait(30) == 0
    assert (request.run_directory / "logs" / "job.log").read_text() == "ssh\n"
    assert pbs.calls("pbs_tmrsh") == [["n2", "/bin/bash", "-c", "echo 'a  b' c"]]


def test_times_are_local_and_queues_are_read_as_recorded(pbs):
    times = "    stime = Fri Nov 20 16:34:21 2026\n    mtime = Fri Nov 20 16:34:22 2026"
    status = parse_qstat(f"Job Id: 7.vm\n    job_state = F\n{times}\n")["7.vm"]
    start = datetime(2026, 11, 20, 16, 34, 21).timestamp()
    assert (status.start, status.end) == (start, start + 1)
    for command, name in (("qstat", "qstat-Q-f.txt"), ("pbsnodes", "pbsnodes-a.txt")):
        pbs.replay(command, name)
    assert [queue.name for queue in PbsScheduler().queues()] == ["workq", "small", "closed"]
    names = ("qstat-Q-f.txt", "qstat-B-f.txt", "pbsnodes-a.txt")
    texts = ("\n".join((SAMPLES / name).read_text().splitlines()[1:-1]) for name in names)
    node = {"cores": 4, "memory_bytes": 4026532 * 1024, "gpus": 1}
    assert parse_queues(*texts) == (
        Queue("workq", True, True, 86400, nodes=2, **node),
        Queue("small", False, True, 300, nodes=1, **node),
        Queue("closed", False, False, None, nodes=2, **node),
    )
    assert parse_queues("garbage", "a|b", "|||||") == ()
