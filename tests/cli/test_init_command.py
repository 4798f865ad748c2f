"""`pipectl init`: jobs for the cluster at hand, which pass `check` and render."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipectl.cli.commands import init
from pipectl.spec import load

DATA = Path(__file__).parents[1] / "data" / "scheduler"


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


BIG = "debug*|30:00|4|8|16000|(null)|up|1-infinite\nlong|infinite|64|128|256000|gpu:4|up|1-infinite"
CLUSTERS = {
    "tiny": "tiny*|0:05:00|2|1|1000|(null)|up|1-infinite",
    "big": "big*|1:00:00|4|8|64000|(null)|up|1-infinite",
    "two": BIG,
    "gpus": "gpus*|1:00:00|4|32|64000|gpu:a100:4|up|1-infinite",
    "gpu": "gpus*|1:00:00|4|32|64000|gpu:1|up|1-infinite",
    "hostile": 'a"}: {b,#*|1:00:00|1|2|9000|(null)|up|1-infinite',
    "others": "root*|1:00:00|4|8|64000|(null)|up|1-infinite|yes|all\n"
    "empty|1:00:00|0|8|64000|(null)|up|1-infinite|no|all\n"
    "ours|30:00|4|8|16000|(null)|up|1-infinite|no|all",
    "down": "sinfo: error: no controller",
}
"""What `sinfo` prints."""
SECTIONS = r"name|pipeline|resources|slurm|pbs|launch|output|# .*: \d+ nodes"
LINES = [
    *("tiny", "big", "two", "two --partition long", "gpus", "gpu", "hostile"),
    *("hostile --scheduler local", "down --partition any", "down --scheduler slurm"),
    *("CPU gpus", "PBS", "others"),
]
"""A cluster and options; after CPU, with a torch without GPUs."""


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
    hostile = load(Path(f"job-{LINES.index('hostile')}/job.yaml"), sites=())
    assert hostile.slurm.partition == 'a"}: {b,#'


@pytest.mark.parametrize(
    ("directory", "evaluation", "name", "best"),
    [
        (
            "lr3",
            {"data": {"factory": "script", "kwargs": {"loader": "l"}}, "every": 4},
            "lr3",
            True,
        ),
        ("run", {}, "train", None),
        (".", {}, "train", None),
    ],
)
def test_a_job_of_a_script_is_named_by_its_directory_and_keeps_the_best_weights(
    cli, monkeypatch, directory, evaluation, name, best
):
    """If the directory has a name that says something, and if there are evaluations."""
    Path("train.py").touch()
    values = {
        "file": str(Path("train.py").absolute()), "arguments": [], "directory": "",
        "drawn_between_epochs": 0, "training": {"batch_size": 8, "steps": 9},
        "sections": {"evaluation": evaluation}, "micro_batches": "auto", "guessed": [],
        "comments": [],
    }  # fmt: skip
    monkeypatch.setattr(init, "take_script", lambda *_: SimpleNamespace(values=values))
    monkeypatch.setattr(init, "try_script", lambda *_: None)
    assert cli("init", directory, "--script", "train.py", "--scheduler", "local").code == 0
    spec = load(Path(directory, "job.yaml"))
    assert (spec.name, spec.checkpoint.keep_best) == (name, best)


PLACEHOLDERS = {
    "lora-llm": ["model.kwargs.base", "data.kwargs.file", "data.kwargs.base"],
    "vit-images": ["data.kwargs.root", "evaluation.data.kwargs.root"],
}


def test_a_recipe_is_copied_with_its_code(cli):
    names = [line.split()[0] for line in cli("init", "--recipe", "list").out.splitlines()]
    assert {"gpt-stdlib", "names-seq2seq", "lora-llm"} <= set(names)
    for name in names:
        cli("init", name, "--recipe", name)
        checked = cli("check", f"{name}/{name}.yaml")
        # Packages that a recipe needs are not those that the tests need.
        faults = [line for line in checked.err.splitlines() if "does not have" not in line]
        lines = [line.split(": ", 3) for line in faults]
        assert [key for _, _, key, _ in lines] == PLACEHOLDERS.get(name, []), checked.err
        assert all(line[-1].endswith("recipe; write your own path") for line in lines)
    made = ("models/digits.py", "job.schema.json", "models/gpt.py")
    assert [Path("digits-cnn", file).is_file() for file in made] == [True, True, False]


@pytest.mark.parametrize(("mask", "modes"), [(0o022, (0o755, 0o644)), (0o077, (0o700, 0o600))])
def test_a_job_for_this_machine_takes_its_share_of_the_memory_and_has_usual_permissions(
    cli, mask, modes
):
    before = os.umask(mask)
    try:
        assert cli("init", "a/b", "--scheduler", "local").code == 0
        assert cli("init", "recipe", "--recipe", "gpt-stdlib").code == 0
    finally:
        os.umask(before)
    for root in (Path("a"), Path("recipe")):
        for path in (root, *root.rglob("*")):
            assert path.stat().st_mode & 0o777 == modes[path.is_file()], path
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    spec = load(Path("a/b/job.yaml"), sites=())
    assert spec.pipeline.memory_limit == pytest.approx(0.45 * total, rel=0.03)
