"""What Slurm and PBS are asked, with their commands pretended, and what they say of jobs."""

import re
import shlex
from datetime import datetime
from getpass import getuser
from pathlib import Path

import pytest
import yaml

from pipectl.batch import JobState, get_scheduler, process
from pipectl.batch.pbs import parse_qstat
from pipectl.batch.slurm_output import parse_sacct, parse_sinfo, parse_squeue
from pipectl.errors import PipectlError, SchedulerError
from tests.batch.fakes import FakeCommands
from tests.batch.job_requests import check_table

HERE = Path(__file__).parent
SCENE = re.compile(r"(slurm|pbs): .*")
SETS = re.compile(r"([A-Z_]+)=(.*)")
SAYS = re.compile(r"(\w+)(?: \[(\d+)\])? (says|fails with|as in|hangs) ?(.*)")
SCRIPT = Path("/runs/job.sh")
HIDDEN = {
    "slurm": {"SBATCH_PARTITION", "SLURM_JOB_ID", "SLURM_NTASKS", "SQUEUE_PARTITION"},
    "pbs": {"PBS_DPREFIX", "PBS_JOBID"},
}


def described(job_id, job):
    """Times of PBS are local."""
    words = [job_id, job.state, "" if job.exit_code is None else f"code {job.exit_code}", job.nodes]
    for word, time in (("from", job.start), ("to", job.end), ("until", job.deadline)):
        if time is not None:
            words.append(f"{word} {datetime.fromtimestamp(time) if '.' in job_id else int(time)}")
    said = [f"({job.reason})" * bool(job.reason), f"[{job.hint}]" * bool(job.hint)]
    return " ".join(word for word in [*words, *said] if word).replace("\n", " ")


class Scene:
    """A scheduler, and the commands of its batch system."""

    def __init__(self, system, folder, make_request):
        self.scheduler, self.make_request = get_scheduler(system), make_request
        self.fake = FakeCommands(folder, system)

    def prepare(self, command, code, how, text):
        (self.fake.folder / f"{command}.hang").unlink(missing_ok=True)
        said = text.encode().decode("unicode_escape")
        if how == "as in":
            self.fake.replay(command, text)
        elif how == "hangs":
            self.fake.hang(command)
            self.scheduler.timeout_s = 1.0
        elif how == "says":
            self.fake.answer(command, said, rc=int(code or 0))
        else:
            self.fake.answer(command, stderr=said, rc=int(code or 1))

    def answer(self, question):
        """What the scheduler answers, in lines."""
        what, _, text = question.partition(" ")
        if what == "submit":
            tag, _, after = text.partition(" after ")
            tag, _, clusters = tag.partition(" to ")
            slurm = {"options": {"clusters": clusters}} if clusters else {}
            request = self.make_request(tag=tag, after=tuple(after.split()), slurm=slurm)
            return [self.scheduler.submit(SCRIPT, request)]
        if what == "find":
            tag, _, clusters = text.encode().decode("unicode_escape").partition(" on ")
            return [self.scheduler.find_all([tag], clusters).get(tag)]
        if what == "query":
            ids, _, codes = text.partition(" left ")
            self.scheduler.exit_codes = dict.fromkeys(ids.split(), int(codes)) if codes else {}
            ids, _, since = ids.partition(" since ")
            found = self.scheduler.query(ids.split(), since=float(since) if since else None)
            return [f"{described(*job)} [{job[1].source}]" for job in found.items()]
        if what == "check":
            changes = {"walltime": 600, **yaml.safe_load(f"{{{text}}}")}
            warning = self.scheduler.check(self.make_request(**changes))
            return warning.splitlines() or ["fits"]
        if what in {"forecast", "again"}:
            return [self.expected(what, text)]
        if what == "who":
            queues = self.scheduler.queues_for(self.make_request(**yaml.safe_load(f"{{{text}}}")))
            return [f"{each.name}: {'yes' if each.for_user else 'no'}" for each in queues]
        if what == "estimate":
            return [self.scheduler.estimate("#!/bin/bash\n")]
        if what in {"queues", "ping"}:
            return getattr(self.scheduler, what)() or ()
        if what == "task_id":
            array_id, index = text.split()
            return [self.scheduler.task_id(array_id, int(index))]
        return [getattr(self.scheduler, what)(text.encode().decode("unicode_escape"))]

    def expected(self, what, text):
        """What the scheduler says of a job that would be submitted."""
        name, _, changes = text.partition(": ")
        name, _, is_local = name.partition(" ")
        request = self.make_request(**yaml.safe_load(f"{{{changes}}}"))
        queue, now = (
            next(each for each in self.scheduler.queues() if each.name == name),
            1795228000.0,
        )
        if what == "again":
            return self.scheduler.forecast_again(request, queue, now, now + 10, now + 100) - now
        start = self.scheduler.forecast(request, queue, now)
        return datetime.fromtimestamp(start or 0.0) if is_local else start

    def ask(self, question):
        """The answer or the error, and what was run."""
        before = {command: len(self.fake.calls(command)) for command in self.fake.names}
        try:
            yield from self.answer(question)
        except PipectlError as error:
            yield from f"{type(error).__name__}: {error.message} ({error.hint})".splitlines()
        for command, count in before.items():
            for arguments in self.fake.calls(command)[count:]:
                time_format = self.fake.environment(command).get("SLURM_TIME_FORMAT")
                words = [f"SLURM_TIME_FORMAT={time_format}"] if time_format else []
                line = shlex.join([*words, command, *arguments])
                line = re.sub("2026-11-(19|20)", "THE-DAY-BEFORE", line)  # in local time
                yield f"$ {line.replace(f'-u {getuser()}', '-u USER')}"


def test_dialogues_with_batch_systems(tmp_path, monkeypatch, make_request, snapshot):
    lines, scene = [], None
    for number, line in enumerate((HERE / "dialogues.txt").read_text("utf-8").splitlines()):
        if line.startswith("  "):
            continue
        lines.append(line)
        if found := SCENE.fullmatch(line):
            scene = Scene(found[1], tmp_path / str(number), make_request)
            monkeypatch.setenv("PATH", f"{tmp_path / str(number)}:/usr/bin:/bin")
            monkeypatch.delenv("SLURM_CLUSTERS", raising=False)
            monkeypatch.delenv("PBS_SERVER", raising=False)
        elif found := SETS.fullmatch(line):
            monkeypatch.setenv(*found.groups())
        elif found := SAYS.fullmatch(line):
            scene.prepare(*found.groups())
        elif line and not line.startswith("#"):
            lines += [f"  {answer}".rstrip() for answer in scene.ask(line)]
    snapshot(HERE / "dialogues.txt", "".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(("system", "submit"), [("slurm", "sbatch"), ("pbs", "qsub")])
def test_no_variable_overrules_a_submission_and_a_missing_command_is_named(
    system, submit, make_request, monkeypatch, tmp_path
):
    kept, hidden = {"SLURM_CONF", "SLURM_CLUSTERS", "PBS_SERVER", "MINE"}, HIDDEN[system]
    for name in hidden | kept:
        monkeypatch.setenv(name, "x")
    scene = Scene(system, tmp_path / "bin", make_request)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    scene.prepare(submit, None, "says", "5")
    assert scene.answer("submit tag") == ["5;x" if system == "slurm" else "5"]
    environment = scene.fake.environment(submit).keys()
    assert not hidden & environment
    assert kept | {"PATH"} <= environment
    assert "SLURM_TIME_FORMAT" not in environment, "it would leak into the job"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match=submit) as caught:
        scene.answer("submit tag")
    assert "launch.scheduler: local" in caught.value.hint


def test_undecodable_output_is_shown_as_it_can_be():
    assert process.run(["/bin/bash", "-c", "printf 'a\\377b'"], hint="-").stdout == "a\ufffdb"


def test_the_words_of_a_command_that_waits_too_long_are_kept():
    command = ["/bin/bash", "-c", "echo 41; echo busy, sleeping and retrying >&2; sleep 9"]
    with pytest.raises(process.NoAnswerError, match=r"said:\nbusy, sleeping and retrying"):
        process.run(command, hint="-", timeout_s=0.3)


def meaning(said):
    """All that is read of a command's output; fields of PBS are separated by ``|``."""
    command, _, text = said.partition(" ")
    text = text.encode().decode("unicode_escape")
    if command == "sinfo":
        return " ".join(f"{queue}".removeprefix("Queue") for queue in parse_sinfo(text))
    if command == "qstat":
        fields = "".join(f"    {field}\n" for field in text.split("|"))
        jobs = parse_qstat(f"Job Id: 7.vm\n{fields}").items()
    else:
        rows = {"squeue": parse_squeue, "sacct": parse_sacct}[command](text)
        jobs = [(row.job_id, row.status) for row in rows]
    return " ".join(described(*job) for job in jobs)


def test_what_batch_systems_say_means_this(snapshot):
    check_table(snapshot, HERE / "states.txt", meaning)


WAITS = {JobState.QUEUED, JobState.HELD}
RUNS = {JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING}


def test_a_job_waits_or_runs_or_is_over_or_nobody_knows():
    assert {state for state in JobState if state.waits} == WAITS
    assert {state for state in JobState if state.alive} == WAITS | RUNS
    assert {state for state in JobState if not state.final} == WAITS | RUNS | {JobState.UNKNOWN}
