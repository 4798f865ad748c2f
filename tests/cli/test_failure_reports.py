from __future__ import annotations

from pathlib import Path

import pytest

from pipectl.cli.failure import report
from pipectl.errors import Problem, SchedulerError, SpecError, UsageError
from pipectl.versions import installed_versions


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


def test_a_fault_of_ours_is_called_one_and_its_details_are_kept_for_the_user_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert report(ZeroDivisionError("division by zero")) == 1
    first, second, third = capsys.readouterr().err.splitlines()
    kind = "ZeroDivisionError: division by zero"
    assert first == f"error: this is a fault of pipectl, not of your job: {kind}"
    (details,) = tmp_path.iterdir()
    assert second == f"  please report it with {details}"
    assert third == f"  {installed_versions()}"
    assert kind in details.read_text()
    assert details.stat().st_mode & 0o777 == 0o600


def test_a_fault_of_ours_says_if_this_torch_was_never_tested(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("pipectl.versions.version", lambda _: "2.99.0")
    report(KeyError("x"))
    assert "(tested with torch 2.13 to 2.15; this is 2.99.0)" in capsys.readouterr().err


def test_what_the_users_own_code_raises_is_no_fault_of_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyError) as caught:
        {}["x"]  # this file counts as the user's
    assert report(caught.value) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: KeyError: 'x' (at ")
    assert "pipectl, not of your job" not in text


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
