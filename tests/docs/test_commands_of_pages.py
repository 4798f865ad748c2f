"""Every command of the README runs; those of the walk-through do in test_walkthrough.py."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pages import CHECKOUT, PAGES, blocks, script
from reader import bash, directory_of_a_reader, shortened

from pipectl.cluster import assumed_cluster

FAKES = {
    "sbatch": '[[ $* == *--test-only* ]] && { echo "sbatch: Job 7 to start at noon" >&2; exit; }\n'
    "echo 7",
    "squeue": "true",
    "sacct": "true",
    "scancel": "true",
    "scontrol": "exit 1",
    "sinfo": "true",
    "srun": "true",
    "qsub": "echo 7.vm",
    "qstat": r"printf 'Job Id: 7.vm\n    job_state = Q\n'",
    "qselect": "true",
    "qdel": "true",
}
TO_RUN = [page for page in PAGES if page.name == "README.md" and script(page, "", "site")]
pytestmark = [pytest.mark.mpi, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, warm_commands: str) -> Path:
    """A directory with the jobs that the pages name, their profiles, and a finished run."""
    folder = tmp_path_factory.mktemp("reader")
    directory_of_a_reader(folder, warm_commands)
    bash("pipectl init .", folder)
    shortened(folder / "job.yaml", folder / "job.yaml", name="job")
    bash("pipectl submit job.yaml --scheduler local --wait", folder)
    for job in sorted((folder / "configs").glob("*.yaml")):
        bash(f"pipectl profile configs/{job.name} --effort fast --scheduler local", folder)
    return folder


@pytest.fixture
def reader(prepared: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it; what still runs there in the end is cancelled."""
    folder = tmp_path / "reader"
    shutil.copytree(prepared, folder, symlinks=True)
    yield folder
    for run in sorted((folder / "runs").glob("2*")):
        if not (run / "exit_code").exists():
            subprocess.run(["bin/pipectl", "cancel", run.name], cwd=folder, capture_output=True)


def give(folder: Path, page: Path, text: str) -> str:
    """Put there what the commands of a page name, and name runs that are there."""
    for name in set(re.findall(r"(?<![\w./-])([\w-]+\.yaml)", text)):
        if not (folder / name).exists():
            shortened(folder / "job.yaml", folder / name, name=Path(name).stem)
    model = (
        (folder / "model.py").read_text().replace("width: int, layers: int", "width=64, layers=4")
    )
    (folder / "my_model.py").write_text(model)
    for name in set(re.findall(r"(?<![\w./-])([\w.-]+\.json)", text)):
        if name == "cluster.json":
            assumed_cluster("mine", [2], 2, None).save(folder / name)
        elif "--profile" in text:
            shutil.copy(folder / "runs" / "job.profile.json", folder / name)
    for body in re.findall(r"^```yaml\n(# job.yaml.*?)^```", page.read_text(), re.M | re.S):
        job = yaml.safe_load((folder / "job.yaml").read_text())
        (folder / "job.yaml").write_text(yaml.safe_dump({**job, **yaml.safe_load(body)}))
    for body in re.findall(
        r"^```csv(?: \w+)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        (folder / "mine.csv").write_text(body)
    (finished,) = (folder / "runs").glob("2*-job")
    for name in set(re.findall(r"\b\d{8}-\d{6}-[\w-]+", text)):
        shutil.copytree(finished, folder / "runs" / name, symlinks=True)
    count = 0
    while "pipectl resume RUN" in text:  # of each a run of its own, that stopped half-way
        count += 1
        stopped = folder / "runs" / f"20260101-00000{count}-stopped"
        shutil.copytree(finished, stopped, symlinks=True)
        shutil.rmtree(stopped / "checkpoints" / "step-000006")
        (stopped / "exit_code").write_text("1\n")
        text = text.replace("pipectl resume RUN", f"pipectl resume {stopped.name}", 1)
    return text.replace(" RUN", f" {finished.name}").replace(" STEP", " 3")


@pytest.mark.parametrize("page", TO_RUN, ids=lambda page: page.name)
def test_commands_run(page: Path, reader: Path) -> None:
    needs = [kind for kind in ("", "site") if script(page, kind)]
    for kind in needs:
        if kind == "site":
            for name, body in FAKES.items():
                (reader / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
                (reader / "bin" / name).chmod(0o755)
        bash(give(reader, page, script(page, kind)), reader)


def test_commands_of_the_set_up_are_those_of_make_and_of_packages() -> None:
    targets = re.findall(r"^([\w-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
    known = ("pip install ", "pip wheel ", "python3 -m venv ", "sudo apt-get install ", "    ")
    known += (".venv/bin/python -m pytest ",)
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.needs == "setup":
                for line in block.commands:
                    made = re.match(r"make ([\w-]+)", line)
                    assert made[1] in targets if made else line.startswith(known), line


def test_no_command_stands_elsewhere() -> None:
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"^    (?:\$ )?(?:pipectl|slurm/lab/\w+) .*", text, re.MULTILINE) == []


@pytest.mark.parametrize("command", ["pipectl chekc job.yaml", "pipectl check job.yaml  # fails"])
def test_what_does_not_do_what_it_says_is_found(reader: Path, command: str) -> None:
    page = reader / "page.md"
    page.write_text(f"```sh\n{command}\npipectl check job.yaml\n```\n")
    with pytest.raises(AssertionError, match=r"@@ reader/page\.md:2"):
        bash(script(page, ""), reader)
