import os
import subprocess
import sys

import pytest

from pipectl.batch.process import NoAnswerError, run, start_time
from pipectl.errors import SchedulerError


def test_output_error_and_code() -> None:
    done = run(["bash", "-c", "echo out; echo err >&2; exit 3"], cure="-")
    assert (done.returncode, done.stdout, done.stderr, done.message) == (3, "out", "err", "err")
    assert run(["bash", "-c", "exit 4"], cure="-").message == "exit code 4"


def test_undecodable_output_is_shown_as_it_can_be() -> None:
    assert run(["bash", "-c", "printf 'a\\377b'"], cure="-").stdout == "a\ufffdb"


def test_a_missing_command_names_the_cure() -> None:
    with pytest.raises(SchedulerError, match="no-such-command") as caught:
        run(["no-such-command"], cure="install it")
    assert caught.value.cure == "install it"


def test_a_command_that_hangs_is_given_up() -> None:
    with pytest.raises(NoAnswerError, match="sleep"):
        run(["sleep", "30"], cure="-", timeout_s=0.2)


def test_start_time_tells_processes_apart() -> None:
    start = start_time(os.getpid())
    assert start is not None
    assert start == start_time(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert start_time(child.pid) is not None
    child.kill()
    child.wait()
    assert start_time(child.pid) is None
