"""What is released: its versions and bounds, and files that are complete and of no machine."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from distribution import source_distribution, wheel
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pages import CHECKOUT

import pipectl
from pipectl import versions
from pipectl.versions import NEWEST_TORCH, OLDEST_TORCH

PROJECT: dict[str, Any] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
CITATION: dict[str, Any] = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_the_version_is_the_same_everywhere() -> None:
    assert pipectl.__version__ == PROJECT["version"] == CITATION["version"]
    text = (CHECKOUT / "CHANGELOG.md").read_text()
    newest = re.findall(r"^## \[(\d\S*)\] - (\S+)$", text, re.MULTILINE)[0]
    assert newest == (CITATION["version"], CITATION["date-released"])


def test_lower_bounds_are_the_versions_that_were_tried() -> None:
    tried = dict(
        line.split("==")
        for line in (CHECKOUT / "constraints-lowest.txt").read_text().split("\n")
        if "==" in line
    )
    extras = PROJECT["optional-dependencies"]
    asked = PROJECT["dependencies"] + extras["mpich"] + extras["examples"]
    bounds = {
        one.name: next(bound for bound in one.specifier if bound.operator != "<")
        for one in map(Requirement, asked)
    }
    assert tried.keys() == bounds.keys()
    for name, bound in bounds.items():
        assert bound.operator == ">=", name
        assert Version(tried[name]) in Requirement(f"{name}=={bound.version}.*").specifier, name


def test_the_bounds_of_torch_are_the_releases_that_were_tested() -> None:
    torch = next(one for one in map(Requirement, PROJECT["dependencies"]) if one.name == "torch")
    major, minor = NEWEST_TORCH.split(".")
    assert torch.specifier == SpecifierSet(f">={OLDEST_TORCH},<{major}.{int(minor) + 1}")
    assert f"\nTORCH ?= {NEWEST_TORCH}\n" in (CHECKOUT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("2.12.1", False),
        ("2.13.0+cpu", True),
        ("2.14.0a0+git1234", True),
        ("2.15.3", True),
        ("2.16.0.dev20270101", False),
        ("3.0", False),
    ],
)
def test_a_torch_outside_the_tested_range_is_named_beside_it(
    monkeypatch: pytest.MonkeyPatch, version: str, tested: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    fault = f"tested with torch 2.13 to 2.15; this is {version}"
    assert versions.untested_torch() == (None if tested else fault)


def test_a_report_has_the_versions_of_all_that_takes_part() -> None:
    torch, mpi4py = (importlib.metadata.version(name) for name in ("torch", "mpi4py"))
    expected = f"pipectl {pipectl.__version__}, torch {torch}, mpi4py {mpi4py}, Python "
    assert versions.installed_versions() == expected + platform.python_version()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    names = set(zipfile.ZipFile(built).namelist())

    def files(folder: Path, place: str) -> set[str]:
        found = (path for path in folder.rglob("*") if path.is_file())
        return {
            f"{place}/{path.relative_to(folder).as_posix()}"
            for path in found
            if "__pycache__" not in path.parts
        }

    package = files(CHECKOUT / "pipectl", "pipectl") | files(
        CHECKOUT / "configs", "pipectl/recipes"
    )
    names = {name for name in names if "__pycache__" not in name}
    assert {name for name in names if ".dist-info/" not in name} == package
    assert {name.partition(".dist-info/")[2] for name in names - package} == METADATA
    assert {"pipectl/py.typed", "pipectl/cli/starter/job.yaml.j2"} <= names


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """The files that git knows, and those that it would take."""
    if not (CHECKOUT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = ["git", "-C", str(CHECKOUT), "ls-files", "-zco", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name for name in names if name and (CHECKOUT / name).is_file()}


def test_the_source_distribution_is_the_whole_repository(tracked: set[str], tmp_path: Path) -> None:
    with tarfile.open(source_distribution(tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked - names == set()
    assert names - tracked - {"PKG-INFO"} == set()


# Written in two parts, so that this file does not contain them.
MACHINE_PATHS = ("/wo" "rk/", "/tmp/" "dev", "/opt/" "wheels", "/ro" "ot/")  # fmt: skip


def test_no_file_mentions_a_path_of_one_machine(tracked: set[str]) -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in sorted(tracked)
        for number, line in enumerate(
            (CHECKOUT / name).read_text(encoding="utf-8", errors="replace").split("\n"), 1
        )
        if any(path in line for path in MACHINE_PATHS)
    ]
    assert found == []
