"""The commands of the README and of the walk-through, and the code of the page on extensions."""

import inspect
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from types import ModuleType

import pytest
from distribution import wheel
from job_requests import change, make_request
from pages import CHECKOUT, bash, blocks, directory_of_a_reader, install, script

from pipectl.batch import Array, JobState, Scheduler, Template
from pipectl.errors import SchedulerError
from pipectl.schedule.listed import Listed

DOCS = CHECKOUT / "docs"
WALK = DOCS / "walkthrough.md"
SHORTER = {
    "pipectl submit first/job.yaml": "{} --set training.steps=10 --set model.kwargs.layers=2",
    "pipectl profile configs/gpt-stdlib.yaml": "{} --effort fast",
    "pipectl submit job.yaml": "{} --set training.steps=20 --set evaluation.every=20",
}
"""Commands that do the same with less: measure for a shorter time, train a smaller model."""
CONTROL = re.compile(r"\x1b\[[^A-Za-z]*[A-Za-z]")  # of what draws on a terminal
DEPENDS_ON_TIMES = (
    *("bottleneck:", "it waits:", "faster:", "sum gradients", "search:", "per step"),
    *("waiting", "stage "),
)


def shorter(text):
    for command, less in SHORTER.items():
        text = text.replace(command, less.format(command))
    return text


@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_commands_of_the_readme_run(tmp_path, warm_python):
    directory_of_a_reader(tmp_path / "reader", warm_python)
    bash(shorter(script(CHECKOUT / "README.md", "")), tmp_path / "reader")


@pytest.mark.mpi
def test_the_walk_prints_what_the_page_shows(tmp_path, warm_python_of):
    """Outside of the checkout, with pipectl as its wheel installs it into a new environment."""
    home, reader = tmp_path / "venv", tmp_path / "reader"
    venv.create(home)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))
    dependencies = sysconfig.get_paths()["purelib"]  # without pipectl: no .pth of theirs is read
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    pip = [sys.executable, "-m", "pip", "--python", home, "--quiet", "install", "--no-compile"]
    built = wheel(tmp_path)
    subprocess.run([*pip, "--no-index", "--no-deps", built], check=True)
    warm = warm_python_of("wheel", site=site)
    install(reader, python=f"exec {home}/bin/python", installed=f"exec {home}/bin/pipectl",
            pipectl=f"exec {warm} -m pipectl")  # fmt: skip
    files = re.findall(r"^```python (\S+\.py)\n(.*?)^```", WALK.read_text("utf-8"), re.M | re.S)
    for name, body in files:
        (reader / name).write_text(body)
    where = "python -c 'import pipectl.runtime as r; print(r.__file__)'"
    assert Path(bash(where, reader)[0]).is_relative_to(site)
    assert bash("installed --version", reader) == bash("pipectl --version", reader)
    bash("pipectl init taken --recipe digits-cnn && pipectl check taken/digits-cnn.yaml", reader)
    assert (home / "share" / "man" / "man1" / "pipectl-submit.1").exists()

    printed = [CONTROL.sub("", line) for line in bash(shorter(script(WALK, "walk")), reader)]
    gists = [gist(line) for line in printed]
    shown = [line for block in blocks(WALK, "walk") for line in block.output]
    missing = [line for line in shown if gist(line) not in gists]
    assert [line for line in missing if not line.strip().startswith(DEPENDS_ON_TIMES)] == []
    shown_losses = re.findall(r"evaluation .* loss ([\d.]+)$", "\n".join(printed), re.MULTILINE)
    (evaluated,) = set(shown_losses)  # by logs and by status
    (plain,) = re.findall(r"in plain PyTorch: ([\d.]+)", "\n".join(printed))
    assert float(plain) == pytest.approx(float(evaluated), rel=1e-3)


def gist(line):
    """Its first words, whatever the figures."""
    return re.sub(r"\d+([.,:]\d+)*", "0", line).split()[:2]


def code(language, name):
    """The code in docs/extending.md that is marked so."""
    pattern, text = rf"^```{language} {name}\n(.*?)^```", (DOCS / "extending.md").read_text("utf-8")
    (found,) = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    return found


def module_of(name):
    module = ModuleType("documented")
    exec(compile(code("python", name), "docs/extending.md", "exec"), module.__dict__)
    return module


def test_the_documented_schedule_is_one():
    one_f_one_b = module_of("schedule").one_f_one_b
    for stages, micro_batches in ((2, 3), (4, 2), (3, 9), (1, 1)):
        lists = one_f_one_b(stages, stages, micro_batches)
        made = Listed.read("\n".join(map(",".join, lists)), "mine")
        assert (made.stages, made.micro_batches) == (stages, micro_batches)
    lines = code("csv", "schedule").splitlines()
    assert one_f_one_b(2, 2, 3) == [line.split(",") for line in lines[1:]]
    written = Listed.read("\n".join(lines), "mine.csv")
    assert (written.stages, written.micro_batches) == (2, 3)
    assert 'entry-points."pipectl.schedules"' in code("toml", "schedule")


GRID_ENGINE = {
    "qsub": "echo 42",
    "qdel": 'echo "$@" >>"$0.said"',
    "qstat": "{ [[ ${1-} == -r ]] && cat || grep -v jobname; } <<'END'\n"
    "job-ID  prior   name       user         state submit/start at     queue\n"
    "-----------------------------------------------------------------------\n"
    "     41 0.55500 pipectl.12 me           qw    11/21/2026 12:00:00\n"
    "       Full jobname:     pipectl.1234abcd\n"
    "     42 0.55500 pipectl.7f me           r     11/21/2026 12:00:00 all.q@n1\n"
    "       Full jobname:     pipectl.7f3a9c01\nEND",
}
"""Its pretended commands."""


def test_the_documented_batch_system_has_all_methods_and_works(tmp_path, monkeypatch):
    for name, line in GRID_ENGINE.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    grid_engine = module_of("scheduler").GridEngine()
    for name, method in inspect.getmembers(Scheduler, inspect.isfunction):
        if not name.startswith("_"):
            found = inspect.signature(getattr(type(grid_engine), name))
            assert list(found.parameters) == list(inspect.signature(method).parameters), name
    request = make_request(tmp_path / "run", tag="20261121-demo 7f3a9c01", nodes=2)
    script = tmp_path / "job.sh"
    script.write_text(grid_engine.render(request))
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "#$ -pe mpi 4\n" in script.read_text()
    assert grid_engine.submit(script, request) == "42"
    found = grid_engine.query(["42", "41", "7"])
    states = {job_id: status.state for job_id, status in found.items()}
    assert states == {"42": JobState.RUNNING, "41": JobState.QUEUED}
    assert (grid_engine.find(request.tag), grid_engine.find("other 99")) == ("42", None)
    grid_engine.cancel("42")
    assert (tmp_path / "qdel.said").read_text() == "42\n"
    for refused in ({"run_directory": Path("/a b")}, {"array": Array((Path("/a"),))}):
        with pytest.raises(SchedulerError):
            grid_engine.render(change(request, **refused))
    text = "{% extends base %}\n{% block setup %}\ndate\n{% endblock %}\n"
    assert "\ndate\n" in grid_engine.render(change(request, template=Template("t.sh", text)))
