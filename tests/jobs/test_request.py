"""What a batch system is asked for: containers, heaps, and the user's own template of scripts."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.cluster import OffloadTarget
from pipectl.errors import SpecError
from pipectl.jobs.job import TIGHT_HEAP, check_script, make_job, render
from pipectl.jobs.prepare import prepare
from pipectl.jobs.submit import submit
from pipectl.plan import Stage
from pipectl.spec import load

CODE = 'model: "./code/model.py:build"\ndata: "./model data.py:data"\nloss: "torch.nn:MSELoss"\n'
SIZES = "training: {steps: 4, batch_size: 8}\nsite_defaults: false\n"
TEMPLATE = "{{% extends base %}}\n{{% block setup %}}\n{head}\n{{% endblock %}}\n"


@pytest.mark.parametrize(
    ("written", "image"),
    [("./torch.sif", "{}/torch.sif"), ("docker://a/b:1", "docker://a/b:1"), ("/x.sif", "/x.sif")],
)
def test_a_container_sees_what_the_job_names_and_writes(tmp_path, written, image):
    """Files, and packages beside the job."""
    path = tmp_path / "job.yaml"
    more = f"environment: {{container: '{written}'}}\nresources: {{gpus_per_node: 1}}\n"
    path.write_text(CODE + SIZES + more)
    (tmp_path / "netmod.py").touch()
    beside = CODE.replace("./code/model.py", "netmod").replace("./model data.py", "/else/pk.data")
    for code, binds in (
        (CODE, (Path("/runs"), tmp_path, tmp_path / "code")),
        (beside, (Path("/runs"), *sorted([Path("/else"), tmp_path]))),
    ):
        path.write_text(code + SIZES + more)
        job = make_job(load(path, check_files=False), "local")
        request = job.request_for(Path("/runs/x"))
        assert request.binds == binds
        assert request.in_container(("a",)) == (
            *("apptainer", "exec", "--nv"),
            *(f"--bind={path}" for path in binds),
            image.format(tmp_path),
            "a",
        )


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
def spec_with(tmp_path):
    """``spec_with(head)``: a job with a template whose setup begins with that."""

    def write(head, name="my site's.sh"):
        (tmp_path / name).write_text(TEMPLATE.format(head=head))
        path = tmp_path / "job.yaml"
        path.write_text(f"{CODE}{SIZES}launch: {{template: {json.dumps(f'./{name}')}}}\n")
        for code in ("code/model.py", "model data.py"):
            (tmp_path / code).parent.mkdir(exist_ok=True)
            (tmp_path / code).touch()
        return load(path)

    return write


def script_of(spec):
    (job,) = prepare(spec, "slurm", make_missing=False)
    return render(job, needs_mpi=False)


@pytest.mark.parametrize("head", ["if true; then", "echo {{ job.no_such }}", "echo )"])
def test_a_template_with_which_no_script_can_be_written_is_refused(spec_with, head):
    with pytest.raises(SpecError, match=r"my site's\.sh:[13]:1: "):
        check_script(spec_with(head))


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
