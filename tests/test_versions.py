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
