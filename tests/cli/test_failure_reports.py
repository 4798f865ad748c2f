from __future__ import annotations

import pytest

from pipectl.cli.failure import report
from pipectl.errors import Problem, SchedulerError, SpecError, UsageError


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UsageError("a", cure="b\nc"), 2, "error: a\n  b\n  c\n"),
        (SchedulerError("[red]x[/red]\x1b[2J\u202e"), 5, "error: [red]x[/red][2J\n"),
        (
            SpecError([Problem("j", 2, 1, "b"), Problem("j", 1, 3, "a")]),
            *(3, "error: j:1:3: a\nerror: j:2:1: b\n"),
        ),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied\n"),
    ],
)
def test_an_error_is_a_message_and_its_cure(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error) == code
    assert capsys.readouterr().err == text


def test_a_fault_of_ours_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ZeroDivisionError("division by zero")) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: ZeroDivisionError: division by zero\n")
    assert "please report it" in text


def test_debugging_adds_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPECTL_DEBUG", "1")
    with pytest.raises(UsageError) as caught:
        raise UsageError("a")
    assert report(caught.value) == 2
    text = capsys.readouterr().err
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("error: a\n")


def test_long_lines_are_not_wrapped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    report(UsageError("/a/long/path/to/some/file: cannot be written"))
    assert capsys.readouterr().err.count("\n") == 1
