"""The deliberate faults of ``tests/benchmarks/mutants.py``, which are made there only on demand."""

import importlib
from pathlib import Path


def test_each_fault_can_be_made_in_the_code_as_it_is(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).with_name("benchmarks"))
    mutants = importlib.import_module("mutants")
    faults = mutants.read_faults(())
    assert len(faults) > 50
    mutants.check_texts(faults)
