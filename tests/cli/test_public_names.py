"""The public names: which they are, that each is explained and typed, and what they load."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pipectl

NAMES = """
Best CaptureError DataFileError FaultError InfeasibleError InvalidInputError Job MismatchError
OutOfTimeError PipectlError Plan Profile Run ScheduleError SchedulerError SpecError UnknownRunError
UsageError WorkerError runs
"""
MEMBERS = {
    "Job": "check name plan profile scheduler submit submit_sweep to_yaml",
    "Plan": "bubble micro_batches name peak_memory_bytes ranks samples_per_s save schedule stages "
    "step_time_s summary svg timeline to_json warnings",
    "Run": "best cancel export logs metrics name path resume state state_dict status wait warnings",
}
LOADS = """
import sys
import pipectl
assert not [name for name in sys.modules if name.startswith("pipectl.")]
pipectl.Job, pipectl.runs, pipectl.SpecError
assert not {*"torch mpi4py.MPI typer rich llvmlite jinja2 psutil".split()} & {*sys.modules}
assert pipectl.runs("nowhere") == [] and pipectl.runs.RunDirectory
from pipectl import runs
assert runs("nowhere") == []
"""


def members(kind):
    return {name: each for name, each in vars(kind).items() if not name.startswith("_")}


def test_the_public_names_are_exactly_these():
    assert sorted(pipectl.__all__) == NAMES.split()
    assert {*pipectl.__all__} <= {*dir(pipectl)}
    for name, expected in MEMBERS.items():
        assert sorted(members(getattr(pipectl, name))) == expected.split(), name
    with pytest.raises(AttributeError, match="no attribute 'Jobs'"):
        pipectl.Jobs  # noqa: B018


@pytest.mark.parametrize("name", NAMES.split())
def test_every_public_name_is_explained(name):
    thing = getattr(pipectl, name)
    assert len(inspect.getdoc(thing) or "") > 10
    for inner, member in members(thing).items() if name in MEMBERS else ():
        function = member.fget if isinstance(member, property) else member
        assert len(inspect.getdoc(member) or "") > 10, inner
        assert "return" in function.__annotations__, inner
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            assert parameter.annotation is not parameter.empty, f"{inner}: {parameter}"
            text = f"{inspect.getdoc(member)} {inspect.getdoc(thing)}"
            assert re.search(rf"\b{parameter.name}\b", text), f"{inner}: {parameter}"


def test_the_page_has_every_call_with_its_arguments():
    page = (Path(__file__).parents[2] / "docs" / "from-python.md").read_text("utf-8")
    shown = re.findall(r"^\| `(\w+)\.(\w+)(\(.*?\))?( -> .*?)?` \|", page, re.MULTILINE)
    kinds = {"job": pipectl.Job, "run": pipectl.Run}
    for owner, name, arguments, returned in shown:
        thing = getattr(kinds.get(owner, pipectl), name)
        if isinstance(thing, property):
            continue
        signature = inspect.signature(thing)
        parameters = [each.replace(annotation=inspect.Parameter.empty)
                      for each in signature.parameters.values() if each.name != "self"]  # fmt: skip
        usual = str(inspect.Signature(parameters)).replace("'", '"')
        assert arguments == usual, name
        assert returned in ("", f" -> {signature.return_annotation}"), name
    named = {(owner, name) for owner, name, *_ in shown}
    of_jobs = {("job", name) for name in MEMBERS["Job"].split()}
    of_runs = {("run", name) for name in MEMBERS["Run"].split()}
    plain = {("job", "name"), ("job", "scheduler"), ("job", "to_yaml"), ("run", "name"),
             ("run", "path")}  # fmt: skip
    assert named == (of_jobs | of_runs | {("pipectl", n) for n in ("Job", "Run", "runs")}) - plain


def test_importing_pipectl_loads_nothing_and_using_it_neither_torch_nor_what_prints():
    subprocess.run([sys.executable, "-c", LOADS], check=True)
