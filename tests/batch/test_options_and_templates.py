"""What a job and its template may set in a script: what is taken, and what is refused and why."""

import re
from pathlib import Path

import pytest
from job_requests import change

from pipectl.batch import Array, Template, get_scheduler
from pipectl.directives import SYNTAXES, fault_of_option
from pipectl.errors import InvalidInputError, SpecError

LINES = Path(__file__).with_name("options.txt").read_text().splitlines()
CASES = [line.split(maxsplit=1) for line in LINES if not line.startswith("# ")]
DIRECTIVES = "{{% extends base %}}{{% block directives %}}\n{}\n{{% endblock %}}"
WRONG = Path(__file__).with_name("wrong_templates.txt").read_text("utf-8").splitlines()[1:]
GOOD = """\
{% extends base %}
{## Our site's. ##}
{% block directives %}
#SBATCH --switches=1
{% endblock %}
{% block setup %}
echo before
{% endblock %}
{% block at_exit %}
    echo after
{% endblock %}
"""


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_extend_ours_or_gives_a_wrong_script_is_refused_with_its_line(
    make_request, case
):
    replaced, _, words = case.rpartition(" -> ")
    old, new = (each.encode().decode("unicode_escape") for each in replaced.split(" => "))
    text = GOOD.replace(GOOD if old == "(all)" else old, new)
    assert text != GOOD
    line, _, words = words.partition(" ")
    with pytest.raises(SpecError, match=rf"^site\.sh:{line}:1: .*{re.escape(words)}"):
        get_scheduler("slurm").render(make_request(template=Template("site.sh", text)))


def test_the_script_of_a_long_array_is_checked(make_request, tmp_path):
    runs = tuple(tmp_path / f"{'a' * 200}-{index}" for index in range(700))
    request = make_request(array=Array(runs), template=Template("site.sh", GOOD))
    assert len(get_scheduler("slurm").render(request)) > 2**17


def test_text_is_kept_and_values_are_quoted(make_request):
    own = 'echo "$HOME  \\$x ${#x} ${x#a}" # ünïcode'
    values = "echo {{ job.name }} {{ '$HOME' }} {{ job.run_directory / 'a b' }} {{ ('a', 'b c') }}"
    text = GOOD.replace("echo before", f"{own}\n{values}")
    request = make_request(name="it's", template=Template("site.sh", text))
    for scheduler in ("slurm", "pbs", "local"):
        script = get_scheduler(scheduler).render(request)
        assert f"\n{own}\n" in script
        assert f"\necho 'it'\"'\"'s' '$HOME' '{request.run_directory}/a b' a 'b c'\n" in script


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
