"""A user's template: what is refused, with its line, and what its blocks do in a running script."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from job_requests import change

from pipectl.batch import Array, JobRequest, Template, check_template, get
from pipectl.errors import InvalidInputError, SpecError

MakeRequest = Callable[..., JobRequest]
GOOD = """\
{% extends base %}
{## Our site's. ##}
{% block directives %}
#SBATCH --switches=1
{% endblock %}
{% block setup %}
echo before
{% endblock %}
{% block at_exit %}
    echo after
{% endblock %}
"""
SLURM_ONLY = "{% extends base %}\n{% block directives %}\n{}\n{% endblock %}\n"


def fault(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        check_template(Template("site.sh", text))
    (problem,) = caught.value.problems
    return str(problem)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "does not extend pipectl's"),
        ("#!/bin/bash\necho hello\n", 1, "does not extend pipectl's"),
        ("#!/bin/bash\n#pipectl directives\n#pipectl body\n", 2, "{% extends base %}"),
        (GOOD.replace("block setup", "block set_up"), 6, "no block 'set_up'; did you mean 'setup'"),
        (GOOD.replace("{## Our", "echo early\n{## Our"), 2, "text outside of all blocks"),
        (GOOD.replace("{## Our", "{{ job.name }}\n{## Our"), 2, "text outside of all blocks"),
        (f"#!/bin/bash\n{GOOD}", 1, "text outside of all blocks"),
        (GOOD.replace("echo before", "{% if %}"), 7, "Expected an expression"),
        (GOOD.removesuffix("{% endblock %}\n"), 10, "end of template"),
        (GOOD.replace("before", "\x1b[31m"), 7, "control character"),
        (GOOD.replace("before", "a\u2028b"), 7, "control character"),
    ],
)
def test_what_cannot_extend_ours_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    found = fault(text)
    assert words in found
    assert found.startswith(f"site.sh:{line}:1: ")


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("echo before", "{{ job.nam }}", 7, "has no attribute 'nam'"),
        ("echo before", "{{ cores }}", 7, "'cores' is undefined"),
        ("echo before", "{{ 1 // 0 }}", 7, "zero"),
        ("echo before", "{{ ''.__class__ }}", 7, "unsafe"),
        ("echo before", "{% include '/etc/passwd' %}", 7, "/etc/passwd"),
        ("echo before", "if true; then", 1, "end of file"),
        ("echo before", "echo )", 7, "syntax error"),
        ("echo before", "cat <<END\nno end", 1, "here-document"),
        ("{% block at_exit %}\n", "{% block at_exit %}\n#SBATCH --nice\n", 10, "only before"),
        ("#SBATCH --switches=1", "{{ super() }}\necho x", 3, "come before pipectl's"),
        ("%}\n#SBATCH --switches=1\n", "%}#SBATCH --switches=1 ", 3, "come before pipectl's"),
        ("{## Our", "{% block header %}{% endblock %}\n{## Our", 4, "come before pipectl's"),
        ("{## Our", "{% block shebang %}#!/bin/sh{% endblock %}\n{## Our", 2, "must start bash"),
    ],
)
def test_what_gives_a_wrong_script_is_refused_with_its_line(
    make_request: MakeRequest, old: str, new: str, line: int, words: str
) -> None:
    text = GOOD.replace(old, new)
    assert text != GOOD
    with pytest.raises(SpecError, match=words) as caught:
        get("slurm").render(make_request(template=Template("site.sh", text)))
    assert caught.value.problems[0].line == line


@pytest.mark.parametrize(
    ("scheduler", "added"),
    [
        ("slurm", "#SBATCH --switches=1 -n 5 # tasks"),
        ("slurm", "#SBATCH --switches=1 --wrap 'true'"),
        ("slurm", "#SBATCH --switches=1 -M east"),
        ("slurm", "#SBATCH nothing"),
        ("pbs", "#PBS -p 5 -J 0-3"),
        ("pbs", "#PBS -l select=2"),
    ],
)
def test_own_directives_are_checked_as_those_of_the_spec(
    make_request: MakeRequest, scheduler: str, added: str
) -> None:
    template = Template("site.sh", SLURM_ONLY.replace("{}", f"#SBATCH\n#PBS\n{added}"))
    request = make_request(template=template)
    with pytest.raises(InvalidInputError, match=r"site\.sh:5: "):
        get(scheduler).render(request)
    other = "pbs" if scheduler == "slurm" else "slurm"
    assert added in get(other).render(request), "it means nothing there"


def test_the_script_of_a_long_array_is_checked(make_request: MakeRequest, tmp_path: Path) -> None:
    runs = tuple(tmp_path / f"{'a' * 200}-{index}" for index in range(700))
    request = make_request(array=Array(runs), template=Template("site.sh", GOOD))
    assert len(get("slurm").render(request)) > 2**17


def test_text_is_kept_and_values_are_quoted(make_request: MakeRequest) -> None:
    own = 'echo "$HOME  \\$x ${#x} ${x#a}" # ünïcode'
    values = "echo {{ job.name }} {{ '$HOME' }} {{ job.run_directory / 'a b' }} {{ ('a', 'b c') }}"
    text = GOOD.replace("echo before", f"{own}\n{values}")
    request = make_request(name="it's", template=Template("site.sh", text))
    for scheduler in ("slurm", "pbs", "local"):
        script = get(scheduler).render(request)
        assert f"\n{own}\n" in script
        assert f"\necho 'it'\"'\"'s' '$HOME' '{request.run_directory}/a b' a 'b c'\n" in script


def start(
    request: JobRequest, setup: str, at_exit: str, launch: list[str]
) -> subprocess.Popen[str]:
    mpiexec = request.run_directory / "mpiexec"
    mpiexec.parent.mkdir(parents=True, exist_ok=True)
    mpiexec.write_text('#!/bin/bash\nshift 2\nexec "$@"\n')
    mpiexec.chmod(0o755)
    text = GOOD.replace("echo before", setup).replace("    echo after", at_exit)
    template = Template("site.sh", text)
    request = change(request, template=template, command=tuple(launch), mpiexec=str(mpiexec))
    script = request.run_directory / "job.sh"
    script.write_text(get("local").render(request))
    return subprocess.Popen(
        ["bash", str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize(
    "setup",
    [
        "true",
        "set -euo pipefail\nset -x",
        "set -ET; trap 'exit 9' ERR; trap 'echo back' RETURN; trap 'echo x' EXIT",
        "set -Cf; cd /; IFS=$'\\n\\t'; attempt=9; child=1",
        "shopt -s nullglob failglob",
    ],
)
def test_the_exit_code_is_that_of_the_launch(make_request: MakeRequest, setup: str) -> None:
    request = make_request()
    for code in (0, 7, 75):
        process = start(request, setup, "false", ["bash", "-c", f"exit {code}"])
        process.communicate(timeout=30)
        assert process.returncode == code
        assert (request.run_directory / "exit_code").read_text() == f"{code}\n"


def test_what_fails_in_the_setup_ends_the_job(make_request: MakeRequest) -> None:
    process = start(make_request(), "set -e\nfalse", "echo cleaned", ["echo", "launched"])
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (1, "cleaned\n")


def test_the_commands_at_the_end_come_last_and_see_the_code(make_request: MakeRequest) -> None:
    process = start(
        make_request(), "word=it", """echo "$word's $code, $(cat exit_code)" """, ["false"]
    )
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (1, "it's 1, 1\n")


def test_signals_reach_the_launch(make_request: MakeRequest) -> None:
    request = make_request()
    launch = ["bash", "-c", "trap 'exit 5' TERM; touch ready; while :; do sleep 0.05; done"]
    process = start(request, "trap 'exit 9' TERM", "echo cleaned", launch)
    ready = request.run_directory / "ready"
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (5, "cleaned\n")
    assert (request.run_directory / "exit_code").read_text() == "5\n"


def test_a_local_job_is_found_by_its_tag(make_request: MakeRequest) -> None:
    request = make_request()
    process = start(change(request, tag="run 12ab"), "true", "true", ["sleep", "60"])
    try:
        deadline = time.monotonic() + 60
        while (found := get("local").find("run 12ab")) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found is not None
        assert found.startswith(f"{process.pid}.")
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
