"""Options that mean nothing beside others are refused, and none is left aside without a word."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

SUBMITS_NOTHING = "--dry-run and --test-only submit nothing"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("submit job.yaml --dry-run --test-only", "--dry-run and --test-only: choose one"),
        ("submit job.yaml --rehearse", "pipectl submit --rehearse: use `pipectl lab rehearse"),
        ("submit job.yaml -p debug", "--partition: is not used with local"),
        ("submit job.yaml -A me", "--account: is not used with local"),
        ("submit job.yaml -q long --scheduler slurm", "--queue: is not used with slurm"),
        ("submit job.yaml --gres a --scheduler pbs", "--gres: is not used with pbs"),
        ("submit job.yaml --dry-run --wait", f"--wait: {SUBMITS_NOTHING}"),
        ("submit job.yaml --test-only --wait", f"--wait: {SUBMITS_NOTHING}"),
        ("submit job.yaml --dry-run --after x", f"--after: {SUBMITS_NOTHING}"),
        ("submit job.yaml --test-only --after x", f"--after: {SUBMITS_NOTHING}"),
        ("submit job.yaml --dry-run --json", "--json: --dry-run and --test-only print text"),
        ("submit job.yaml --test-only --json", "--json: --dry-run and --test-only print text"),
        ("init new --data data.py:rows", "--data: needs --model"),
        ("init new --loss torch.nn:MSELoss", "--loss: needs --model"),
        ("init new --partition long", "--partition: the job runs on this machine"),
        ("init new --account mine", "--account: the job runs on this machine"),
        ("doctor --set training.steps=1", "--set: needs a JOB.yaml"),
        ("doctor job.yaml -d elsewhere", "--directory: cannot be used with a job"),
        ("check job.yaml --json", "--json: needs --origins"),
        ("check job.yaml --schema", "JOB.yaml: cannot be used with --schema"),
        ("check job.yaml -o x", "-o: needs --schema"),
        ("plan job.yaml --nodes 1 --svg x.svg", "--svg: cannot be used with --nodes"),
        ("profile job.yaml --fast", "pipectl profile --fast: use `--effort fast` instead"),
        ("profile job.yaml --here", "pipectl profile --here: use `--scheduler local` instead"),
        ("profile job.yaml --wait", "--wait: needs --submit"),
        ("profile job.yaml --links --again", "--again: is not used with --links"),
    ],
)
def test_what_has_no_meaning_is_refused_in_a_sentence(
    cli: Command, job: Path, line: str, error: str
) -> None:
    before = sorted(Path().iterdir())
    result = cli(*line.split())
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {error}")
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("export last --shard-size 0", "--shard-size': must be more than 0"),
        ("export last --step 0", "--step': 0 is not in the range x>=1."),
        ("init new --memory 0", "--memory': must be more than 0"),
        ("init new --memory=", "--memory': '' is not a size"),
        ("init new --walltime 0", "--walltime': must be more than 0"),
        ("init new --walltime=", "--walltime': '' is not a duration"),
        ("init new --gpus-per-node -1", "--gpus-per-node': -1 is not in the range x>=0."),
        ("init new --nodes 0", "--nodes': 0 is not in the range x>=1."),
        ("plan job.yaml --devices 0", "--devices': 0 is not in the range x>=1."),
        ("lab simulate --schedule gpipe --stages 0", "--stages': 0 is not in the range x>=1."),
        ("lab simulate --schedule gpipe --ranks 0", "--ranks': 0 is not in the range x>=1."),
        ("profile job.yaml --effort some", "--effort': 'some' is not one of 'fast', 'normal', 't"),
        ("report last --step 0", "--step': 0 is not in the range x>=1."),
        ("lab verify job.yaml --ranks 0", "--ranks': 0 is not in the range x>=1."),
        ("lab verify job.yaml --steps 0", "--steps': 0 is not in the range x>=1."),
    ],
)
def test_zero_is_refused_where_there_must_be_some(
    cli: Command, job: Path, line: str, error: str
) -> None:
    result = cli(*line.split())
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: Invalid value for '{error}")
    assert not Path("new").exists()


def test_a_job_for_no_accelerators_can_be_asked_for(cli: Command) -> None:
    assert cli("init", "new", "--gpus-per-node", "0").code == 0
