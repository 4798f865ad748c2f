import subprocess

import pytest

from pipectl.batch.quoting import (
    checked,
    shell_command,
    shell_word,
    slurm_file,
    slurm_value,
    variable_name,
)
from pipectl.errors import InvalidInputError


def test_bash_reads_nasty_words_unchanged(nasty: list[str], tmp_path) -> None:
    assert len(nasty) >= 30
    line = "printf '%s\\0' " + shell_command(nasty, "words")
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == nasty
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", ["\n", "\r", "\0", "\x1b[31m", "\x7f", "\x85", "\u2028", "\t"])
def test_control_characters_are_refused_by_name(bad: str) -> None:
    with pytest.raises(InvalidInputError, match=r"slurm\.account.*control character"):
        checked(f"a{bad}b", "slurm.account")
    with pytest.raises(InvalidInputError):
        shell_word(f"a{bad}b", "x")
    with pytest.raises(InvalidInputError):
        slurm_value(f"a{bad}b", "x")


@pytest.mark.parametrize("name", ["A", "_a1", "OMP_NUM_THREADS"])
def test_variable_names_that_bash_can_export(name: str) -> None:
    assert variable_name(name) == name


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "é", "A\n", "A;touch x"])
def test_other_variable_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"environment\.variables"):
        variable_name(name)


def test_slurm_values_are_quoted_only_where_needed() -> None:
    assert slurm_value("gpu", "x") == "gpu"
    assert slurm_value("a b", "x") == '"a b"'
    assert slurm_value("", "x") == '""'
    assert slurm_value('a\\b"c', "x") == '"a\\\\b\\"c"'
    assert slurm_value("#no comment", "x") == '"#no comment"'


def test_slurm_files_are_no_patterns() -> None:
    assert slurm_file("/runs/100%/job.log", "x") == "/runs/100%%/job.log"
    # A backslash switches patterns off and halves backslashes; then the quoting doubles them.
    assert slurm_file("/a\\b%j", "x") == '"/a' + "\\" * 4 + 'b%j"'
