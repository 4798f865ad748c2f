"""The files that a job writes while it runs: heartbeat, errors, exit code, metrics, logs.

They can be read at any time, also after a crash: truncated lines are skipped, and fields of a wrong
type count as missing, so that ``status`` shows everything else.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from math import inf
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, NamedTuple

from pipectl.errors import DataFileError
from pipectl.faults import ErrorReport
from pipectl.fields import VERSION, DataFile, FieldError, LenientFields, Rule, read_value
from pipectl.files import open_regular, read_json, read_limited
from pipectl.runs.directory import RunDirectory, checkpoints
from pipectl.runs.record import PROFILING, Record
from pipectl.units import printable

_EDGE = 40
"""Lines read at either end of a long metrics file."""
_MAX_BYTES, _MAX_REPORT_BYTES, _MAX_DIGITS = 2**28, 2**24, 100
WARM_UP_STEPS = 3
"""Number of first steps, which are slower; their times are left out if there are others."""
_LABEL = re.compile(rb"\[(0|[1-9][0-9]{0,8})\] ")
_OF_RANK = re.compile(r"rank-([0-9]{1,9})\.log")
_CHUNK = 1 << 20
_MAX_LINE = 1 << 16
"""Maximum bytes of a line of a log; longer lines are split."""


@dataclass(frozen=True)
class RankBeat(LenientFields):
    """A rank in a heartbeat; figures are of its last step, and None before the first.

    Args:
        rank: number of the rank.
        host: name of its machine.
        node: name of its node in the batch system.
        pid: id of its process.
        stages: stages that it holds.
        busy_s: time spent computing.
        waiting: share of the time spent waiting for other ranks.
        rss_bytes, peak_bytes: current and largest memory of the process.
    """

    rank: int
    host: str = ""
    node: str = ""
    pid: int | None = None
    stages: tuple[int, ...] = ()
    busy_s: float | None = None
    waiting: Annotated[float, Rule(lambda share: share <= 1, "at most 1")] | None = None
    rss_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Heartbeat(LenientFields, DataFile):
    """``heartbeat.json``: what a job does, and the state of its ranks.

    Args:
        state: a phase, such as ``training``.
        step, steps: completed steps, and steps of the run; percent if the run only profiles.
        attempt: number of the job's start, from 1.
        ranks: the ranks.
        messages: how messages move: ``route``, ``progress`` and ``why``; empty before this is
            chosen.
        time: seconds since the epoch.
    """

    max_bytes: ClassVar[int] = _MAX_REPORT_BYTES
    cure: ClassVar[str] = "the running job writes it again within seconds"
    state: str = ""
    step: int | None = None
    steps: int | None = None
    attempt: int = 1
    ranks: tuple[RankBeat, ...] = ()
    messages: Mapping[str, str] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON object, fast also for thousands of ranks."""
        return {"version": VERSION, **vars(self), "ranks": [vars(rank) for rank in self.ranks]}


def read_heartbeat(run: RunDirectory) -> Heartbeat | None:
    """Return the last heartbeat; None before the first, or if it is damaged."""
    with suppress(DataFileError):
        return Heartbeat.load(run.heartbeat)
    return None


def read_errors(run: RunDirectory) -> list[ErrorReport]:
    """Return the readable error reports of the preparation and the ranks, first failure first."""
    errors = []
    for path in (run.preparation_error, *sorted(run.errors.glob("rank-*.json"))):
        with suppress(DataFileError):
            document = read_json(path, cure="", limit=_MAX_REPORT_BYTES)
            errors.append(read_value(ErrorReport, document))
    return sorted(errors, key=lambda error: (error.rank is not None, error.time))


def read_stall(run: RunDirectory) -> str:
    """Describe who waits for whom while no rank makes progress; otherwise empty."""
    from pipectl.watch.report import node_path, read_report

    starts = sorted(run.watch.glob("[0-9]*"))
    news = read_report(node_path(starts[-1], 0)) if starts else None
    return "" if news is None else printable(news[1].stalled)


def read_exit_code(run: RunDirectory) -> int | None:
    """Return the exit code of the job script; None while it runs."""
    return _read_number(run.exit_code)


def read_starts(run: RunDirectory) -> int:
    """Return how often the job script was started."""
    return max(0, _read_number(run.attempt) or 0)


def _read_number(path: Path) -> int | None:
    try:
        return int(read_limited(path, _MAX_DIGITS))
    except (OSError, ValueError):
        return None


def read_requeue_error(run: RunDirectory) -> str:
    """Return why the batch system did not requeue the job; empty if it did."""
    try:
        text = read_limited(run.requeue_error, _MAX_REPORT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def measured_steps(run: RunDirectory) -> list[int]:
    """Return the steps with measured timelines, ascending."""
    names = (re.fullmatch(r"step-(\d+)\.json", path.name) for path in run.trace.glob("step-*"))
    return sorted(int(match[1]) for match in names if match)


def last_checkpoint(run: RunDirectory) -> Path | None:
    """Return the directory of the latest complete checkpoint."""
    return next(iter(checkpoints(run.checkpoints)), None)


def _to_finite(value: Any) -> float:
    """Convert to a finite number, which may be negative."""
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise FieldError("must be a finite number")
    return float(value)


def _to_figures(value: Any) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    for name, figure in read_value(Mapping[str, Any], value).items():
        with suppress(FieldError):
            figures[name] = None if figure is None else _to_finite(figure)
    return figures


def _to_text(value: Any) -> str:
    text: str = read_value(str, value)
    return text.encode(errors="replace").decode()


Finite = Annotated[float, _to_finite]
Words = Annotated[str, _to_text]


@dataclass(frozen=True)
class NotFinite(LenientFields):
    """What was not finite in a step: the loss of a micro-batch, or a gradient in a stage."""

    loss_of_micro_batch: int | None = None
    gradient_of: Words | None = None
    stage: int | None = None

    def __str__(self) -> str:
        if self.loss_of_micro_batch is not None:
            return f"the loss of micro-batch {self.loss_of_micro_batch}"
        return f"the gradient of {self.gradient_of!r} in stage {self.stage}"


@dataclass(frozen=True)
class MetricsLine(LenientFields):
    """A line of ``metrics.jsonl``: of a training step, an evaluation, or a step's ``not_finite``.

    Args:
        attempt: number of the job's start, from 1.
        steps: number of steps of the run.
        loss: None if it is not finite.
        gradient_norm: None if gradients are not clipped.
        skipped: whether gradients overflowed in float16, so that nothing was updated.
        late_s: largest delay of a rank; of rehearsals only.
        early_stop: why training ended after this evaluation; empty if it did not.
    """

    attempt: int
    step: int
    steps: int | None = None
    time: Finite | None = None
    loss: Finite | None = None
    step_time_s: Finite | None = None
    samples_per_s: Finite | None = None
    tokens_per_s: Finite | None = None
    learning_rate: Finite | None = None
    gradient_norm: Finite | None = None
    loss_scale: Finite | None = None
    skipped: bool | None = None
    late_s: Finite | None = None
    evaluation: Annotated[Mapping[str, float | None], _to_figures] | None = None
    early_stop: Words = ""
    not_finite: NotFinite | None = None

    @property
    def is_step(self) -> bool:
        """Whether the line has the figures of a training step."""
        is_other = self.evaluation is not None or self.not_finite is not None
        return not is_other and (self.loss is not None or self.step_time_s is not None)


def read_metrics(run: RunDirectory, *, whole: bool = True) -> list[MetricsLine]:
    """Return the lines of ``metrics.jsonl``, see :func:`merge_attempts`; bad lines are skipped.

    Args:
        whole: whether to parse all of a long file. Otherwise only those lines are parsed that
            change the result of :func:`sum_up`: the first and last ones, the first of an attempt,
            and those not of a training step.
    """
    try:
        texts = read_limited(run.metrics, _MAX_BYTES).split(b"\n")
    except OSError:
        return []
    if not whole and len(texts) > 2 * _EDGE:
        rare = (
            text
            for before, text in pairwise(texts[_EDGE - 1 : -_EDGE])
            if b'"step_time_s"' not in text or text.split(b",")[0] != before.split(b",")[0]
        )
        texts = [*texts[:_EDGE], *rare, *texts[-_EDGE:]]
    lines = []
    for text in texts:
        with suppress(ValueError, RecursionError):  # a FieldError is a ValueError
            lines.append(read_value(MetricsLine, json.loads(text.decode("utf-8", "replace"))))
    return merge_attempts(lines)


def merge_attempts(lines: Iterable[MetricsLine]) -> list[MetricsLine]:
    """Return the lines by step: of training, of what was not finite, of the evaluation.

    If an attempt repeats steps of an earlier one, it replaces that one's lines from its first step.
    One that begins with an evaluation leaves the step before it.
    """

    def position(line: MetricsLine) -> tuple[float, bool]:
        return line.step, bool(line.evaluation)

    kept: dict[tuple[int, int], MetricsLine] = {}
    end, of_attempt = (inf, False), attrgetter("attempt")
    for _, group in groupby(sorted(lines, key=of_attempt, reverse=True), key=of_attempt):
        attempt = list(group)
        for line in attempt:
            if position(line) < end and (line.is_step or line.evaluation or line.not_finite):
                kind = 0 if line.is_step else 2 if line.not_finite is None else 1
                kept[line.step, kind] = line
        end = min(end, *map(position, attempt))
    return [kept[key] for key in sorted(kept)]


@dataclass(frozen=True)
class Measured:
    """Figures of a run; None if they are not known yet.

    Args:
        first_loss, last_loss: losses of the first and last recorded steps.
        samples_per_s, tokens_per_s, step_time_s: medians without the first steps.
        evaluation: metrics of the last evaluation, after ``evaluation_step``.
        early_stop: why training ended after that evaluation; empty if it did not.
        not_finite: steps whose loss or gradients were not finite.
        fault: what was not finite in the last such step, e.g. ``the loss of micro-batch 2``.
    """

    step: int = 0
    steps: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    step_time_s: float | None = None
    evaluation_step: int | None = None
    evaluation: Mapping[str, float | None] = field(default_factory=dict)
    early_stop: str = ""
    not_finite: tuple[int, ...] = ()
    fault: str = ""

    @property
    def remaining_s(self) -> float | None:
        """Time of the remaining steps at the measured step time."""
        if self.step_time_s is None or self.steps is None:
            return None
        return (self.steps - self.step) * self.step_time_s


def sum_up(lines: Sequence[MetricsLine]) -> Measured:
    """Summarise the lines that :func:`read_metrics` returns."""
    steps = [line for line in lines if line.is_step]
    last = steps[-1] if steps else MetricsLine(0, 0)
    evaluation = next((line for line in reversed(lines) if line.evaluation is not None), None)
    faults = [line for line in lines if line.not_finite is not None]
    return Measured(
        step=last.step,
        steps=last.steps,
        first_loss=steps[0].loss if steps else None,
        last_loss=last.loss,
        samples_per_s=_usual(line.samples_per_s for line in steps),
        tokens_per_s=_usual(line.tokens_per_s for line in steps),
        step_time_s=_usual(line.step_time_s for line in steps),
        evaluation_step=evaluation.step if evaluation else None,
        evaluation=(evaluation and evaluation.evaluation) or {},
        early_stop=evaluation.early_stop if evaluation else "",
        not_finite=tuple(line.step for line in faults),
        fault=str(faults[-1].not_finite) if faults else "",
    )


def _usual(figures: Iterable[float | None]) -> float | None:
    """The median of the figures of steps, without the first ones."""
    known = [each for each in figures if each]
    return median(known[min(WARM_UP_STEPS, len(known) - 1) :]) if known else None


def read_measured(
    run: RunDirectory, record: Record | None, heartbeat: Heartbeat | None
) -> Measured:
    """Return the figures of a run; steps are percent if the run only profiles.

    Args:
        heartbeat: the last one; None before the first.
    """
    heartbeat = heartbeat or Heartbeat()
    if record is None or record.kind != PROFILING:
        lines = read_metrics(run, whole=False)
        measured = sum_up(lines)
        # After a resume, training goes on from a checkpoint, often of an earlier step.
        before = max((line.attempt for line in lines), default=heartbeat.attempt)
        if heartbeat.step and before < heartbeat.attempt:
            measured = replace(measured, step=heartbeat.step, steps=heartbeat.steps)
        return measured
    return Measured(step=heartbeat.step or 0, steps=record.steps)


class Line(NamedTuple):
    """One line of a log.

    Args:
        rank: None for output of the job script, the preparation and the launcher.
        text: the line after its rank, without a line end.
    """

    rank: int | None
    text: str


class Log:
    """A growing log, which is read from where the last reading ended.

    In the log of a node, each line begins with its rank.
    """

    def __init__(self, path: Path) -> None:
        self.offset = 0
        self._path = path
        self._rest = b""
        name = _OF_RANK.fullmatch(path.name)
        self._rank = None if name is None else int(name[1])
        self._is_labelled = path.name.startswith("node-")

    def read_lines(self, *, to_the_end: bool = False) -> Iterator[Line]:
        """Yield the complete lines since the last call.

        Args:
            to_the_end: whether to yield an incomplete last line too.
        """
        try:
            file = os.fdopen(open_regular(self._path), "rb")
        except OSError:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self.offset:  # it was cut
                self.offset, self._rest = 0, b""
            file.seek(self.offset)
            while text := file.read(_CHUNK):
                self.offset += len(text)
                *lines, self._rest = (self._rest + text).split(b"\n")
                yield from map(self._line, lines)
                while len(self._rest) > _MAX_LINE:
                    yield self._line(self._rest[:_MAX_LINE])
                    self._rest = self._rest[_MAX_LINE:]
        if to_the_end and self._rest:
            yield self._line(self._rest)
            self._rest = b""

    def _line(self, text: bytes) -> Line:
        """Return a line without text that a carriage return overwrites on a terminal."""
        rank, head = self._rank, b"" if self._rank is None else b"[%d] " % self._rank
        if self._is_labelled and (label := _LABEL.match(text)) is not None:
            rank, head, text = int(label[1]), label[0], text[label.end() :]
        body = text.rstrip(b"\r").rpartition(b"\r")[2]
        return Line(rank, (head + body).decode("utf-8", "replace"))


class Logs:
    """All logs of a run: the ranks' first, then the job's, which ends with the failure."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._logs: dict[Path, Log] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes read from all logs."""
        return sum(log.offset for log in self._logs.values())

    def read_lines(self, *, to_the_end: bool = False) -> Iterator[Line]:
        """Yield the new lines of each log; see :meth:`Log.read_lines`."""
        for path in (*self._run.rank_logs(), self._run.job_log):
            log = self._logs.setdefault(path, Log(path))
            yield from log.read_lines(to_the_end=to_the_end)
