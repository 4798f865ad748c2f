"""Every command of the README runs; those of the walk-through do in test_walkthrough.py."""

import re

import pytest
from pages import CHECKOUT, PAGES, blocks, script
from reader import bash, directory_of_a_reader

SHORTER = {
    "pipectl submit first/job.yaml": "{} --set training.steps=10 --set model.kwargs.layers=2",
    "pipectl profile configs/gpt-stdlib.yaml": "{} --effort fast",
}
"""Commands that do the same with less: measure for a shorter time, train a smaller model."""


@pytest.fixture
def reader(tmp_path, warm_commands):
    """An empty directory, but for shorter jobs of the checkout."""
    directory_of_a_reader(tmp_path / "reader", warm_commands)
    return tmp_path / "reader"


@pytest.mark.mpi
@pytest.mark.timeout(900)
def test_commands_of_the_readme_run(reader):
    text = script(CHECKOUT / "README.md", "")
    for command, shorter in SHORTER.items():
        assert command in text
        text = text.replace(command, shorter.format(command))
    bash(text, reader)


def test_commands_of_the_set_up_are_those_of_make_and_of_packages():
    targets = re.findall(r"^([\w-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
    known = ("pip install ", "pip wheel ", "python3 -m venv ", "sudo apt-get install ", "    ")
    known += (".venv/bin/python -m pytest ",)
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.needs == "setup":
                for line in block.commands:
                    made = re.match(r"make ([\w-]+)", line)
                    assert made[1] in targets if made else line.startswith(known), line
