"""Options of sbatch and qsub that a job sets, and lines of them in a template."""

from pathlib import Path

import pytest
from job_requests import change

from pipectl.batch import Template, get_scheduler
from pipectl.directives import SYNTAXES, fault_of_option
from pipectl.errors import InvalidInputError

LINES = Path(__file__).with_name("options.txt").read_text().splitlines()
CASES = [line.split(maxsplit=1) for line in LINES if not line.startswith("# ")]
DIRECTIVES = "{{% extends base %}}{{% block directives %}}\n{}\n{{% endblock %}}"


def test_options_of_a_job_are_taken_or_refused_with_what_to_do():
    for scheduler, case in CASES:
        written, _, cure = (part.strip() for part in case.partition("->"))
        name, _, text = written.partition(": ")
        value = {"true": True, "false": False}.get(text, text)
        if " & " in text:
            value = tuple(text.split(" & "))
        if not name.startswith("#"):
            fault = fault_of_option(SYNTAXES[scheduler], name, value)
            assert cure in fault if cure else fault == "", case


def test_lines_of_a_template_come_first_or_are_refused_with_what_to_do(make_request):
    """sbatch and qsub take the last of two options: those of pipectl win."""
    plain = make_request(slurm={"partition": "y"}, pbs={"queue": "y"})
    for scheduler, case in CASES:
        line, _, cure = (part.strip() for part in case.partition("->"))
        if not line.startswith("#"):
            continue
        request = change(plain, template=Template("site.sh", DIRECTIVES.format(line)))
        if not cure:
            ours = get_scheduler(scheduler).render(plain).splitlines()
            script = get_scheduler(scheduler).render(request).splitlines()
            assert script[: script.index("")] == [ours[0], line, *ours[1 : ours.index("")]]
            continue
        with pytest.raises(InvalidInputError, match=r"site\.sh:2:1: ") as caught:
            get_scheduler(scheduler).render(request)
        assert cure in (caught.value.cure or ""), case
        other = "pbs" if scheduler == "slurm" else "slurm"
        assert line in get_scheduler(other).render(request), "it means nothing there"
