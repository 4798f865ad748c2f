"""Five scripts that show everything, and what further fields change in a script, against checked-in
copies; ``make golden`` accepts changes."""

import shutil
import subprocess
from difflib import unified_diff
from pathlib import Path

import pytest
import yaml
from job_requests import change, fields, make_request

from pipectl.batch import get_scheduler
from pipectl.errors import PipectlError
from pipectl.spec.models import Checkpoint

HERE = Path(__file__).parent
GOLDEN = HERE.parents[1] / "slurm" / "golden"
CASES = yaml.safe_load((HERE / "golden.yaml").read_text())


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_the_golden_one_and_valid_bash(snapshot, name):
    request = make_request(Path("/none"), **fields(CASES[name]["fields"]))
    snapshot(GOLDEN / name, get_scheduler(CASES[name]["scheduler"]).render(request))
    assert {path.name for path in GOLDEN.glob("*.sh")} == set(CASES)
    subprocess.run(["bash", "-n", str(GOLDEN / name)], check=True)
    if shutil.which("shellcheck") is not None:
        subprocess.run(["shellcheck", "--severity=warning", str(GOLDEN / name)], check=True)


def test_what_each_field_changes_in_a_script_or_why_it_is_refused(snapshot):
    """Lines without and with the fields of each line in the file; errors with what to do."""
    plain = make_request(Path("/runs/x"), nodes=2, mpi="openmpi", walltime=600)
    plain = change(plain, checkpoint=Checkpoint(lead_time=400))
    lines = []
    for line in (HERE / "changes.txt").read_text("utf-8").splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        scheduler, _, document = line.partition(" ")
        own = fields(yaml.safe_load(document))
        if "options" in own:
            own[scheduler] = {"options": own.pop("options")}
        render = get_scheduler(scheduler).render
        try:
            before, after = render(plain).splitlines(), render(change(plain, **own)).splitlines()
        except PipectlError as error:
            lines.append(f"  error: {error.message} ({error.cure})")
            continue
        found = unified_diff(before, after, n=0, lineterm="")
        lines += [f"  {text}" for text in [*found][2:] if text[:2] != "@@"]
    snapshot(HERE / "changes.txt", "".join(f"{text}\n" for text in lines))
