"""The commands of the README and of the walk-through, and the code of the page on extensions."""

import inspect
import json
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from types import ModuleType

import pytest

from pipectl.batch import Array, Scheduler, get_scheduler, scheduler_class
from pipectl.cli import main
from pipectl.cli.commands.doctor import examine
from pipectl.errors import PipectlError, UsageError
from pipectl.schedule.listed import Listed
from tests.batch.job_requests import change, make_request, wait_until
from tests.docs.distribution import wheel
from tests.docs.pages import CHECKOUT, bash, blocks, directory_of_a_reader, install, script

DOCS = CHECKOUT / "docs"
WALK = DOCS / "walkthrough.md"
SHORTER = {
    "pipectl submit first/job.yaml": "{} --set training.steps=10 --set model.kwargs.layers=1 "
    "--set model.kwargs.width=32 --set pipeline.micro_batches=2",
    "pipectl profile configs/gpt-large.yaml": "{} --effort fast",
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


@pytest.mark.product
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


GRID_ENGINE = r"""#!/bin/bash
jobs=$(dirname "$0")/jobs
directive() { sed -n "s/^#\\$ -$1 //p" "$2"; }
case $(basename "$0") in
qsub) # -terse SCRIPT
    id=$(($(ls "$jobs" | wc -l) + 41)) job=$jobs/$(($(ls "$jobs" | wc -l) + 41))
    mkdir "$job"
    directive N "$2" >"$job/name"
    cp "$2" "$job/script"
    {
        for other in $(directive hold_jid "$2" | tr , ' '); do
            until [[ -e $jobs/$other/code ]]; do sleep 0.02; done
        done
        [[ -e $job/code ]] && exit
        setsid bash "$job/script" >>"$(directive o "$2")" 2>&1 </dev/null &
        echo "$!" >"$job/pid"
        wait "$!"
        echo "$?" >"$job/code"
    } >/dev/null 2>&1 &
    echo "$id"
    ;;
qdel)
    echo 137 >"$jobs/$1/code"
    [[ -e $jobs/$1/pid ]] && kill -TERM -- "-$(<"$jobs/$1/pid")"
    echo "me has deleted job $1"
    ;;
qacct)
    [[ -e $jobs/$2/code ]] || { echo "error: job id $2 not found" >&2 && exit 1; }
    printf 'jobnumber    %s\nfailed       0\nexit_status  %s\n' "$2" "$(<"$jobs/$2/code")"
    ;;
qstat)
    echo 'job-ID  prior   name       user         state submit/start at     queue'
    echo '-----------------------------------------------------------------------'
    for job in "$jobs"/*/; do
        [[ -e $job/code ]] && continue
        state=r
        [[ -e $job/pid ]] || state=hqw
        name=$(<"$job/name")
        echo "$(basename "$job") 0.55500 ${name:0:10} me $state 11/21/2026 12:00:00"
        [[ ${1-} == -r ]] && echo "       Full jobname:     $name"
    done
    ;;
esac
exit 0
"""
"""Its pretended commands, whose jobs are processes."""
RANKS = """#!/bin/bash
[[ $1 == --version ]] && exit
rm "$PIPECTL_START/starting"
until [[ -e go || -s stop ]]; do sleep 0.02; done
[[ -e go ]] && echo "the ranks have trained" && exit
touch stopped
"""


@pytest.fixture
def grid_engine(tmp_path, monkeypatch):
    """The class of the page, in a package that is installed as the page says; its commands."""
    package, programs = tmp_path / "site" / "my_package", tmp_path / "bin"
    info = tmp_path / "site" / "my_package-1.dist-info"
    for folder in (package, info, programs / "jobs"):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "gridengine.py").write_text(code("python", "scheduler"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    points = code("toml", "scheduler").replace('project.entry-points."', "").replace('"]', "]")
    (info / "entry_points.txt").write_text(points.replace('"', ""))
    for name in ("qsub", "qstat", "qdel", "qacct"):
        (programs / name).write_text(GRID_ENGINE)
    for name, text in (("python", "#!/bin/bash\n"), ("mpiexec", RANKS)):
        (programs / name).write_text(text)
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    yield programs
    scheduler_class.cache_clear()
    for name in ("my_package.gridengine", "my_package"):
        sys.modules.pop(name, None)


def test_the_documented_batch_system_has_all_methods_and_renders(tmp_path, grid_engine):
    system = get_scheduler("gridengine")
    for name, method in inspect.getmembers(Scheduler, inspect.isfunction):
        if not name.startswith("_"):
            found = inspect.signature(getattr(type(system), name))
            assert list(found.parameters) == list(inspect.signature(method).parameters), name
    request = make_request(tmp_path / "run", tag="20261121-demo 7f3a9c01", nodes=2)
    script = tmp_path / "job.sh"
    script.write_text(system.render(change(request, after=("41",))))
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert {"#$ -pe mpi 4", "#$ -hold_jid 41"} <= {*script.read_text().splitlines()}
    for refused in (
        {"run_directory": Path("/a b")},
        {"array": Array((Path("/a"),))},
        {"options": {"N": "x"}},
    ):
        with pytest.raises(PipectlError):
            system.render(change(request, **refused))
    (answer,) = examine(tmp_path, only="batch system")
    assert (answer.what, answer.level) == ("Grid Engine", "ok")
    assert system.find("20261121-demo 7f3a9c01") is None
    (grid_engine / "jobs" / "41").mkdir()
    (grid_engine / "jobs" / "41" / "name").write_text("pipectl.7f3a9c01\n")
    assert system.find("20261121-demo 7f3a9c01") == "41"


OF_GRID_ENGINE = """\
version: 1
name: first
model: {factory: "torch.nn:Linear", kwargs: {in_features: 4, out_features: 1}}
loss: {factory: "torch.nn:MSELoss"}
data: {factory: "torch.utils.data:TensorDataset"}
training: {steps: 4, batch_size: 8}
resources: {tasks_per_node: 2}
launch: {options: {q: long.q}}
site_defaults: false
"""


def test_the_documented_batch_system_takes_a_run_through_all_commands(
    tmp_path, grid_engine, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(OF_GRID_ENGINE)

    def pipectl(*arguments):
        capsys.readouterr()
        code = main([*arguments])
        out, err = capsys.readouterr()
        assert code == 0, out + err
        return json.loads(out) if "--json" in arguments else out

    def submit(*arguments):
        return Path(pipectl("submit", "job.yaml", *arguments, "--json")["directory"])

    def until(run, state):
        def status():
            found = pipectl("status", run.name, "--json")
            return found if found["state"] == state else None

        return wait_until(status, 100, 0.05)

    first = submit()
    status = until(first, "RUNNING")
    assert (status["scheduler"], status["job_id"]) == ("gridengine", "41")
    assert "#$ -q long.q\n" in (first / "job.sh").read_text()
    second = submit("--set", "name=second", "--after", first.name)
    until(second, "HELD")
    (first / "go").touch()
    until(first, "COMPLETED")
    until(second, "RUNNING")
    assert "the ranks have trained" in pipectl("logs", first.name)
    pipectl("cancel", second.name)
    until(second, "CANCELLED")
    pipectl("resume", second.name)
    assert until(second, "RUNNING")["job_id"] == "43"
    (second / "go").touch()
    until(second, "COMPLETED")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise OSError('no licence')", "cannot be loaded: OSError: no licence"),
        ("class GridEngine: ...", "is none"),
        ("from pipectl.batch import Scheduler\nclass GridEngine(Scheduler): ...", "lacks cancel,"),
    ],
)
def test_a_package_whose_class_is_no_batch_system_is_named(grid_engine, source, why):
    place = grid_engine.parent / "site" / "my_package" / "gridengine.py"
    place.write_text(source)
    with pytest.raises(UsageError, match=re.escape(f"my_package.gridengine:GridEngine, {why}")):
        get_scheduler("gridengine")
