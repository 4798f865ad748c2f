import subprocess

import pytest

from pipectl.batch import JobRequest, render_variables
from pipectl.batch.script import refuse_controls, slurm_file, slurm_value
from pipectl.errors import InvalidInputError


@pytest.mark.parametrize("bad", ["\n", "\r", "\0", "\x1b[31m", "\x7f", "\x85", "\u2028", "\t"])
def test_control_characters_are_refused_by_name(bad: str) -> None:
    with pytest.raises(InvalidInputError, match=r"slurm\.account.*control character"):
        refuse_controls(f"a{bad}b", "slurm.account")


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "é", "A\n", "A;touch x"])
def test_names_that_bash_cannot_export_are_refused(make_request, name: str) -> None:
    request: JobRequest = make_request(variables={"OMP_NUM_THREADS": "1", name: "2"})
    with pytest.raises(InvalidInputError, match=r"environment\.variables"):
        render_variables(request)


def test_variables_arrive_whatever_is_in_them(make_request) -> None:
    variables = {"TABS": "a\tb\t", "EMPTY": "", "BLANK": " ", "QUOTES": "it's $HOME"}
    script = render_variables(make_request(variables=variables))
    for name, value in variables.items():
        show = f'{script}printf "%s." "${{{name}-unset}}"'
        done = subprocess.run(["bash", "-c", show], capture_output=True, text=True, check=True)
        assert done.stdout == f"{value}."


def test_slurm_values_are_quoted_only_where_needed() -> None:
    assert slurm_value("gpu") == "gpu"
    assert slurm_value("a b") == '"a b"'
    assert slurm_value("") == '""'
    assert slurm_value('a\\b"c') == '"a\\\\b\\"c"'
    assert slurm_value("#no comment") == '"#no comment"'


def test_slurm_files_are_no_patterns() -> None:
    assert slurm_file("/runs/100%/job.log") == "/runs/100%%/job.log"
    # A backslash switches patterns off and halves backslashes; then the quoting doubles them.
    assert slurm_file("/a\\b%j") == '"/a' + "\\" * 4 + 'b%j"'
