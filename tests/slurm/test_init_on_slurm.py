"""`pipectl init` if there is a Slurm: it takes the job as it was written."""

from pathlib import Path

from pipectl.spec import load


def test_a_first_job_fits_the_lab(pipectl):
    pipectl("init", "first")
    spec = load(Path("first/job.yaml"), sites=())
    assert spec.slurm.partition == "debug"
    assert spec.resources.walltime <= 3600
    pipectl("check", "first/job.yaml")
    assert "to start at" in pipectl("submit", "first/job.yaml", "--test-only")
