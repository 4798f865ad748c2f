"""What a batch system is asked for: containers, heaps, and the user's own template of scripts."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipectl.batch import JobRequest
from pipectl.cluster import OffloadTarget
from pipectl.errors import SpecError
from pipectl.jobs.job import (
    TIGHT_HEAP,
    check_script,
    make_job,
    render,
)
from pipectl.jobs.prepare import prepare
from pipectl.jobs.submit import submit
from pipectl.plan import Plan, Stage, StageCost
from pipectl.spec import JobSpec, load

CODE = 'model: "./code/model.py:build"\ndata: "./model data.py:data"\nloss: "torch.nn:MSELoss"\n'
SIZES = "training: {steps: 4, batch_size: 8}\nsite_defaults: false\n"
GOOD = "{{% extends base %}}\n{{% block setup %}}\n{head}\n{{% endblock %}}\n"


def request_in_a_container(tmp_path: Path, image: str, code: str = CODE) -> JobRequest:
    path = tmp_path / "job.yaml"
    more = f"environment: {{container: '{image}'}}\nresources: {{gpus_per_node: 1}}\n"
    path.write_text(code + SIZES + more)
    job = make_job(load(path, check_files=False), "local")
    return job.request_for(Path("/runs/x"))


@pytest.mark.parametrize(
    ("written", "image"),
    [("./torch.sif", "{}/torch.sif"), ("docker://a/b:1", "docker://a/b:1"), ("/x.sif", "/x.sif")],
)
def test_a_container_sees_what_the_job_names_and_writes(tmp_path, written, image):
    request = request_in_a_container(tmp_path, written)
    assert request.binds == (Path("/runs"), tmp_path, tmp_path / "code")
    assert request.in_container(("a",)) == (
        *("apptainer", "exec", "--nv"),
        *(f"--bind={path}" for path in request.binds),
        image.format(tmp_path),
        "a",
    )


def test_a_container_sees_packages_beside_the_job(tmp_path):
    (tmp_path / "netmod.py").touch()
    code = CODE.replace("./code/model.py", "netmod").replace("./model data.py", "/else/pk.data")
    request = request_in_a_container(tmp_path, "./torch.sif", code)
    assert request.binds == (Path("/runs"), *sorted([Path("/else"), tmp_path]))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("target", ["disk", "host"])
def test_ranks_that_offload_to_a_disk_start_with_a_heap_that_joins_what_is_freed(
    write_job, target, known
):
    lines = (f"pipeline: {{offload: {target}}}", "resources: {gpus_per_node: 1}")
    job = make_job(load(write_job(*lines), check_files=False), "local")
    stage = Stage(("a",), (0,), StageCost(1.0, 1.0, 0.0, 1, 1, 1), offload=True)
    plan = Plan(
        "tiny", None, "1f1b", (1,), 4, 4, 1, (stage,), (), (0,), offload_to=OffloadTarget(target)
    )
    request = replace(job, plan=plan if known else None).request_for(Path("x"))
    assert request.environment.variables == (TIGHT_HEAP if target == "disk" else {})
    kept = replace(plan, stages=(replace(stage, offload=False),))
    assert replace(job, plan=kept).request_for(Path("x")).environment.variables == {}


def test_a_job_s_own_setting_of_the_heap_wins(write_job):
    own = {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    lines = ("pipeline: {offload: disk}", f"environment: {{variables: {json.dumps(own)}}}")
    job = make_job(load(write_job(*lines), check_files=False), "local")
    assert job.request_for(Path("x")).environment.variables == own


def spec_with_template(tmp_path: Path, head: str, name: str = "my site's.sh") -> JobSpec:
    (tmp_path / name).write_text(GOOD.format(head=head))
    path = tmp_path / "job.yaml"
    path.write_text(f"{CODE}{SIZES}launch: {{template: {json.dumps(f'./{name}')}}}\n")
    for code in ("code/model.py", "model data.py"):
        (tmp_path / code).parent.mkdir(exist_ok=True)
        (tmp_path / code).touch()
    return load(path)


def script_of(spec: JobSpec, scheduler: str) -> str:
    (job,) = prepare(spec, scheduler, make_missing=False)
    return render(job, needs_mpi=False)


@pytest.mark.parametrize("head", ["if true; then", "echo {{{{ job.no_such }}}}", "echo )"])
def test_a_template_with_which_no_script_can_be_written_is_refused(tmp_path, head):
    spec = spec_with_template(tmp_path, head.format())
    with pytest.raises(SpecError, match=r"my site's\.sh:[13]:1: "):
        check_script(spec)


def test_a_run_keeps_its_own_template(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    spec = spec_with_template(tmp_path, "echo first")
    (submission,) = submit(prepare(spec, "slurm", make_missing=False), time.time())
    run = submission.run
    (tmp_path / "my site's.sh").write_text("changed since")

    again = load(run.job)
    assert again.launch.template == str(run.template)
    assert "echo first" in script_of(again, "slurm")


def test_the_name_of_a_template_gets_into_no_script(tmp_path):
    plain = script_of(spec_with_template(tmp_path, "true", "plain.sh"), "slurm")
    for name in ("$(touch x).sh", "`id`", "'; exit 1; '", "{{ job }}", "-n", "[red]"):
        assert script_of(spec_with_template(tmp_path, "true", name), "slurm") == plain
    with pytest.raises(SpecError, match="line break"):
        load(tmp_path / "job.yaml", ['launch.template="a\\nb"'])
