"""A user's template: what is refused, with its line, and what is kept."""

import re

import pytest

from pipectl.batch import Array, Template, get_scheduler
from pipectl.errors import SpecError

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


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "does not extend pipectl's"),
        ("#!/bin/bash\necho hello\n", 1, "does not extend pipectl's"),
        ("#!/bin/bash\n#pipectl directives\n#pipectl body\n", 1, "{% extends base %}"),
        (GOOD.replace("block setup", "block set_up"), 6, "no block 'set_up'; did you mean 'setup'"),
        (GOOD.replace("{## Our", "echo early\n{## Our"), 2, "text outside of all blocks"),
        (GOOD.replace("{## Our", "{{ job.name }}\n{## Our"), 2, "text outside of all blocks"),
        (f"#!/bin/bash\n{GOOD}", 1, "text outside of all blocks"),
        (GOOD.replace("echo before", "{% if %}"), 7, "Expected an expression"),
        (GOOD.removesuffix("{% endblock %}\n"), 10, "end of template"),
        (GOOD.replace("before", "\x1b[31m"), 7, "control character"),
        (GOOD.replace("before", "a\u2028b"), 7, "control character"),
        (GOOD.replace("echo before", "{{ job.nam }}"), 7, "has no attribute 'nam'"),
        (GOOD.replace("echo before", "{{ cores }}"), 7, "'cores' is undefined"),
        (GOOD.replace("echo before", "{{ 1 // 0 }}"), 7, "zero"),
        (GOOD.replace("echo before", "{{ ''.__class__ }}"), 7, "unsafe"),
        (GOOD.replace("echo before", "{% include '/etc/passwd' %}"), 7, "/etc/passwd"),
        (GOOD.replace("echo before", "if true; then"), 1, "end of file"),
        (GOOD.replace("echo before", "echo )"), 7, "syntax error"),
        (GOOD.replace("echo before", "cat <<END\nno end"), 1, "here-document"),
        (GOOD.replace("at_exit %}\n", "at_exit %}\n#SBATCH --nice\n"), 10, "only before"),
        (GOOD.replace("#SBATCH --switches=1", "{{ super() }}\necho x"), 3, "come before"),
        (GOOD.replace("%}\n#SBATCH --switches=1\n", "%}#SBATCH --switches=1 "), 3, "come before"),
        (GOOD.replace("{## Our", "{% block header %}{% endblock %}\n{## Our"), 4, "come before"),
        (
            GOOD.replace("{## Our", "{% block shebang %}#!/bin/sh{% endblock %}\n{## Our"),
            2,
            "must start bash",
        ),
    ],
)
def test_what_cannot_extend_ours_or_gives_a_wrong_script_is_refused_with_its_line(
    make_request, text, line, words
):
    assert text != GOOD
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
