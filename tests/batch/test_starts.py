"""Starts of job scripts, run by real bash: each has a directory of its own."""

import os
import shutil
import subprocess

import psutil

from pipectl.runs import RunDirectory, read_requeue_error
from pipectl.spec.models import Checkpoint
from tests.batch.job_requests import change, end, run, start, wait_until, write_script

SAVES = Checkpoint(max_requeues=0)


def test_each_start_has_a_directory_of_its_own_and_there_are_no_more_than_the_job_says(
    make_request,
):
    """A batch system starts it again after failures of nodes, of which the script does not know;
    what an earlier start has left, even a broken one, touches no later one."""
    request = make_request(checkpoint=Checkpoint(max_requeues=1), earlier_starts=2)
    write_script(request)
    starts = RunDirectory(request.run_directory).starts
    for name in ("2", "2/begun", "2/errors", "2/errors/rank-0000.json", "1000000000", "3x", "0"):
        (starts / name).mkdir(exist_ok=True)
    command = "cd $PIPECTL_START; basename $PWD; ls; touch errors/rank-0001.json; exit 1"
    results = [run(request, "bash", "-c", command) for _ in range(3)]
    said = "it was started 4 times, as checkpoint.max_requeues allows\n"
    files = "begun\nerrors\nstarting\n"
    assert results == [(1, f"3\n{files}"), (1, f"4\n{files}"), (75, said)]
    newest = RunDirectory(request.run_directory).start
    assert (newest.number, read_requeue_error(newest)) == (5, said.strip())
    kept = {str(path.relative_to(starts)) for path in starts.rglob("rank-*.json")}
    assert kept == {f"{number}/errors/rank-000{number > 2:d}.json" for number in (2, 3, 4)}
    for limits in (SAVES, None):
        assert run(change(request, checkpoint=limits), "true") == (0, "")


def test_a_start_takes_the_directory_of_its_submission_and_starts_at_once_never_share_one(
    make_request,
):
    """Also if a script was killed after it had made the next directory, in which none has begun."""
    request = make_request()
    script = write_script(request, "bash", "-c", "cp $PIPECTL_START/begun $PIPECTL_START/seen")
    starts = RunDirectory(request.run_directory).starts
    (starts / "2").mkdir()
    meets = ": >here-$$; until [[ -e go ]]; do read -rt 0.01 <> <(:); done; until (umask"
    script.write_text(script.read_text().replace("until (umask", meets, 1))
    many = [subprocess.Popen(["bash", script]) for _ in range(6)]
    wait_until(lambda: len([*request.run_directory.glob("here-*")]) == len(many))
    (request.run_directory / "go").touch()
    assert [each.wait(timeout=300) for each in many] == [0] * len(many)
    assert sorted(int(path.name) for path in starts.iterdir()) == [*range(1, 8)]
    for number in range(2, 8):
        assert (starts / f"{number}/seen").exists()
        assert (starts / f"{number}/exit_code").read_text() == "0\n"


def test_a_start_that_cannot_write_ends_and_says_so(make_request):
    request = make_request()
    script = write_script(request, "true")
    shutil.rmtree(request.run_directory / "starts")
    (request.run_directory / "starts").touch()
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    said = "starts/1: cannot be written; is the disk full?\n"
    assert done.stderr == f"pipectl: {request.run_directory}/{said}"


def test_termination_before_the_setup_is_no_success(make_request):
    """It comes while the script takes the directory of this start."""
    request = make_request()
    begun = write_script(request).parent / "starts/1/begun"
    os.mkfifo(begun)  # on which the script waits for a reader
    process = start(request, "true")
    wait_until(lambda: psutil.Process(process.pid).children())
    process.terminate()
    reader = os.open(begun, os.O_RDONLY)
    os.close(reader)
    assert end(process, request)[0] == 143
