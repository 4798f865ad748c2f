"""Which versions of torch count as tested, and what a report of a fault says of versions."""

from __future__ import annotations

import importlib.metadata
import platform

import pytest

import pipectl
from pipectl import versions


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
def test_only_releases_within_the_range_were_tested(version: str, tested: bool) -> None:
    assert versions.is_tested_torch(version) is tested


def test_an_untested_torch_is_named_beside_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda _: "2.99.1+cpu")
    assert versions.untested_torch() == "tested with torch 2.13 to 2.15; this is 2.99.1+cpu"
    monkeypatch.setattr(versions, "version", lambda _: "2.14.0")
    assert versions.untested_torch() is None


def test_a_report_has_the_versions_of_all_that_takes_part() -> None:
    torch, mpi4py = (importlib.metadata.version(name) for name in ("torch", "mpi4py"))
    expected = f"pipectl {pipectl.__version__}, torch {torch}, mpi4py {mpi4py}, Python "
    assert versions.installed_versions() == expected + platform.python_version()
