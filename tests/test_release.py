"""What is released: its versions and bounds, and files that are complete and of no machine."""

from __future__ import annotations

import ast
import importlib.metadata
import platform
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import Version

import pipectl
from pipectl import versions
from pipectl.versions import NEWEST_TORCH, OLDEST_TORCH, OLDEST_TYPER
from tests.docs.distribution import wheel
from tests.docs.man_pages import commands_of
from tests.docs.pages import CHECKOUT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it

PYPROJECT: dict[str, Any] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
PROJECT, BUILD = PYPROJECT["project"], PYPROJECT["build-system"]
CITATION: dict[str, Any] = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def lower_bound(asked: Requirement) -> Specifier:
    return next(bound for bound in asked.specifier if bound.operator != "<")


def test_the_last_release_is_the_same_everywhere_and_the_version_is_it_or_the_next() -> None:
    text = (CHECKOUT / "CHANGELOG.md").read_text()
    released, date = re.findall(r"^## \[(\d\S*)\] - (\S+)$", text, re.MULTILINE)[0]
    assert (released, date) == (CITATION["version"], CITATION["date-released"])
    version = Version(pipectl.__version__)
    assert version == Version(released) or (version.is_devrelease and version > Version(released))


def test_recipes_have_the_version_and_the_lower_bounds_of_the_project() -> None:
    """In ``docs/packaging.md``, for Spack and conda-forge."""
    text = (CHECKOUT / "docs" / "packaging.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```\w+ (spack|conda)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    asked = map(Requirement, PROJECT["dependencies"] + BUILD["requires"])
    needed = {each.name: lower_bound(each).version for each in asked}
    needed["python"] = PROJECT["requires-python"].removeprefix(">=")

    calls = [each for each in ast.walk(ast.parse(blocks["spack"])) if isinstance(each, ast.Call)]
    spack = [ast.unparse(each.func) + " " + ast.literal_eval(each.args[0]) for each in calls]
    version = Version(pipectl.__version__).base_version
    assert {f"version {version}", f"license {PROJECT['license']}"} <= set(spack)
    assert dict(re.findall(r"depends_on (?:py-)?(\S+)@(\S+):", "\n".join(spack))) == needed

    conda = yaml.safe_load(blocks["conda"])
    named = conda["requirements"]["host"] + conda["requirements"]["run"]
    needed["pytorch"] = needed.pop("torch")
    assert conda["context"] == {"version": version, "python_min": needed.pop("python")}
    assert dict(re.findall(r"(\S+) >=([\d.]+)", "\n".join(named))) == needed
    assert conda["build"]["python"]["entry_points"] == [
        f"pipectl = {PROJECT['scripts']['pipectl']}"
    ]


FROM_SOURCE = {"mpi4py"}
"""Whose lowest version has no wheel: the lowest that has one is tried."""


def test_lower_bounds_are_the_versions_that_were_tried() -> None:
    tried = dict(
        line.split("==")
        for line in (CHECKOUT / "constraints-lowest.txt").read_text().split("\n")
        if "==" in line
    )
    extras = PROJECT["optional-dependencies"]
    asked = PROJECT["dependencies"] + extras["mpich"] + extras["examples"]
    bounds = {one.name: lower_bound(one) for one in map(Requirement, asked)}
    assert tried.keys() == bounds.keys()
    for name, bound in bounds.items():
        assert bound.operator == ">=", name
        versions = f">={bound.version}" if name in FROM_SOURCE else f"=={bound.version}.*"
        assert Version(tried[name]) in Requirement(f"{name}{versions}").specifier, name


def test_the_lower_bounds_are_the_first_releases_that_were_tested_and_none_is_an_upper() -> None:
    bounds = {one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"])}
    assert bounds["torch"] == SpecifierSet(f">={OLDEST_TORCH}"), "a new release gives a warning"
    assert bounds["typer"] == SpecifierSet(f">={OLDEST_TYPER}")
    assert {bound.operator for every in bounds.values() for bound in every} == {">="}
    assert f"\nTORCH ?= {NEWEST_TORCH}\n" in (CHECKOUT / "Makefile").read_text()


@pytest.mark.parametrize("page", ["install.md", "administrators.md"])
def test_on_a_torch_of_the_site_all_other_dependencies_are_installed_by_name(page: str) -> None:
    text = (CHECKOUT / "docs" / page).read_text(encoding="utf-8")
    listed = next(re.finditer(r"^pip install .*?(mpi4py .*)$", text, re.MULTILINE))[1].split()
    needed = map(Requirement, PROJECT["dependencies"])  # what older Pythons need, pydantic brings
    assert set(listed) == {each.name for each in needed if not each.marker} - {"torch"}


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("2.7.1", False),
        ("2.8.0+cpu", True),
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
    fault = f"tested with torch 2.8 to 2.15; this is {version}"
    assert versions.untested("torch") == ("" if tested else fault)


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
    assert {name for name in names if not re.search(r"\.(dist-info|data)/", name)} == package
    rest = {re.sub(r".*(dist-info|man1)/", "", name) for name in names - package}
    assert rest == METADATA | {f"{each.replace(' ', '-')}.1" for each in commands_of()}
    assert {"pipectl/py.typed", "pipectl/cli/starter/job.yaml.j2"} <= names


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """The files that git knows, and those that it would take."""
    if not (CHECKOUT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = ["git", "-C", str(CHECKOUT), "ls-files", "-zco", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name for name in names if name and (CHECKOUT / name).is_file()}


def test_the_source_distribution_is_the_whole_repository(tracked: set[str], built: Path) -> None:
    with tarfile.open(next(built.parent.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked - names == set()
    added = {name for name in names if not name.startswith("build/man/")}  # by make dist
    assert added - tracked - {"PKG-INFO"} == set()


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
