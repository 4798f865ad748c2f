"""What a batch system is asked for: containers, heaps, and the user's own template of scripts."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.cluster import OffloadTarget
from pipectl.errors import SpecError
from pipectl.jobs.job import TIGHT_HEAP, make_job, render
from pipectl.jobs.prepare import prepare
from pipectl.jobs.submit import submit
from pipectl.plan import Stage
from pipectl.spec import load

TEMPLATE = "{{% extends base %}}\n{{% block setup %}}\n{head}\n{{% endblock %}}\n"


@pytest.mark.parametrize("image", ["./torch.sif", "docker://a/b:1", "/x.sif"])
def test_a_container_sees_what_the_job_names_and_writes(tmp_path, write_job, image):
    """Files, and packages beside the job."""
    more = f"environment: {{container: '{image}'}}", "resources: {gpus_per_node: 1}"
    path = write_job(*more)
    (tmp_path / "netmod.py").touch()
    files = "./code/model.py:build", "./model data.py:data"
    for (model, data), places in (
        (files, (tmp_path, tmp_path / "code")),
        (("netmod:build", "/else/pk.data:data"), sorted([Path("/else"), tmp_path])),
    ):
        overrides = [f"model.factory={model}", f"data.factory={data}"]
        job = make_job(load(path, overrides, check_files=False), "local")
        request = job.request_for(Path("/runs/x"))
        assert request.binds == (Path("/runs"), *places)
        binds = (f"--bind={path}" for path in request.binds)
        place = str(tmp_path / image) if image.startswith("./") else image
        expected = ("apptainer", "exec", "--nv", *binds, place, "a")
        assert request.in_container(("a",)) == expected


@pytest.mark.parametrize("target", ["disk", "host"])
def test_ranks_that_offload_to_a_disk_start_with_a_heap_that_joins_what_is_freed(
    write_job, pipeline, target
):
    lines = (f"pipeline: {{offload: {target}}}", "resources: {gpus_per_node: 1}")
    job = make_job(load(write_job(*lines), check_files=False), "local")
    plan = replace(pipeline(1), offload_to=OffloadTarget(target))
    offloads = replace(plan, stages=(Stage(("a",), (0,), plan.stages[0].cost, offload=True),))

    def variables(job):
        return job.request_for(Path("x")).environment.variables

    expected = TIGHT_HEAP if target == "disk" else {}
    assert variables(job) == variables(replace(job, plan=offloads)) == expected
    assert variables(replace(job, plan=plan)) == {}
    own = {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    own_job = write_job(*lines, f"environment: {{variables: {json.dumps(own)}}}")
    assert variables(make_job(load(own_job, check_files=False), "local")) == own, "it wins"


@pytest.fixture
def spec_with(tmp_path, write_job):
    """``spec_with(head)``: a job with a template whose setup begins with that."""

    def write(head, name="my site's.sh"):
        (tmp_path / name).write_text(TEMPLATE.format(head=head))
        return load(write_job(f"launch: {{template: {json.dumps(f'./{name}')}}}"))

    return write


def script_of(spec):
    (job,) = prepare(spec, "slurm", make_missing=False)
    return render(job, needs_mpi=False)


def test_a_run_keeps_its_own_template(spec_with, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    spec = spec_with("echo first")
    (submission,) = submit(prepare(spec, "slurm", make_missing=False), time.time())
    (tmp_path / "my site's.sh").write_text("changed since")
    again = load(submission.run.job)
    assert again.launch.template == str(submission.run.template)
    assert "echo first" in script_of(again)


def test_the_name_of_a_template_gets_into_no_script(spec_with, tmp_path):
    plain = script_of(spec_with("true", "plain.sh"))
    for name in ("$(touch x).sh", "`id`", "'; exit 1; '", "{{ job }}", "-n", "[red]"):
        assert script_of(spec_with("true", name)) == plain
    with pytest.raises(SpecError, match="line break"):
        load(tmp_path / "job.yaml", ['launch.template="a\\nb"'])
