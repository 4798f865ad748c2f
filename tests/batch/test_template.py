"""A user's template: what is refused, with its line, and what is kept."""

import re
from pathlib import Path

import pytest

from pipectl.batch import Array, Template, get_scheduler
from pipectl.errors import SpecError

CASES = Path(__file__).with_name("wrong_templates.txt").read_text("utf-8").splitlines()[1:]
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


@pytest.mark.parametrize("case", CASES)
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
