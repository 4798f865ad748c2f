"""`launch.template`: looked up, checked before anything is submitted, kept with the run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pipectl.batch import check_template
from pipectl.errors import SpecError
from pipectl.jobs.prepare import prepare
from pipectl.jobs.request import check_script, read_template
from pipectl.jobs.submit import render, write_job
from pipectl.runs import RunDirectory
from pipectl.spec import JobSpec, load

JOB = """\
version: 1
name: demo
model: torch.nn:Linear
loss: torch.nn:MSELoss
data: torch.utils.data:TensorDataset
training: {steps: 10, batch_size: 8}
"""
GOOD = "{{% extends base %}}\n{{% block setup %}}\n{head}\n{{% endblock %}}\n"


def job(tmp_path: Path, head: str, name: str = "my site's.sh") -> JobSpec:
    (tmp_path / name).write_text(GOOD.format(head=head))
    path = tmp_path / "job.yaml"
    path.write_text(f'{JOB}launch: {{template: "./{name}"}}\n')
    return load(path, sites=())


def script_of(spec: JobSpec, scheduler: str) -> str:
    return render(*prepare(spec, scheduler, make=False), 0.0)


def test_it_is_in_the_scripts_of_all_schedulers(tmp_path: Path) -> None:
    spec = job(tmp_path, "echo 'from my site'")
    for scheduler in ("slurm", "pbs", "local"):
        script = script_of(spec, scheduler)
        assert script.startswith("#!/bin/bash\n#")
        assert "echo 'from my site'\n" in script
        assert script.rstrip().endswith('exit "$code"')


@pytest.mark.parametrize("head", ["if true; then", "echo {{{{ job.no_such }}}}", "echo )"])
def test_one_with_which_no_script_can_be_written_is_refused(tmp_path: Path, head: str) -> None:
    spec = job(tmp_path, head.format())
    with pytest.raises(SpecError, match=r"my site's\.sh:[13]:1: "):
        check_script(spec)


def test_one_that_does_not_exist_is_a_problem_of_the_spec(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{JOB}launch: {{template: no.sh}}\n")
    with pytest.raises(SpecError, match=r"job\.yaml:7:\d+: launch\.template: no such file"):
        load(path, sites=())


def test_that_of_a_site_file_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    site = tmp_path / "etc" / "site.yaml"
    site.write_text("launch: {template: wrap.sh}\n")
    (tmp_path / "etc" / "wrap.sh").write_text(GOOD.format(head=""))
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    assert load(path, sites=[site]).template_file == tmp_path / "etc" / "wrap.sh"


def test_the_run_keeps_its_own(tmp_path: Path) -> None:
    spec = job(tmp_path, "echo first")
    run = RunDirectory.create(tmp_path / "runs", "demo", time.time())
    write_job(run, spec, read_template(spec))
    (tmp_path / "my site's.sh").write_text("changed since")

    again = load(run.job)
    assert again.template_file == run.template
    template = read_template(again)
    assert template is not None
    check_template(template)
    assert "echo first" in template.text


def test_the_name_of_its_file_gets_into_no_script(tmp_path: Path) -> None:
    plain = script_of(job(tmp_path, "true", "plain.sh"), "slurm")
    for name in ("$(touch x).sh", "`id`", "'; exit 1; '", "{{ job }}", "-n", "[red]"):
        (tmp_path / name).write_text(GOOD.format(head="true"))
        spec = load(tmp_path / "job.yaml", [f"launch.template={json.dumps(name)}"], sites=())
        assert script_of(spec, "slurm") == plain
    with pytest.raises(SpecError, match="line break"):
        load(tmp_path / "job.yaml", ['launch.template="a\\nb"'], sites=())
