"""The files of a run: its record, and what a job writes while it runs."""

import json
import os
import time
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipectl.errors import DataFileError
from pipectl.runs import (
    PROFILING,
    Event,
    Heartbeat,
    Line,
    Log,
    Logs,
    Metrics,
    MetricsLine,
    RankBeat,
    Record,
    RunDirectory,
    SweepPoint,
    plan_id,
    read_errors,
    read_exit_code,
    read_heartbeat,
    read_measured,
    read_metrics,
    read_speed,
)
from pipectl.runs.metrics import merge_attempts, sum_up
from tests.batch.job_requests import check_table

HERE = Path(__file__).parent
RECORD = Record("gpt", "slurm", "7f3a9c", 1795228138.5, ranks=8, nodes=2, steps=500)
VALUES = {"optimizer.kwargs.lr": 1e-3, "training.precision": "bf16", "model.kwargs.x": None}


def test_a_record_keeps_its_history_and_is_read_back_equal(tmp_path):
    submitted = RECORD.with_state(1.0, "submitted", job_id="28")
    assert (RECORD.state, RECORD.job_id) == ("submitting", None)
    assert (submitted.state, submitted.job_id) == ("submitted", "28")
    cancelled = submitted.with_state(2.0, "cancelled")
    assert cancelled.job_id == "28"
    assert cancelled.history == (Event(1.0, "submitted", "28"), Event(2.0, "cancelled"))
    path = tmp_path / "record.json"
    for record in (
        RECORD,
        cancelled,
        submitted.with_state(2.0, "cancelled", detail="by me"),
        replace(RECORD, kind=PROFILING),
        replace(RECORD, sweep=SweepPoint("20261120-152233-gpt", VALUES), task=3),
    ):
        record.save(path)
        assert Record.load(path) == record
    document = json.loads(path.read_text())
    assert document["version"] == 1
    del document["kind"]  # as written before there were others than trainings
    path.write_text(json.dumps(document))
    assert Record.load(path).kind == "training"


def test_damaged_records_are_refused_by_field(tmp_path, snapshot):
    path = tmp_path / "record.json"
    RECORD.save(path)
    good = json.loads(path.read_text())

    def fault(given):
        path.write_text(json.dumps({**good, **json.loads(given)}))
        with pytest.raises(DataFileError) as caught:
            Record.load(path)
        return caught.value.message.removeprefix(f"{tmp_path}/")

    check_table(snapshot, HERE / "damaged_records.txt", fault)


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path, "demo", 0.0)


def line(attempt, step, **more):
    return MetricsLine(attempt, step, loss=attempt + step / 1000, **more)


def write(run, lines, end="\n"):
    run.metrics.write_text("\n".join(json.dumps(asdict(value)) for value in lines) + end)


def test_metrics_come_by_step_and_a_later_attempt_wins_from_its_first_step_on(run):
    """The evaluation comes after its step; lines cut by a crash, or of no metrics, are skipped."""
    first = [line(1, step) for step in range(1, 8)]
    first.insert(4, line(1, 4, evaluation={"loss": 1.0}))
    first.insert(7, line(1, 6, evaluation={"loss": 2.0}))
    write(run, first[::-1], end='\n{"attempt":1,"st')
    assert read_metrics(run) == first
    second = [line(2, 5), line(2, 6)]
    with run.metrics.open("a") as stream:  # the first line is cut with that
        stream.writelines(json.dumps(asdict(each)) + "\n" for each in (line(2, 4), *second))
    with run.metrics.open("ab") as stream:
        stream.write(b'3\n[]\nnull\n{"step": 1}\n\0\0\n\xff\n')
    assert read_metrics(run) == [*first[:5], *second]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), max_size=30))
def test_every_step_has_one_line_of_the_last_attempt_that_reached_it(pairs):
    merged = merge_attempts([line(attempt, step) for attempt, step in pairs])
    steps = [value.step for value in merged]
    assert steps == sorted(set(steps))
    attempts = [value.attempt for value in merged]
    assert attempts == sorted(attempts), "an earlier attempt never follows a later one"
    for attempt in {attempt for attempt, _ in pairs}:
        first = min(step for other, step in pairs if other == attempt)
        overruled = any(other > attempt and step <= first for other, step in pairs)
        assert overruled or (attempt, first) in zip(attempts, steps, strict=True)


def test_a_file_with_an_attempt_per_line_is_read_in_time_that_grows_with_its_lines():
    lines = [line(number, number) for number in range(20_000)]
    start = time.process_time()
    assert merge_attempts(lines) == lines
    assert time.process_time() - start < 5, "it took a time that grows with the square"


STEPS = 20_000


def step_line(step, attempt=1, **more):
    """A line of a run with very many, of which most are not read."""
    whole = line(attempt, step, steps=STEPS, step_time_s=0.5, samples_per_s=16.0, time=1.7e9 + step)
    return json.dumps({**asdict(whole), "loss": 3 / step, **more})


def test_figures_of_a_long_run_are_those_of_all_lines_and_of_its_last_attempt(run):
    lines = []
    for step in range(1, STEPS + 1):
        lines.append(step_line(step))
        if step % 100 == 0:
            lines.append(json.dumps({"attempt": 1, "step": step, "evaluation": {"loss": 1 / step}}))
        if step in (7, 9_000, 9_001, STEPS - 1):
            fault = {"loss_of_micro_batch": step % 3}
            lines.append(json.dumps({"attempt": 1, "step": step, "not_finite": fault}))
    run.metrics.write_text("\n".join(lines) + "\n")
    found, every = Metrics(run.metrics).lines(), read_metrics(run)
    assert len(found) < len(every) / 5
    assert sum_up(found) == sum_up(every)
    assert sum_up(found).not_finite == (7, 9_000, 9_001, STEPS - 1)
    second = [step_line(step, 2, loss=7.0) for step in range(STEPS - 10_000, STEPS - 100)]
    run.metrics.write_text("\n".join([*lines, *second]) + "\n")
    last = sum_up(Metrics(run.metrics).lines())
    assert (last.step, last.last_loss, last.first_loss) == (STEPS - 101, 7.0, 3.0)
    assert last.not_finite == sum_up(read_metrics(run)).not_finite == (7, 9_000, 9_001)


def test_a_resumed_run_is_at_the_step_that_it_goes_on_from(run):
    assert Metrics(run.metrics).lines() == []
    run.metrics.write_text("\n".join(step_line(step) for step in range(1, 21)) + '\n{"torn')
    assert Metrics(run.metrics).lines() == read_metrics(run) != [], "as the file is short"
    Heartbeat("training", 20, STEPS).save(run.start.heartbeat)
    assert read_measured(run, None, read_heartbeat(run.start)).step == 20
    Heartbeat("training", 10, STEPS, attempt=2).save(run.start.heartbeat)
    measured = read_measured(run, None, read_heartbeat(run.start))
    assert (measured.step, measured.last_loss, measured.first_loss) == (10, 3 / 10, 3.0)


def test_a_start_that_begins_again_shows_nothing_that_is_to_be_done_again(run):
    """Without a checkpoint it begins at step 0; before it has read one, its heartbeat says 0."""
    evaluation = json.dumps({"attempt": 1, "step": 20, "evaluation": {"loss": 1.0}})
    lines = [*(step_line(step) for step in range(1, 21)), evaluation]
    run.metrics.write_text("\n".join(lines) + "\n")
    Heartbeat("training", 0, STEPS, attempt=2).save(run.start.heartbeat)
    beat = read_heartbeat(run.start)
    found = read_measured(run, None, beat)
    assert (found.step, found.has_losses, found.first_loss, found.last_loss) == (
        0,
        False,
        None,
        None,
    )
    assert found.evaluation == {}
    assert found.remaining_s == STEPS * 0.5
    (run.checkpoints / "step-000012").mkdir(parents=True)
    found = read_measured(run, None, beat)
    assert (found.step, found.last_loss) == (12, 3 / 12)


def test_a_training_that_goes_on_has_not_ended_early(run):
    """From its submission on; a start that had nothing to do changes nothing."""
    ended = json.dumps({"attempt": 1, "step": 6, "evaluation": {"loss": 1.0}, "early_stop": "why"})
    lines = [*(step_line(step) for step in range(1, 7)), ended]

    def early_stop():
        run.metrics.write_text("\n".join(lines) + "\n")
        return read_measured(run, None, read_heartbeat(run.start)).early_stop

    assert early_stop() == "why"
    Heartbeat("done", 6, STEPS).save(run.start.heartbeat)
    assert early_stop() == "why"
    start = run.start_of(2)
    start.path.mkdir(parents=True)
    assert early_stop() == ""
    Heartbeat("warming up", 6, STEPS, attempt=2).save(start.heartbeat)
    assert early_stop() == ""
    Heartbeat("done", 6, STEPS, attempt=2).save(start.heartbeat)
    assert early_stop() == "why"
    Heartbeat("training", 7, STEPS, attempt=2).save(start.heartbeat)
    lines.append(step_line(7, 2))
    assert early_stop() == ""
    Heartbeat("done", 8, STEPS, attempt=2).save(start.heartbeat)
    lines.append(step_line(8, 2))
    assert early_stop() == ""


def test_the_speed_is_that_of_the_present_plan(run):
    """40 steps of 40 ms under a plan, then some of 10 ms under another, then the first again."""
    make_plan, line = run.plan.write_text, partial(step_line, samples_per_s=750.0)
    make_plan("{}")
    first = plan_id(run)
    slow = [line(step, plan=first, step_time_s=0.04) for step in range(1, 41)]
    run.metrics.write_text("\n".join(slow) + "\n")

    def speeds(attempt):
        """Of the last steps, and of all."""
        beat = Heartbeat("training", 40, STEPS, attempt)
        found = read_measured(run, None, beat), read_speed(run)
        return [(each.step_time_s, each.timed_steps, each.is_of_plan) for each in found]

    assert speeds(1) == [(0.04, 20, False), (0.04, 37, False)]
    assert speeds(2) == [(0.04, 20, False), (0.04, 37, False)], "it has the same plan"
    make_plan("{ }")
    os.utime(run.plan, ns=(1, 1))
    assert plan_id(run) != first
    assert speeds(2) == [(None, 0, True)] * 2, "nobody knows the speed of a plan that never ran"
    assert read_measured(run, None, Heartbeat("", 40, STEPS, 2)).remaining_s is None
    fast = [line(40 + n, 2, plan=plan_id(run), step_time_s=0.01) for n in range(1, 10)]
    run.metrics.write_text("\n".join([*slow, *fast]) + "\n")
    assert speeds(2) == [(0.01, 6, True)] * 2
    make_plan("{}")
    os.utime(run.plan, ns=(2, 2))
    assert speeds(3) == [(0.04, 20, True), (0.04, 37, True)]


def test_lines_without_a_plan_count_from_the_last_start_and_rebalancing_on(run):
    """As written by earlier versions."""
    moved = {"attempt": 2, "step": 30, "rebalanced": {"why": "a rank is slow"}}
    lines = [step_line(step, step_time_s=0.3) for step in range(1, 21)]
    lines += [step_line(step, 2, step_time_s=0.2) for step in range(21, 31)]
    for more, step_s in (
        ([], 0.2),
        ([json.dumps(moved), *(step_line(s, 2, step_time_s=0.1) for s in (31, 32))], 0.1),
        ([step_line(33, 3, step_time_s=0.05)], 0.05),
    ):
        lines += more
        run.metrics.write_text("\n".join(lines) + "\n")
        found = read_measured(run, None, None), read_speed(run)
        assert [each.step_time_s for each in found] == [step_s, step_s]


def test_the_speed_of_a_long_run_that_is_over_is_that_of_all_its_steps(run):
    """Its last ones are slower; some hundred tell that."""
    times = {step: 0.5 + 0.1 * (step % 7) + (step > 15_000) for step in range(1, STEPS + 1)}
    lines = [step_line(step, step_time_s=time_s) for step, time_s in times.items()]
    run.metrics.write_text("\n".join(lines) + "\n")
    assert read_measured(run, None, None).step_time_s == pytest.approx(1.8, abs=0.11)
    found = read_speed(run)
    assert found.step_time_s == pytest.approx(0.9, abs=0.11)
    assert 250 < found.timed_steps < 600


def test_metrics_are_read_from_where_the_last_reading_ended(run):
    """Also if the last line was half written; a file in place of another is read from its begin."""
    metrics = Metrics(run.metrics)
    assert metrics.lines() == []
    run.metrics.write_text("\n".join(step_line(step) for step in range(1, STEPS)) + "\n")
    before = metrics.lines()
    size = metrics.bytes_read
    assert before[-1].step == STEPS - 1
    assert size == run.metrics.stat().st_size
    assert (metrics.lines(), metrics.bytes_read) == (before, size), "nothing is new"
    text = step_line(STEPS)
    with run.metrics.open("a") as stream:
        stream.write(text[:20])
    assert metrics.lines() == before
    with run.metrics.open("a") as stream:
        stream.write(f"{text[20:]}\n{step_line(STEPS - 9, 2)}\n")
    assert [line.step for line in metrics.lines()[-2:]] == [STEPS - 10, STEPS - 9]
    assert metrics.bytes_read == run.metrics.stat().st_size
    assert metrics.curve()[-1].step == STEPS - 9
    for text in (step_line(1, 3), "\n".join(step_line(step, 3) for step in range(2, STEPS + 99))):
        run.metrics.write_text(f"{text}\n")  # first shorter, then longer than what was read
        assert {line.attempt for line in metrics.lines()} == {3}
    other = run.path / "other"
    other.write_text(step_line(7, 4) + "\n")
    other.rename(run.metrics)
    assert [line.step for line in metrics.lines()] == [7]
    run.metrics.unlink()
    assert metrics.lines() == metrics.curve() == []


def test_a_file_of_any_size_shows_its_begin_and_its_end_and_a_curve(run, monkeypatch):
    monkeypatch.setattr("pipectl.runs.metrics._CHUNK", 1 << 14)
    monkeypatch.setattr("pipectl.runs.metrics._MAX_BYTES", 1 << 17)
    evaluation = json.dumps({"attempt": 1, "step": STEPS, "evaluation": {"loss": 0.5}})
    lines = [*(step_line(step) for step in range(1, STEPS + 1)), evaluation]
    run.metrics.write_text("\n".join(lines) + "\n")
    metrics = Metrics(run.metrics)
    measured = sum_up(metrics.lines())
    assert metrics.bytes_read == (1 << 17) + (1 << 14) < run.metrics.stat().st_size / 20
    assert (measured.step, measured.first_loss, measured.last_loss) == (STEPS, 3.0, 3 / STEPS)
    assert measured.evaluation == {"loss": 0.5}
    assert measured.step_time_s == 0.5
    steps = [line.step for line in metrics.curve()]
    assert (steps[0], steps[-1]) == (1, STEPS)
    assert len(read_metrics(run)) == len(lines), "which is slower"


def test_a_curve_has_all_steps_of_a_short_run_and_some_of_a_long_one(run, monkeypatch):
    monkeypatch.setattr("pipectl.runs.metrics._MAX_CURVE", 200)
    metrics = Metrics(run.metrics)
    for count in (100, 3000):
        run.metrics.write_text("\n".join(step_line(step) for step in range(1, count + 1)) + "\n")
        metrics.lines()
        steps = [line.step for line in metrics.curve()]
        assert steps[-1] == count
        if count == 100:
            assert steps == [*range(1, 101)]
    assert len(steps) < 300
    assert max(b - a for a, b in pairwise(steps)) < 40, "they are spread over the run"


def test_metrics_that_no_job_writes_are_harmless(run):
    metrics = Metrics(run.metrics)
    deep = b'{"attempt": 1, "step": ' + b"[" * 100_000
    for text in (b"\0" * (3 << 20), deep + b"\n", b"\n" * 5000, b'{"evaluation"\n' * 5000):
        run.metrics.write_bytes(text)
        assert metrics.lines() == metrics.curve() == []
        with run.metrics.open("ab") as stream:
            stream.write(f"\n{step_line(8)}\n".encode())
        assert [line.step for line in metrics.lines()] == [8]
    run.metrics.unlink()
    run.metrics.symlink_to("/dev/zero")
    assert metrics.lines() == []
    run.metrics.unlink()
    os.mkfifo(run.metrics)
    assert metrics.lines() == []


def test_what_is_damaged_in_a_heartbeat_hides_nothing_else(run):
    assert read_heartbeat(run.start) is None
    ranks = RankBeat(3, "h", "n1", 7, (0, 1), waiting=0.5), RankBeat(0)
    heartbeat = Heartbeat("training", 2, 9, 1, ranks, {"route": "host"}, 1.7e9)
    heartbeat.save(run.start.heartbeat)
    assert read_heartbeat(run.start) == heartbeat
    run.start.heartbeat.write_text('{"version": 1, "sta')
    assert read_heartbeat(run.start) is None
    parts = [{"rank": 1, "waiting": 2, "pid": 5}, {"node": "n0"}, 7]
    beat = {"state": 5, "step": 3, "steps": -1, "attempt": "x", "time": 1.0, "ranks": parts}
    run.start.heartbeat.write_text(json.dumps({**beat, "messages": [], "later": {}}))
    assert read_heartbeat(run.start) == Heartbeat(step=3, ranks=(RankBeat(1, pid=5),), time=1.0)


def test_errors_come_in_the_order_of_failure(run):
    assert read_errors(run.start) == []
    for rank, when in enumerate(({"time": 20.0}, {"time": 10.0}, {}, {"time": 10.0})):
        run.start.error_of(rank).write_text(json.dumps({"rank": rank, **when}))
    run.start.error_of(4).write_text('{"rank": 4, "ti')
    assert [report.rank for report in read_errors(run.start)] == [1, 3, 0, 2]
    wrong = '{"time": 30.0, "exit_code": 4, "stage": -1, "message": 5}'
    run.start.preparation_error.write_text(wrong)
    run.start.error_of(1).write_text('{"rank": 1, "time": 10.0, "exit_code": 300}')
    first, second, *_ = read_errors(run.start)
    assert (first.rank, first.exit_code, first.stage, first.what) == (None, 4, None, "no message")
    assert (second.rank, second.exit_code, second.where) == (1, 1, "rank 1")


@pytest.mark.parametrize("text", ["", "\n", "n1", "n1\n \n\x1b[2J"])
def test_a_damaged_report_of_a_launcher_is_still_one(run, text):
    run.start.launch_error.write_text(text)
    (error,) = read_errors(run.start)
    assert error.message.startswith("no rank has begun: exit code unknown")
    assert "\x1b" not in f"{error.where}{error.message}"


def test_what_open_mpi_says_to_root_is_told_with_what_to_do(run):
    rule, said = "-" * 74, "prterun has detected an attempt to run as root."
    run.start.launch_error.write_text(f"n1\n1\n{rule}\n{said}\n\nRunning as x\nWe advise\n{rule}\n")
    (error,) = read_errors(run.start)
    assert error.message == f"no rank has begun: exit code 1\n{said}"
    assert "OMPI_ALLOW_RUN_AS_ROOT" in (error.hint or "")


@pytest.mark.parametrize(
    ("daemon", "who"), [("slurmstepd-node4", "node4"), ("slurmstepd", "each of its nodes")]
)
def test_a_node_without_the_directory_of_a_run_is_named(run, daemon, who):
    line = f"{daemon}: error: couldn't chdir to `{run.path}': No such file or directory: going to"
    run.start.launch_error.write_text(f"node3\n255\nsrun: x\n{line} /tmp instead\nassert failed\n")
    (error,) = read_errors(run.start)
    assert line in error.message
    assert error.hint == f"check that {who} has that directory"
    run.start.launch_error.unlink()
    run.job_log.write_text(f"{line} /tmp instead\nAbort(3)\n")
    assert read_errors(run.start) == [], "of a run that is not over"
    run.start.exit_code.write_text("3\n")
    (other,) = read_errors(run.start)
    assert (other.message, other.hint) == (f"{line} /tmp instead", error.hint)
    assert other.host == who.removeprefix("each of its nodes")


def test_an_exit_code_is_a_number_or_none(run):
    assert read_exit_code(run.start) is None
    for text, code in ((b"0\n", 0), (b"143\n", 143), (b"", None), (b"x\n", None), (b"\xff", None)):
        run.start.exit_code.write_bytes(text)
        assert read_exit_code(run.start) == code


def test_whose_a_line_is(tmp_path, snapshot):
    def line(given):
        name, _, text = given.partition(" ")
        path = tmp_path / name
        path.write_bytes(text.encode().decode("unicode_escape").encode("latin-1") + b"\n")
        return " ".join(map(str, Log(path).read_lines(to_the_end=True)))

    check_table(snapshot, HERE / "log_lines.txt", line)


def test_a_line_that_grows_is_read_once_and_whole_and_a_log_that_was_cut_from_its_begin(tmp_path):
    path = tmp_path / "rank-0000.log"
    log = Log(path)
    assert list(log.read_lines()) == []
    path.write_bytes(b"caf\xc3")
    assert list(log.read_lines()) == []
    with path.open("ab") as file:
        file.write(b"\xa9\nbeg")
    assert list(log.read_lines()) == [Line(0, "[0] café")]
    assert list(log.read_lines(to_the_end=True)) == [Line(0, "[0] beg")]
    assert list(log.read_lines(to_the_end=True)) == []
    with path.open("ab") as file:
        file.write(b"thr")
    assert list(log.read_lines()) == []
    path.write_text("new\n")
    assert list(log.read_lines(to_the_end=True)) == [Line(0, "[0] new")]


def test_long_logs_are_read_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("pipectl.runs.logs._CHUNK", 7)
    monkeypatch.setattr("pipectl.runs.logs._MAX_LINE", 20)
    path = tmp_path / "node-n1.log"
    path.write_text("".join(f"[{rank}] {'x' * rank}\n" for rank in range(10)) + "y" * 50)
    lines = list(Log(path).read_lines(to_the_end=True))
    assert [line.rank for line in lines] == [*range(10), None, None, None]


@pytest.mark.parametrize("window", [1, 16, 1 << 16])
def test_the_last_lines_of_logs_are_those_of_a_reading_of_everything(run, monkeypatch, window):
    monkeypatch.setattr("pipectl.runs.logs._WINDOW", window)
    node = run.logs / "node-n1.log"
    node.write_text("".join(f"[{number % 3}] line {number}\n" for number in range(100)))
    run.job_log.write_text("first\n\nsecond\nthi")

    def last(count, *, rank=None, to_the_end=True):
        logs = Logs(run)
        found = logs.read_last_lines(
            count, lambda line: rank is None or line.rank == rank, to_the_end=to_the_end
        )
        assert list(logs.read_lines()) == []
        return [line.text for line in found]

    every = [line.text for line in Logs(run).read_lines(to_the_end=True)]
    for count in (0, 1, 2, 4, 5, 50, 1000):
        assert last(count) == (every[-count:] if count else [])
    of_rank = [text for text in every if text.startswith("[2]")]
    assert last(3, rank=2) == of_rank[-3:]
    assert last(1000, rank=2) == of_rank
    assert last(5, rank=7) == []
    assert last(2, to_the_end=False) == ["", "second"]


def test_new_lines_follow_the_last_ones_and_a_huge_log_is_not_read(run):
    with run.job_log.open("wb") as file:
        file.seek(1 << 40)  # a hole: reading it would take minutes
        file.write(b"\nlast\nbeg")
    logs = Logs(run)
    assert [line.text for line in logs.read_last_lines(1, lambda _: True)] == ["last"]
    with run.job_log.open("a") as file:
        file.write("in\n")
    assert [line.text for line in logs.read_lines()] == ["begin"]
    (bar,) = Log(run.job_log).read_last_lines(1, lambda _: True)
    assert bar.text == "begin"


def test_logs_of_ranks_come_before_that_of_the_job_by_their_numbers(tmp_path):
    run = RunDirectory(tmp_path)
    run.logs.mkdir()
    run.job_log.write_text("why\n")
    for rank in (10000, 10, 9):
        run.rank_log(rank).write_text("text\n")
    run.rank_log(0).symlink_to("/dev/zero")  # which is no file
    os.mkfifo(run.rank_log(1))
    run.rank_log(2).mkdir()
    texts = [line.text for line in Logs(run).read_lines(to_the_end=True)]
    assert texts == ["[9] text", "[10] text", "[10000] text", "why"]
