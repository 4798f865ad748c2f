"""A user's script around the job script: what is refused, and that the body works within it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipectl.batch import JobRequest, Template, check_template, get
from pipectl.batch.script import render_body
from pipectl.batch.template import assemble
from pipectl.errors import InvalidInputError, SpecError

MakeRequest = Callable[..., JobRequest]
GOOD = """\
#!/bin/bash -l
# Our site's.
#pipectl directives

echo before
#pipectl body
"""


def faults(text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        check_template(Template("site.sh", text))
    return [str(problem) for problem in caught.value.problems]


def test_a_good_one_is_good_and_valid_bash() -> None:
    check_template(Template("site.sh", GOOD))
    subprocess.run(["bash", "-n", "-c", GOOD], check=True)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "no line `#pipectl body`"),
        (GOOD.replace("#!/bin/bash -l", "# nothing"), 1, "must start bash"),
        (GOOD.replace("#!/bin/bash -l", "#!/bin/sh"), 1, "must start bash"),
        (GOOD.replace("#pipectl body\n", ""), 5, "no line `#pipectl body`"),
        (GOOD + "#pipectl body\n", 7, "again; first on line 6"),
        (GOOD.replace("# Our", "#pipectl bdoy\n# Our"), 2, "is no mark"),
        (GOOD.replace("# Our", "echo early # Our"), 3, "before the first command, on line 2"),
        (GOOD + "# fine\n\necho late\n", 9, "no command may follow the body"),
        (GOOD.replace("before\n", "before \\\n"), 5, "goes on"),
        (GOOD.replace("\n", "\r\n"), 1, "Windows"),
        (GOOD.replace("before", "\x1b[31m"), 5, "control character"),
        (GOOD.replace("before", "a\u2028b"), 5, "control character"),
        ("#!/bin/bash\n#pipectl body\n#pipectl directives\n", 3, "must stand before"),
    ],
)
def test_faults_have_their_line(text: str, line: int, words: str) -> None:
    assert any(
        found.startswith(f"site.sh:{line}:1: ") and words in found for found in faults(text)
    ), faults(text)


@pytest.mark.parametrize(
    ("scheduler", "added"),
    [
        ("slurm", "#SBATCH --nodes=7"),
        ("slurm", "#SBATCH --switches=1 -t 5:00 # long"),
        ("slurm", "#SBATCH --switches=1 --wrap 'true'"),
        ("slurm", "#SBATCH --switches=1 -M east"),
        ("pbs", "#PBS -p 5 -N mine"),
        ("pbs", "#PBS -l place=pack"),
        ("slurm", "#SBATCH nothing"),
    ],
)
def test_own_directives_are_checked_as_those_of_the_spec(
    make_request: MakeRequest, scheduler: str, added: str
) -> None:
    text = GOOD.replace("# Our site's.", f"#SBATCH\n#PBS\n{added}")
    request = make_request(template=Template("site.sh", text))
    with pytest.raises(InvalidInputError, match=r"site\.sh:4: "):
        get(scheduler).render(request)
    other = "pbs" if scheduler == "slurm" else "slurm"
    assert added in get(other).render(request), "it means nothing there"
    assert added in get("local").render(request)


def test_a_directive_behind_a_command_is_refused(make_request: MakeRequest) -> None:
    text = GOOD.replace("echo before", "echo before\n#SBATCH --switches=1")
    with pytest.raises(SpecError, match=r"site\.sh:6:1: #SBATCH counts only before"):
        get("slurm").render(make_request(template=Template("site.sh", text)))


def test_all_other_lines_are_kept(make_request: MakeRequest) -> None:
    text = GOOD.replace("echo before", 'echo "$HOME  \\$x" # ünïcode')
    for scheduler in ("slurm", "pbs", "local"):
        script = get(scheduler).render(make_request(template=Template("site.sh", text)))
        kept = [line for line in text.splitlines() if not line.startswith("#pipectl")]
        assert [line for line in script.splitlines() if line in kept and line] == [
            line for line in kept if line
        ]
        assert "#pipectl" not in script


def start(request: JobRequest, head: str, launch: list[str]) -> subprocess.Popen[str]:
    request.run_directory.mkdir(parents=True, exist_ok=True)
    text = GOOD.replace("echo before", head).replace(" -l", "")
    template = Template("site.sh", text)
    from dataclasses import replace

    body = render_body(replace(request, template=template), launch)
    script = request.run_directory / "job.sh"
    script.write_text(assemble(template, "# none\n", body))
    return subprocess.Popen(
        ["bash", str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize(
    "head",
    [
        "true",
        "set -euo pipefail\nset -x",
        "set -ET; trap 'exit 9' ERR; trap 'echo back' RETURN",
        "set -Cf; cd /; IFS=$'\\n\\t'; trap '' USR2; attempt=9; child=1; run() { false; }",
        "shopt -s nullglob failglob; trap 'exit 9' TERM",
    ],
)
def test_the_exit_code_is_the_launchs(make_request: MakeRequest, head: str) -> None:
    request = make_request()
    for code in (0, 7, 75):
        process = start(request, head, ["bash", "-c", f"exit {code}"])
        process.communicate(timeout=30)
        assert process.returncode == code
        assert (request.run_directory / "exit_code").read_text() == f"{code}\n"


def test_the_templates_own_exit_trap_comes_last_and_sees_the_code(
    make_request: MakeRequest,
) -> None:
    request = make_request()
    head = """trap 'echo "it'\\''s $?, $(cat exit_code)"' EXIT"""
    output, _ = start(request, head, ["bash", "-c", "exit 7"]).communicate(timeout=30)
    assert output.splitlines()[-1] == "it's 7, 7"


def test_signals_reach_the_launch(make_request: MakeRequest) -> None:
    request = make_request()
    launch = ["bash", "-c", "trap 'exit 5' TERM; touch ready; while :; do sleep 0.05; done"]
    process = start(request, "trap 'echo cleaned' EXIT", launch)
    ready = request.run_directory / "ready"
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 5
    assert (request.run_directory / "exit_code").read_text() == "5\n"
    assert output.splitlines()[-1] == "cleaned"


def test_a_local_job_is_found_by_its_tag(make_request: MakeRequest) -> None:
    from pipectl.batch.local import _bears

    request = make_request(template=Template("site.sh", GOOD), tag="run 12ab")
    script: Path = request.run_directory / "job.sh"
    script.parent.mkdir()
    script.write_text(get("local").render(request))
    assert _bears(script, "'run 12ab'")
    assert not _bears(script, "'run 12ac'")
