"""Requests to render, nasty strings, and pretended commands of PBS."""

import json
from functools import partial

import pytest

from tests.batch import job_requests
from tests.batch.fakes import DATA, FakeCommands


@pytest.fixture
def pbs(tmp_path, monkeypatch):
    """Programs that hide all others but those of the system."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return FakeCommands(tmp_path / "bin", "pbs")


@pytest.fixture
def nasty():
    return json.loads((DATA / "nasty.json").read_text())


@pytest.fixture
def make_request(tmp_path):
    """A small request in ``tmp_path``, with changes."""
    return partial(job_requests.make_request, tmp_path / "run")
