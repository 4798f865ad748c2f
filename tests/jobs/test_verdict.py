"""The verdict on a job from four sources, as a pure function: see verdicts.txt."""

from pathlib import Path

from pipectl.batch import JobState, JobStatus
from pipectl.jobs.state import Answer, decide_state
from pipectl.runs import Record

NOW, HOUR_S = 1_000_000.0, 3600.0
FILE = Path(__file__).with_name("verdicts.txt")


def number(text):
    return None if text is None else int(text)


def verdict(facts):
    """Ages are in seconds; the record is an hour old unless it says otherwise."""
    listed = {}
    if "listed" in facts:
        state, code = JobState(facts["listed"]), number(facts.get("code"))
        reason, source = facts.get("reason", ""), facts.get("source", "queue")
        listed["7"] = JobStatus(state, reason, code, source=source)
    at, state = NOW - float(facts.get("age", HOUR_S)), facts.get("record", "submitted")
    found = decide_state(
        Record("demo", "slurm", "t", at, 1, 1, 5, state=state, job_id="7"),
        Answer(listed, facts.get("error")),
        NOW,
        exit_code=number(facts.get("exit")),
        beat_at=NOW - int(facts["beat"]) if "beat" in facts else None,
        words="training, step 5 of 5",
        step_time_s=number(facts.get("step")),
    )
    code = "" if found.exit_code is None else f" {found.exit_code}"
    return f"{found.state}{code} by {found.source}" + (f": {found.reason}" * bool(found.reason))


def test_the_state_of_a_job_is_what_its_sources_say(snapshot):
    text = ""
    for line in FILE.read_text().splitlines():
        facts = line.partition(" ->")[0]
        if not line.startswith("#"):
            line = f"{facts} -> {verdict(dict(word.split('=') for word in facts.split()))}"
        text += f"{line}\n"
    snapshot(FILE, text)
