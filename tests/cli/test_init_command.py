"""`pipectl init`: jobs for the cluster at hand, which pass `check` and render."""

import json
import os
import re
from pathlib import Path

import pytest

from pipectl.cli.commands import init
from pipectl.spec import JobSpec, load
from pipectl.spec.schema import json_schema

DATA = Path(__file__).parents[1] / "data" / "scheduler"


def written(path: str = "job.yaml") -> JobSpec:
    """The job, without the defaults of this site."""
    return load(Path(path), sites=())


@pytest.fixture(autouse=True)
def torch_for_gpus(monkeypatch):
    monkeypatch.setattr(init, "installed_version", lambda _: "2.13.0")


def printing(text: str) -> str:
    """A command that prints this."""
    return f"cat <<'END'\n{text}\nEND\n"


@pytest.fixture
def sinfo(program):
    """Pretend that `sinfo` prints this."""

    def prints(text, rc=0):
        program("sbatch", "exit 1")
        program("sinfo", f"{printing(text)}exit {rc}")

    return prints


@pytest.fixture
def pbs(program):
    def sample(name):
        return printing("\n".join((DATA / "pbs" / name).read_text().splitlines()[1:-1]))

    for command in ("qsub", "qselect"):
        program(command, "exit 1")
    program("pbsnodes", sample("pbsnodes-a.txt"))
    listed = f"{sample('qstat-Q-f.txt')}else\n{sample('qstat-B-f.txt')}fi"
    program("qstat", f"if [[ $1 == -Q ]]; then\n{listed}")


BIG = "debug*|30:00|4|8|16000|(null)|up\nlong|infinite|64|128|256000|gpu:4|up"


CLUSTERS = {
    "tiny": "tiny*|0:05:00|2|1|1000|(null)|up",
    "big": "big*|1:00:00|4|8|64000|(null)|up",
    "two": BIG,
    "gpus": "gpus*|1:00:00|4|32|64000|gpu:a100:4|up",
    "gpu": "gpus*|1:00:00|4|32|64000|gpu:1|up",
    "hostile": 'a"}: {b,#*|1:00:00|1|2|9000|(null)|up',
    "down": "sinfo: error: no controller",
}
"""What `sinfo` prints."""
FLAGS = "--partition long --nodes 3 --tasks-per-node 4 --cpus-per-task 8 --gpus-per-node 4"
FLAGS += " --memory 100GiB --walltime 2h --name mine"
SECTIONS = r"name|pipeline|resources|slurm|pbs|launch|output|# .*: \d+ nodes"
LINES = [
    *("tiny", "big", f"two {FLAGS}", "gpus", "gpu", "gpu --gpus-per-node 0", "hostile"),
    *("hostile --scheduler local", "down --partition any", "down --scheduler slurm"),
    *("CPU gpus", "CPU gpus --gpus-per-node 1", "PBS --account my#project", "tiny --walltime 3"),
    "tiny --memory 10KiB",
]
"""A cluster and options; after CPU, with a torch without GPUs."""
REFUSED = [
    *("--partition log", "--nodes 5", "--tasks-per-node 3 --cpus-per-task 3", "--walltime 31m"),
    *(
        "--memory 17GB",
        "--memory 16",
        "--name a&b",
        "--model model",
        "--model=",
        "--model gone.py:f",
    ),
]


def test_jobs_for_the_cluster_at_hand(cli, sinfo, pbs, monkeypatch, golden):
    texts = []
    for number, line in enumerate(LINES):
        cluster, *options = line.removeprefix("CPU ").split()
        sinfo(CLUSTERS.get(cluster, ""), rc=int(cluster == "down"))
        if cluster == "PBS":
            Path("bin/sbatch").unlink()
        with monkeypatch.context() as patch:
            if line.startswith("CPU "):
                patch.setattr(init, "installed_version", lambda _: "2.13.0+cpu")
            result = cli("init", f"job-{number}", *options)
        assert result.code == 0, result.err
        assert cli("check", f"job-{number}/job.yaml").code == 0
        rows = Path(f"job-{number}/job.yaml").read_text().splitlines()
        shown = [row for row in rows if re.match(SECTIONS, row)]
        texts.append("\n".join([f"# {line}", *result.err.splitlines(), *shown, ""]))
        texts.append(result.out.splitlines()[-1] + "\n")
    golden(*texts, vary=r"(?<=memory_limit: )[\d.]+.iB(?=}\nresources: .*\nlaunch)")
    hostile = written(f"job-{LINES.index('hostile')}/job.yaml")
    assert hostile.slurm.partition == 'a"}: {b,#'


def test_jobs_that_the_cluster_cannot_run(cli, sinfo, golden):
    sinfo(BIG)
    texts = []
    for line in REFUSED:
        result = cli("init", *line.split())
        assert (result.code, result.out, Path("job.yaml").exists()) == (2, "", False)
        texts.append(f"# {line}\n{result.err}".replace(f"{Path.cwd()}/", ""))
    golden(*texts)


def test_on_this_machine_a_rank_may_hold_its_share_of_the_memory(cli):
    assert cli("init").code == 0
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert written().pipeline.memory_limit == pytest.approx(0.45 * total, rel=0.03)


def test_a_model_of_ones_own(cli):
    Path("code").mkdir()
    Path("code/it's mine.py").write_text("def build(): ...\ndef samples(): ...\n")
    result = cli(
        "init", "jobs/first", "--model", "code/it's mine.py:build", "--data",
        "code/it's mine.py:samples", "--loss", "torch.nn:MSELoss",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert not Path("jobs/first/model.py").exists()
    text = Path("jobs/first/job.yaml").read_text()
    assert '"../../code/it\'s mine.py:build"' in text
    assert cli("check", "jobs/first/job.yaml").code == 0
    spec = written("jobs/first/job.yaml")
    assert spec.loss.factory == "torch.nn:MSELoss"
    assert spec.data.factory.endswith(":samples")
    Path("far/away").mkdir(parents=True)
    Path("near").symlink_to("far/away")
    code = ("--model", "code/it's mine.py:build", "--data", "code/it's mine.py:samples")
    assert cli("init", "near/first", *code).code == 0
    assert cli("check", "near/first/job.yaml").code == 0


@pytest.mark.parametrize(("directory", "name"), [("new", "../pkg.net"), (".", "pkg.net")])
def test_a_package_beside_the_current_directory_is_reached_from_the_job(cli, directory, name):
    Path("pkg").mkdir()
    Path("pkg/__init__.py").touch()
    Path("pkg/net.py").write_text(
        "class Net: ...\ndef training_data(): ...\ndef held_out_data(): ...\n"
    )
    result = cli("init", directory, "--model", "pkg.net:Net", "--loss", "model")
    assert result.code == 0, result.err
    result = cli("check", f"{directory}/job.yaml")
    assert result.code == 0, result.err
    spec = written(f"{directory}/job.yaml")
    assert spec.loss.factory == "model"
    assert f"{name}:Net" in Path(directory, "job.yaml").read_text()
    assert spec.model.factory == f"{Path.cwd()}/pkg.net:Net"
    assert spec.evaluation is not None
    assert spec.evaluation.data.factory == f"{Path.cwd()}/pkg.net:held_out_data"


@pytest.mark.parametrize(
    ("names", "chosen"),
    [(["val"], "val"), (["test_set", "validation"], "validation"), (["test", "validate"], None)],
)
def test_held_out_data_is_recognized_by_its_usual_names(cli, names, chosen):
    functions = "".join(f"def {name}(): ...\n" for name in ["training_data", *names])
    Path("mine.py").write_text(f"class Net: ...\n{functions}")
    assert cli("init", "--model", "mine.py:Net").code == 0
    evaluation = written().evaluation
    factory = evaluation and evaluation.data.factory
    assert factory == (chosen and f"{Path.cwd()}/mine.py:{chosen}")
    comment = '# evaluation: {data: {factory: "./mine.py:held_out_data"}, every: 50}'
    assert (comment in Path("job.yaml").read_text()) is (chosen is None)


def test_a_recipe_is_copied_with_its_code(cli):
    names = [line.split()[0] for line in cli("init", "--recipe", "list").out.splitlines()]
    assert {"gpt-stdlib", "names-seq2seq", "lora-llm"} <= set(names)
    for name in names:
        cli("init", name, "--recipe", name)
        checked = cli("check", f"{name}/{name}.yaml")
        lines = [line.partition(": ")[2] for line in checked.err.splitlines()]
        placeholders = {
            "lora-llm": ["model.kwargs.base", "data.kwargs.file", "data.kwargs.base"],
            "vit-images": ["data.kwargs.root", "evaluation.data.kwargs.root"],
        }.get(name, [])
        assert [line.split(": ")[1] for line in lines] == placeholders, checked.err
        assert all(
            line.endswith("placeholder of the recipe; write your own path") for line in lines
        )
    assert Path("digits-cnn/models/digits.py").is_file()
    assert Path("digits-cnn/job.schema.json").is_file()
    assert not Path("digits-cnn/models/gpt.py").exists()
    for options, message in (
        (["gpt-stdlb"], "no recipe 'gpt-stdlb'; did you mean 'gpt-stdlib'?"),
        (["gpt-stdlib", "--nodes", "2"], "--nodes: has no effect with --recipe"),
        (["gpt-stdlib", "--scheduler", "local"], "then set launch.scheduler in its job file"),
    ):
        done = cli("init", "first", "--recipe", *options)
        assert (done.code, message in done.err, Path("first").exists()) == (2, True, False)


def test_a_job_that_passes_check_with_the_schema_it_names_and_a_model(cli):
    result = cli("init", "new", "--walltime", "10")
    assert (result.code, result.out) == (
        0,
        "written: new/job.yaml\nwritten: new/job.schema.json\nwritten: new/model.py\n"
        "next: pipectl submit new/job.yaml --wait\n",
    )
    assert cli("check", "new/job.yaml").out == "new/job.yaml: valid; 2 ranks, 100 steps\n"
    assert written("new/job.yaml").resources.walltime == 600, "a number alone is minutes"
    first = Path("new/job.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=./job.schema.json"
    assert json.loads(Path("new/job.schema.json").read_text()) == json_schema()


def test_where_one_file_cannot_be_written_none_is(cli):
    Path("new/model.py").mkdir(parents=True)
    result = cli("init", "new", "--force")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: new/model.py: is a directory\n")
    assert not Path("new/job.yaml").exists()
    Path("file").touch()
    result = cli("init", "file/new")
    assert result.code == 2
    assert result.err.startswith("error: file/new: cannot be created: Not a directory\n")


def test_on_a_terminal_it_asks_for_what_is_not_given(cli, sinfo, monkeypatch):
    sinfo(BIG)
    answers = {"Partition": "long", "Ranks on each node": "6", "Memory of each node": "default"}
    asked = []

    def prompt(text, *, default, value_proc=str):
        asked.append((text, default))
        return value_proc(next((a for key, a in answers.items() if text.startswith(key)), default))

    monkeypatch.setattr(init, "is_terminal", lambda: True)
    monkeypatch.setattr("typer.prompt", prompt)
    result = cli("init", "--nodes", "2")
    assert result.code == 0
    assert result.err.startswith("long: 64 nodes, each with at least ")
    assert asked == [
        ("Partition or queue (debug, long)", "debug"), ("Ranks on each node", "2"),
        ("Cores of each rank", "1"), ("GPUs of each node", "2"),
        ("Memory of each node", "4096MiB"), ("Walltime", "00:10:00"),
    ]  # fmt: skip
    spec = written()
    assert (spec.resources.nodes, spec.resources.tasks_per_node) == (2, 6)
    assert spec.resources.memory_per_node is None

    asked.clear()
    assert cli("init", "other", "--yes").code == 0
    monkeypatch.setattr(init, "is_terminal", lambda: False)
    assert cli("init", "more").code == 0
    assert asked == []


def test_init_replaces_nothing_unless_told(cli):
    Path("model.py").write_text("mine")
    result = cli("init")
    assert result.code == 2
    assert result.err.startswith("error: model.py: already exists\n")
    assert not Path("job.yaml").exists()
    assert Path("model.py").read_text() == "mine"
    assert cli("init", "--force").code == 0
    assert Path("model.py").read_text() != "mine"


@pytest.mark.parametrize(("mask", "modes"), [(0o022, (0o755, 0o644)), (0o077, (0o700, 0o600))])
def test_what_it_writes_has_the_permissions_of_the_umask(cli, mask, modes):
    before = os.umask(mask)
    try:
        assert cli("init", "a/b", "--scheduler", "local").code == 0
        assert cli("init", "recipe", "--recipe", "gpt-stdlib").code == 0
    finally:
        os.umask(before)
    for root in (Path("a"), Path("recipe")):
        for path in (root, *root.rglob("*")):
            assert path.stat().st_mode & 0o777 == modes[path.is_file()], path


def test_a_model_that_its_file_does_not_define_is_named_before_submission(cli):
    Path("net.py").write_text("class Net: ...\ndef training_data(): ...\n")
    result = cli("init", "--model", "net.py:Nope", "--scheduler", "local")
    assert result.code == 0
    assert "model.factory: " in result.err
    assert "net.py defines no 'Nope'" in result.err
    assert result.out.endswith("next: correct this, then pipectl check job.yaml\n")
