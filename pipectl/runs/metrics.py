"""``metrics.jsonl``: a line per training step and evaluation, and the figures made of them.

It can be read at any time, also after a crash: lines that are cut or damaged are skipped, and
fields of a wrong type count as missing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, groupby
from math import inf
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any
from zlib import crc32

from pipectl.fields import FieldError, LenientFields, read_value
from pipectl.files import MAX_BYTES, open_regular, read_limited
from pipectl.runs.directory import RunDirectory, step_of
from pipectl.runs.phases import DONE
from pipectl.runs.readers import Heartbeat, LostTo, RankBeat, Share, last_checkpoint
from pipectl.runs.record import PROFILING, Record

_FULL_SHARE = 0.9
"""A smaller share of its cores counts as a loss of a rank."""
WARM_UP_STEPS = 3
"""Number of first steps, which are slower; their times are left out if there are others."""
_RECENT = 20
"""Steps of which the figures of a run that goes on are medians."""
_EDGE = 40
"""Lines read at either end of a long file."""
_MAX_BYTES, _CHUNK, _MAX_LINE = 1 << 28, 1 << 20, 1 << 20
_BEGIN = 256
"""Bytes that tell a file from the one that was there before, and an attempt from another."""
_MAX_RARE = {b'"evaluation"': 1000, b'"not_finite"': 10_000, b'"rebalanced"': 1000}
"""Maximum lines that are kept, by the key that tells them from those of training steps."""
_MAX_STARTS = 1000
_MAX_CURVE, _MAX_SPREAD = 2000, 500


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
    """What was not finite: the loss of a micro-batch, a buffer, or a gradient of a stage.

    Args:
        cause: what computed the first value that was not finite; empty if it is not known.
    """

    loss_of_micro_batch: int | None = None
    gradient_of: Words | None = None
    stage: int | None = None
    buffer: Words | None = None
    cause: Words = ""

    def __str__(self) -> str:
        if self.loss_of_micro_batch is not None:
            return f"the loss of micro-batch {self.loss_of_micro_batch}"
        if self.buffer is not None:
            return f"the buffer {self.buffer!r}"
        return f"the gradient of {self.gradient_of!r} in stage {self.stage}"


_HINTS = {
    "limit": "raise it to the cores that the ranks compute with",
    "hypervisor": "use a machine that does not share its cores",
}
"""What to do, by who had the rest of the cores' time."""
_HINTS_OF_BATCH = {
    "slurm": "ask for whole nodes: `slurm.options: {exclusive: true}`",
    "pbs": "ask for whole nodes: `pbs.options: {l: [place=scatter:excl]}`",
}
"""What to do about other processes, by batch system."""


@dataclass(frozen=True)
class CoreShare(LenientFields):
    """How much of the time of their cores ranks got while they computed.

    Args:
        share: on average of those that lost some to others; 1 if there is none.
        ranks: number of ranks that lost some.
        rank: that lost most.
        lost_to, limit_cores: who had most of what it lost; see :class:`pipectl.runs.RankBeat`.
    """

    share: Share
    ranks: int | None = None
    rank: int | None = None
    lost_to: LostTo | None = None
    limit_cores: Finite | None = None

    @staticmethod
    def of(ranks: Sequence[RankBeat]) -> CoreShare | None:
        """The share of ranks in their last intervals; None if no rank knows its own."""
        shares = [(each.processor, each) for each in ranks if each.processor is not None]
        less = [pair for pair in shares if pair[0] < _FULL_SHARE]
        if not less:
            return CoreShare(1.0) if shares else None
        _, worst = min(less, key=itemgetter(0))
        share = round(mean(each for each, _ in less), 3)
        return CoreShare(share, len(less), worst.rank, worst.lost_to, worst.limit_cores)

    def hint(self, scheduler: str) -> str:
        """What to do about it, beyond ending other processes.

        Args:
            scheduler: name of the run's batch system.
        """
        if self.lost_to == "processes":
            return _HINTS_OF_BATCH.get(scheduler, "")
        return _HINTS.get(self.lost_to or "", "")

    def describe(self, beats: Sequence[RankBeat]) -> str:
        """``ranks got 26% of their cores; other processes on this machine used the rest``.

        Args:
            beats: all ranks of the run.
        """
        worst = next((beat for beat in beats if beat.rank == self.rank), None)
        nodes = {beat.node for beat in beats} if self.ranks != 1 else {worst and worst.node}
        where = f"on {worst.node}" if worst and worst.node and len(nodes) == 1 else "on their nodes"
        if worst and worst.host == socket.gethostname() and len(nodes) == 1:
            where = "on this machine"
        who = "ranks" if self.ranks == len(beats) else f"{self.ranks} of {len(beats)} ranks"
        if (self.ranks or 0) > len(beats):  # the heartbeat is not there, or of another start
            who = f"{self.ranks} ranks"
        if self.ranks == 1:
            who = "the rank" if len(beats) == 1 else f"rank {self.rank}"
        got = f"{who} got {self.share:.0%} of {'its' if self.ranks == 1 else 'their'} cores"
        if self.lost_to == "limit":
            them = "it" if self.ranks == 1 else "them"
            to = "" if self.limit_cores is None else f" to {self.limit_cores:g}"
            return f"{got}; a control group (cgroup) limits {them}{to}"
        other = "the hypervisor" if self.lost_to == "hypervisor" else "other processes"
        return f"{got}; {other} {where} used the rest"


@dataclass(frozen=True)
class Rebalanced(LenientFields):
    """Why the training went on under another plan.

    Args:
        step_time_before_s, step_time_after_s: predicted for the plan before and for that plan.
    """

    why: Words = ""
    step_time_before_s: Finite | None = None
    step_time_after_s: Finite | None = None


@dataclass(frozen=True)
class MetricsLine(LenientFields):
    """A line of ``metrics.jsonl``: of a training step, an evaluation, a step's ``not_finite``, or
    of a step after which another plan was used.

    Args:
        attempt: number of the job's start, from 1.
        steps: number of steps of the run.
        plan: under which the step was made, see :func:`plan_id`; empty if the line does not say it.
        loss: None if it is not finite.
        gradient_norm: None if gradients are not clipped.
        skipped: whether gradients overflowed in float16, so that nothing was updated.
        late_s: largest delay of a rank; of rehearsals only.
        processor: share of their cores that ranks got up to this step; None if it is not known.
        early_stop: why training ended after this evaluation; empty if it did not.
    """

    attempt: int
    step: int
    steps: int | None = None
    plan: Words = ""
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
    processor: CoreShare | None = None
    evaluation: Annotated[Mapping[str, float | None], _to_figures] | None = None
    early_stop: Words = ""
    not_finite: NotFinite | None = None
    rebalanced: Rebalanced | None = None

    @property
    def kind(self) -> int:
        """0 for the line of a step, else which other kind it is."""
        others = self.not_finite, self.evaluation, self.rebalanced
        return next((i for i, each in enumerate(others, 1) if each is not None), 0)

    @property
    def is_step(self) -> bool:
        """Whether the line has the figures of a training step."""
        return not self.kind and (self.loss is not None or self.step_time_s is not None)


def read_metrics(run: RunDirectory) -> list[MetricsLine]:
    """Return all lines of ``metrics.jsonl``, see :func:`merge_attempts`; bad lines are skipped.

    :class:`Metrics` reads long files faster.
    """
    return merge_attempts(_all_lines(run.metrics))


Columns = dict[str, list[float | bool | None]]
"""Figures by name, each with a value per step."""
_FIGURES = (
    "time", "loss", "step_time_s", "samples_per_s", "tokens_per_s", "learning_rate",
    "gradient_norm", "loss_scale", "skipped", "late_s",
)  # fmt: skip


def read_columns(run: RunDirectory) -> Columns:
    """Return all figures of a run as a table: a row per step, in order.

    The columns ``step`` and ``loss`` are always there, and ``evaluation.NAME`` for every metric of
    the evaluations after steps. A figure that a step has not, or that is not finite, is None.
    """
    rows: dict[int, dict[str, float | bool | None]] = {}
    for line in merge_attempts(_all_lines(run.metrics)):
        row = rows.setdefault(line.step, {})
        if line.is_step:
            row |= {name: getattr(line, name) for name in _FIGURES}
        for name, value in (line.evaluation or {}).items():
            row[f"evaluation.{name}"] = value
    found = dict.fromkeys(name for row in rows.values() for name, v in row.items() if v is not None)
    evaluated = dict.fromkeys(
        name for row in rows.values() for name in row if name.startswith("evaluation.")
    )
    names = [name for name in _FIGURES if name == "loss" or name in found]
    columns: Columns = {"step": list(rows)}
    columns |= {n: [row.get(n) for row in rows.values()] for n in (*names, *evaluated)}
    return columns


def _all_lines(path: Path) -> Iterator[MetricsLine]:
    """Yield the lines of a file of any size; bad ones are skipped."""
    try:
        file = os.fdopen(open_regular(path), "rb")
    except OSError:
        return
    with file:
        while text := file.readline(_MAX_LINE):
            if (line := _parse(text)) is not None:
                yield line


def _parse(text: bytes) -> MetricsLine | None:
    """Return a line; None if it is cut or damaged."""
    try:
        line: MetricsLine = read_value(MetricsLine, json.loads(text.decode("utf-8", "replace")))
    except (ValueError, RecursionError):  # a FieldError is a ValueError
        return None
    return line


_Parsed = dict[bytes, MetricsLine | None]
"""Lines by their text; None if they are damaged."""


class Metrics:
    """A growing ``metrics.jsonl``, which is read from where the last reading ended.

    Memory is bounded: of a long file, only those lines are kept that its figures depend on, which
    are the first and last ones, the first of an attempt, those not of a training step, and every
    n-th for a curve. The first reading of a file of more than 256 MiB takes in its begin and its
    last 256 MiB.

    Attributes:
        bytes_read: bytes that were read so far.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes_read = 0
        self._forget()

    def _forget(self) -> None:
        """Begin again, with another file."""
        self._offset, self._begin, self._rest = 0, b"", b""
        self._inode: int | None = None
        self._attempt = b""  # what the last line begins with: its attempt
        self._first: list[bytes] = []
        self._last = deque[bytes](maxlen=_EDGE)
        self._starts = deque[bytes](maxlen=_MAX_STARTS)
        self._rare = {key: deque[bytes](maxlen=count) for key, count in _MAX_RARE.items()}
        self._curve: list[bytes] = []
        self._curve_step, self._curve_at = 0, 0  # bytes between its lines, and where the next is
        self._parsed_lines: _Parsed = {}
        self._parsed_curve: _Parsed = {}
        self._merged: list[MetricsLine] | None = None
        self._spread: list[MetricsLine] | None = None

    def lines(self) -> list[MetricsLine]:
        """Read what is new, and return the lines of which :func:`sum_up` makes the figures."""
        self._read()
        if self._merged is None:
            self._parsed_lines, self._merged = self._merge(self._parsed_lines, self._first)
        return self._merged

    def curve(self) -> list[MetricsLine]:
        """Return lines for curves by step: all that were read, or of many every n-th."""
        self._parsed_curve, lines = self._merge(self._parsed_curve, self._curve)
        return lines

    def spread(self) -> list[MetricsLine]:
        """Return what was read for medians of all steps: of many steps, some hundred."""
        if self._spread is None:
            texts = self._curve[:: -(-len(self._curve) // _MAX_SPREAD) or 1]
            _, self._spread = self._merge(self._parsed_lines, texts)
        return self._spread

    def _merge(self, parsed: _Parsed, texts: Iterable[bytes]) -> tuple[_Parsed, list[MetricsLine]]:
        """Parse lines that are not among ``parsed``; returns all that are, and merges attempts."""
        rare = chain.from_iterable(self._rare.values())
        every = chain(self._starts, rare, texts, self._last, [self._rest])
        parsed = {text: parsed[text] if text in parsed else _parse(text) for text in every}
        return parsed, merge_attempts(filter(None, parsed.values()))

    def _read(self) -> None:
        try:
            handle = open_regular(self._path)
        except OSError:
            self._forget()
            return
        with os.fdopen(handle, "rb", buffering=0) as file:
            status, begin = os.fstat(handle), os.pread(handle, _BEGIN, 0)
            is_same = status.st_ino == self._inode and status.st_size >= self._offset
            if not (is_same and begin.startswith(self._begin)):
                self._forget()
            self._inode, self._begin = status.st_ino, begin
            # Not what is written meanwhile, else a fast writer would keep this process.
            while (left := status.st_size - self._offset) > 0:
                if left > _MAX_BYTES and self._offset:
                    self._offset, self._rest, left = status.st_size - _MAX_BYTES, b"", _MAX_BYTES
                file.seek(self._offset)
                text = file.read(min(left, _CHUNK))
                if not text:
                    break
                self._offset += len(text)
                self.bytes_read += len(text)
                self._take(self._rest + text)

    def _take(self, text: bytes) -> None:
        """Take in text from the begin of a line on; an incomplete last line is kept for later."""
        self._merged = self._spread = None
        end = text.rfind(b"\n") + 1
        whole, self._rest = text[:end], text[end:][:_MAX_LINE]
        if not whole:
            return
        last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
        if len(self._first) < _EDGE or not _attempt_of(whole) == _attempt_of(last) == self._attempt:
            for line in whole[:-1].split(b"\n"):
                if len(self._first) < _EDGE:
                    self._first.append(line)
                if (attempt := _attempt_of(line)) != self._attempt:
                    self._attempt = attempt
                    self._starts.append(line)
        for key, lines in self._rare.items():
            at = whole.find(key)
            while at >= 0:
                line, stop = _line_around(whole, at)
                if not line.partition(key)[2].lstrip(b": ").startswith(b"null"):
                    lines.append(line)
                at = whole.find(key, stop)
        self._last.extend(whole[:-1].rsplit(b"\n", _EDGE)[-_EDGE:])
        self._extend_curve(whole, self._offset - len(text))

    def _extend_curve(self, whole: bytes, begin: int) -> None:
        """Add every n-th of whole lines, which begin at a place of the file, to the curve."""
        while self._curve_at < begin + len(whole):
            line, stop = _line_around(whole, max(0, self._curve_at - begin))
            self._curve.append(line)
            self._curve_at = max(begin + stop + 1, self._curve_at + self._curve_step)
        while len(self._curve) > _MAX_CURVE:
            self._curve = self._curve[::2]
            self._curve_step = max(2 * self._curve_step, 2 * len(self._curve[-1]))


def _attempt_of(text: bytes) -> bytes:
    """Return the begin of a line up to its attempt, without parsing it."""
    return text[:_BEGIN].partition(b",")[0]


def _line_around(text: bytes, at: int) -> tuple[bytes, int]:
    """Return the line that contains a place of a text, and where it ends."""
    stop = text.find(b"\n", at)
    return text[text.rfind(b"\n", 0, at) + 1 : stop], stop


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
            if position(line) < end and (line.is_step or line.kind):
                kept[line.step, line.kind] = line
        end = min(end, *map(position, attempt))
    return [kept[key] for key in sorted(kept)]


def plan_id(run: RunDirectory) -> str:
    """Return what tells the present plan of a run from its earlier ones; empty without a plan."""
    with suppress(OSError):
        return _id_of(run.plan, run.plan.stat().st_mtime_ns)
    return ""


@lru_cache(maxsize=1024)
def _id_of(path: Path, _changed_at_ns: int) -> str:
    return f"{crc32(read_limited(path, MAX_BYTES)):08x}"


@dataclass(frozen=True)
class Speed:
    """Medians of steps under the present plan of a run, without the first ones.

    Args:
        timed_steps: number of these steps.
        is_of_plan: whether the run has made other steps under another plan.
        samples_per_s, tokens_per_s, step_time_s: None if there is no such step.
        processor: the same of the share of cores; None if ranks got all, or if it is not known.
    """

    timed_steps: int = 0
    is_of_plan: bool = False
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    step_time_s: float | None = None
    processor: CoreShare | None = None

    @staticmethod
    def of(lines: Sequence[MetricsLine], plan: str = "", most: int | None = None) -> Speed:
        """The speed by all lines of a run.

        Args:
            plan: the present one, see :func:`plan_id`; by default that of the last step.
            most: number of the last steps that count; None for all.
        """
        own = _steps_under(plan, lines)
        timed = _without_first([line for line in own if line.step_time_s])[-(most or 0) :]
        return Speed(
            timed_steps=len(timed),
            is_of_plan=sum(line.is_step for line in lines) > len(own),
            samples_per_s=_usual(line.samples_per_s for line in timed),
            tokens_per_s=_usual(line.tokens_per_s for line in timed),
            step_time_s=_usual(line.step_time_s for line in timed),
            processor=_usual_share(timed),
        )


@dataclass(frozen=True)
class Measured(Speed):
    """Figures of a run; None if they are not known yet.

    Args:
        first_loss, last_loss: losses of the first and last recorded steps; None also if they were
            not finite.
        has_losses: whether these steps are recorded.
        evaluation: metrics of the last evaluation, after ``evaluation_step``.
        early_stop: why training ended after that evaluation; empty if it did not, or has gone on.
        not_finite: steps whose loss, gradients or buffers were not finite.
        fault: what was not finite in the last such step, e.g. ``the loss of micro-batch 2``.
        rebalanced: steps after which another plan was used.
        why: it was the last time.
    """

    step: int = 0
    steps: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    has_losses: bool = False
    evaluation_step: int | None = None
    evaluation: Mapping[str, float | None] = field(default_factory=dict)
    early_stop: str = ""
    not_finite: tuple[int, ...] = ()
    fault: str = ""
    rebalanced: tuple[int, ...] = ()
    why: str = ""

    @property
    def remaining_s(self) -> float | None:
        """Time of the remaining steps at the measured step time."""
        if self.step_time_s is None or self.steps is None:
            return None
        return max(0, self.steps - self.step) * self.step_time_s


def sum_up(
    lines: Sequence[MetricsLine], plan: str = "", goes_on_after: int | None = None
) -> Measured:
    """Summarise the lines that :func:`read_metrics` returns.

    Args:
        plan: the present one, see :class:`Speed`.
        goes_on_after: step after which a start goes on that has recorded none yet. What earlier
            starts did after it will be done again.
    """
    speed = Speed.of(lines, plan, _RECENT)
    if goes_on_after is not None:
        lines = [line for line in lines if line.step <= goes_on_after]
    steps = [line for line in lines if line.is_step]
    last = steps[-1] if steps else MetricsLine(0, 0)
    step = last.step if goes_on_after is None else goes_on_after
    evaluation = next((line for line in reversed(lines) if line.evaluation is not None), None)
    faults = [line for line in lines if line.not_finite is not None]
    moves = [(line.step, line.rebalanced.why) for line in lines if line.rebalanced is not None]
    has_losses = bool(steps) and last.step == step
    return Measured(
        **vars(speed),
        step=step,
        steps=last.steps,
        first_loss=steps[0].loss if has_losses else None,
        last_loss=last.loss if has_losses else None,
        has_losses=has_losses,
        evaluation_step=evaluation.step if evaluation else None,
        evaluation=(evaluation and evaluation.evaluation) or {},
        early_stop=evaluation.early_stop if evaluation and evaluation.step >= last.step else "",
        not_finite=tuple(line.step for line in faults),
        fault=_explain_fault(faults[-1].not_finite) if faults else "",
        rebalanced=tuple(step for step, _ in moves),
        why=moves[-1][1] if moves else "",
    )


def _steps_under(plan: str, lines: Sequence[MetricsLine]) -> list[MetricsLine]:
    """Return the steps that were made under a plan.

    Lines of earlier versions name no plan: it is then that of the last start, from where that was
    rebalanced.
    """
    steps = [line for line in lines if line.is_step]
    last = steps[-1] if steps else MetricsLine(0, 0)
    if last.plan:
        return [line for line in steps if line.plan == (plan or last.plan)]
    moved = max((line.step for line in lines if line.rebalanced is not None), default=0)
    return [line for line in steps if line.attempt == last.attempt and line.step > moved]


def _explain_fault(fault: NotFinite | None) -> str:
    return "" if fault is None else "; ".join(filter(None, (str(fault), fault.cause)))


def _usual(figures: Iterable[float | None]) -> float | None:
    known = [each for each in figures if each]
    return median(known) if known else None


def _usual_share(steps: Sequence[MetricsLine]) -> CoreShare | None:
    """The median share of cores in steps; None if ranks got all."""
    known = [line.processor for line in steps if line.processor is not None]
    usual = sorted(known, key=attrgetter("share"))[len(known) // 2] if known else None
    return usual if usual is not None and usual.ranks else None


def _without_first(steps: Sequence[MetricsLine]) -> Sequence[MetricsLine]:
    return steps[max(0, min(WARM_UP_STEPS, len(steps) - 1)) :]


def read_measured(
    run: RunDirectory,
    record: Record | None,
    heartbeat: Heartbeat | None,
    metrics: Metrics | None = None,
) -> Measured:
    """Return the figures of a run; steps are percent if the run only profiles.

    The speed is that of the last steps, see :func:`read_speed`.

    Args:
        heartbeat: the last one; None before the first.
        metrics: those of the run, which were read before; None to read them from the begin.
    """
    heartbeat = heartbeat or Heartbeat()
    if record is not None and record.kind == PROFILING:
        return Measured(step=heartbeat.step or 0, steps=record.steps)
    lines = (metrics or Metrics(run.metrics)).lines()
    last = max((line.attempt for line in lines if line.is_step), default=heartbeat.attempt)
    if last >= heartbeat.attempt:
        measured = sum_up(lines, plan_id(run))
    else:
        # It goes on from a checkpoint, often of an earlier step. It says 0 until it has read that.
        checkpoint = last_checkpoint(run)
        begins_at = heartbeat.step or (0 if checkpoint is None else step_of(checkpoint) or 0)
        measured = replace(sum_up(lines, plan_id(run), begins_at), steps=heartbeat.steps)
    # A newer start trains on, unless it had nothing to do.
    if last < run.start.number and heartbeat.state != DONE:
        measured = replace(measured, early_stop="")
    return measured


def read_speed(run: RunDirectory, metrics: Metrics | None = None) -> Speed:
    """Return the speed of all steps under the present plan; see :meth:`Metrics.spread`.

    Args:
        metrics: those of the run, which were read just now; None to read them from the begin.
    """
    if metrics is None:
        metrics = Metrics(run.metrics)
        metrics.lines()
    return Speed.of(metrics.spread(), plan_id(run))
