"""How commands go on and end: progress, errors, faults, signals, and output that nobody reads."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pipectl
from pipectl.cli import console
from pipectl.cli.app import print_error, signals_interrupt
from pipectl.cli.progress import Lines, progress_bar
from pipectl.cli.search import interruptible
from pipectl.errors import SchedulerError, UsageError
from pipectl.files import user_cache
from pipectl.jobs.plan_search import PlanSearch
from pipectl.versions import installed_versions


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        pytest.param(
            {0: (50, 100, "a"), 9: (60, 100, "b"), 15: (80, 100, "c"), 45: (100, 100, "d")},
            ["profiling: 60%, about 40.0 s left", "profiling: 80%, about 13.3 s left",
             "profiling: 80%, about 26.7 s left"], id="counted"),
        pytest.param(
            {0: (0, 0, "capturing"), 30: (0, 0, "planning"), 35: (1, 10, "op")},
            ["capturing: 10.0 s", "capturing: 20.0 s", "profiling: 10%"], id="not counted"),
        pytest.param({0: (0, 0, "planning"), 9: (0, 0, "explaining")}, ["explaining: 10.0 s",
                     "explaining: 20.0 s"], id="the next phase"),
        pytest.param(
            {0: (50, 100, "a"), 9: (100, 100, "b"), 15: (0, 1, "messages"), 20: (3, 7, "messages")},
            ["profiling messages: 43%, about 13.3 s left",
             "profiling messages: 43%, about 26.7 s left"], id="counted again"),
    ],
)  # fmt: skip
def test_a_line_after_ten_twenty_and_forty_seconds_of_a_phase(capfd, monkeypatch, reports, said):
    now = 0.0
    monkeypatch.setattr("pipectl.cli.progress.monotonic", lambda: now)
    lines = Lines("profiling")
    for second in range(48):
        now = float(second)
        if second in reports:
            lines.report(*reports[second])
        lines.tick()
    assert capfd.readouterr().err.splitlines() == said


def test_a_terminal_shows_what_goes_on_before_anything_is_counted(place, screen):
    text = screen(80, "progress.errors", "console.errors")
    with progress_bar("profiling") as report:
        report(0, 0, "loading torch")
        console.errors().print("shown")
        report(1, 2, "x" * 200)
    with interruptible(PlanSearch()) as tell:
        console.errors().print("shown")
        tell("planning for 4 nodes")
    lines = re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", text.getvalue())
    for words in ("loading torch ", "planning (Ctrl-C: the best so far) ", "planning for 4 nodes "):
        assert any(line.startswith(words) for line in lines), words
    assert not any("x" * 60 in line for line in lines)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_interrupt_ends_the_search_and_the_second_aborts(capfd, how):
    search, before = PlanSearch(), signal.getsignal(how)
    with signals_interrupt(), interruptible(search):
        assert not search.expired()
        signal.raise_signal(how)
        assert search.expired()
        assert "stopping with the best plan so far; Ctrl-C again aborts" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(how) == before


def test_the_budget_is_of_each_plan_and_an_interrupt_of_all(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("pipectl.jobs.plan_search.time", clock)
    search, endless = PlanSearch(budget_s=10), PlanSearch()
    expired = []
    for now[0], restarts in ((9.9, False), (9.9, True), (19.5, False), (20.0, False), (20.0, True)):
        if restarts:
            search.restart()
        expired.append(search.expired())
    assert expired == [False, False, False, True, False]
    assert search.cut_short
    assert (endless.expired(), endless.cut_short) == (False, False)
    endless.interrupted = True
    assert not endless.cut_short, "no planner was told"
    endless.restart()
    assert (endless.expired(), endless.cut_short) == (True, True)


BOTH = (signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UsageError("a", hint="b\nc"), 2, "error: a\n  b\n  c\n"),
        (SchedulerError("[red]x[/red]\x1b[2J\u202e"), 5, "error: [red]x[/red][2J\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied\n"),
    ],
)
def test_an_error_is_a_message_and_its_hint_and_is_not_wrapped(
    error, code, text, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "20")
    assert print_error(error) == code
    assert capsys.readouterr().err == text


def test_on_a_terminal_an_error_is_wrapped_between_words_and_its_hint_is_whole(screen):
    text = screen(24, "app.errors")
    print_error(UsageError("one two three four five", hint="a hint that may be copied whole"))
    assert text.getvalue().splitlines() == [
        "error: one two three",
        "       four five",
        "  a hint that may be copied whole",
    ]


def test_a_typer_that_was_not_tested_and_lacks_something_is_named(tmp_path):
    (tmp_path / "typer").mkdir()
    (tmp_path / "typer" / "__init__.py").touch()
    metadata = tmp_path / "typer-0.99.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: typer\nVersion: 0.99.0\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pipectl", "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    first, second = done.stderr.splitlines()
    assert first.startswith("error: typer cannot be used (No module named 'typer.core'")
    assert first.endswith("): tested with typer 0.28 to 0.29; this is 0.99.0")
    assert second == "  install typer 0.28 to 0.29: pip install 'typer==0.29.*'"


def test_a_fault_of_ours_is_called_one_and_its_details_are_kept_for_the_user_alone(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert print_error(ZeroDivisionError("division by zero")) == 1
    first, second, third = capsys.readouterr().err.splitlines()
    kind = "ZeroDivisionError: division by zero"
    assert first == f"error: this is a fault of pipectl, not of your job: {kind}"
    (details,) = tmp_path.iterdir()
    assert second == f"  please report it with {details}"
    assert third == f"  {installed_versions()}"
    assert kind in details.read_text()
    assert details.stat().st_mode & 0o777 == 0o600


def test_what_the_users_own_code_raises_is_no_fault_of_ours_and_debugging_adds_the_traceback(
    capsys, monkeypatch
):
    with pytest.raises(KeyError) as caught:
        {}["x"]  # this file counts as the user's
    assert print_error(caught.value) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: KeyError: 'x' (at ")
    assert "pipectl, not of your job" not in text
    monkeypatch.setenv("PIPECTL_DEBUG", "1")
    assert print_error(caught.value) == 1
    traceback = capsys.readouterr().err
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert traceback.endswith(text)


@pytest.mark.parametrize("how", BOTH)
def test_the_first_signal_interrupts_and_none_ends_the_tidying_up(how):
    before = [signal.getsignal(number) for number in BOTH]

    def command():
        try:
            signal.raise_signal(how)
        finally:
            for number in BOTH:
                signal.raise_signal(number)
            before.append("tidied")

    with pytest.raises(KeyboardInterrupt), signals_interrupt():
        command()
    assert [*(signal.getsignal(number) for number in BOTH), "tidied"] == before


def test_what_is_ignored_or_taken_stays_so():
    for handler in (signal.SIG_IGN, lambda *_: None):
        signal.signal(signal.SIGHUP, handler)
        with signals_interrupt():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == handler


def run(*arguments: str, **streams: Any) -> tuple[int, str]:
    """The exit code, and what the command complained about."""
    command = [sys.executable, "-m", "pipectl", *arguments]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options = {"stderr": subprocess.PIPE, "env": buffered, **streams}
    done = subprocess.run(command, text=True, check=False, **options)
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize(
    ("words", "stream"),
    [
        ("logs -f", "stdout"),
        ("status last --json", "stdout"),
        ("check --schema -o /dev/stdout", "stdout"),
        ("--help", "stdout"),
        ("status nothing", "stderr"),
    ],
)
def test_a_reader_that_is_gone_ends_a_command_without_a_word(finished, words, stream):
    (finished / "logs/job.log").write_text("line\n" * 100_000)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run(*words.split(), **{stream: writing}) == (141, "")
    finally:
        os.close(writing)


@pytest.mark.parametrize("word", ["logs", "--version"])
def test_no_standard_output_at_all(finished, word):
    assert run(word, preexec_fn=lambda: os.close(1)) == (0, "")


def test_a_full_disk_and_a_quota_are_no_fault_of_ours(cli, finished, monkeypatch):
    said = "error: output cannot be written: {}\n  free some space\n"
    with Path("/dev/full").open("w") as full:
        for words in (["logs"], ["check", "--schema"]):
            assert run(*words, stdout=full) == (1, said.format("No space left on device"))

    def print_too_much(*_, **__):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("pipectl.cli.commands.status.get_statuses", print_too_much)
    result = cli("status")
    assert (result.code, result.err) == (1, said.format("Disk quota exceeded"))


def test_a_user_without_a_home_has_no_files_there(cli, job, monkeypatch):
    """As in a container that runs as a number, which no file of users knows."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert cli("check", str(job)).code == 0
    assert f"{job}:" in cli("check", str(job), "--origins").out
    assert user_cache("rows") is None
    with pytest.raises(UsageError, match="no home directory is known for ~"):
        pipectl.Job("~/job.yaml")


def test_json_has_the_exact_text_whatever_the_stream_can_encode(monkeypatch):
    value = {"é\U0001f600": ["\x1b\u2028ß", None, 0.5]}
    for encoding in ("ascii", "latin-1", "utf-8"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
        monkeypatch.setattr(sys, "stdout", stream)
        console.say_json(value)
        stream.flush()
        assert json.loads(stream.buffer.getvalue().decode(encoding)) == value
