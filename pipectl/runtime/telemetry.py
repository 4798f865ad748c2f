"""Metrics and heartbeats: every rank reports each step to rank 0, which alone writes the files."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
from mpi4py import MPI

from pipectl.capture.shares import sum_of_parts
from pipectl.fields import write_value
from pipectl.runs import CoreShare, Heartbeat, NotFinite, RankBeat, StartDirectory, plan_id
from pipectl.runs.phases import DONE
from pipectl.runtime.nodes import node_name
from pipectl.runtime.processor import make_meter
from pipectl.runtime.rank_process import say, warn
from pipectl.runtime.reports import Attempts, Lines, Reports
from pipectl.runtime.waiting import WaitingShare, barrier, gather_all, poll

_HEARTBEAT_S = 2.0
_SAY_S = 10.0
"""Between two lines about steps in the job's log."""


@dataclass(frozen=True)
class StepReport:
    """One rank's report of one step; NaN if it does not know a value.

    Args:
        loss: this rank's parts of it: their sum does not depend on which ranks they come from.
        tokens: of its samples; 0 if they are not tokens.
        loss_scale: of this step, in float16.
        skipped: whether nothing was updated.
        time, beat: when it is sent, and the rank then; :class:`Telemetry` sets them.
    """

    step: int
    loss: tuple[float, ...]
    learning_rate: float
    gradient_norm: float
    step_time_s: float
    samples: int
    loss_scale: float = math.nan
    skipped: bool = False
    tokens: int = 0
    time: float = 0.0
    beat: RankBeat = field(default_factory=lambda: RankBeat(0))


class Telemetry:
    """Reports of all ranks on their way to ``metrics.jsonl`` and ``heartbeat.json``.

    Args:
        communicator: used for nothing else.
        start: the start of the run that this process is part of.
        steps: of the whole run.
        stages: of this rank.
        messages: how they are sent.
        loss_ranks: ranks that compute the loss, or parts of it.
        tell: called with every line of the metrics; on rank 0.
        look: called with every step and the ranks in it; on rank 0.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        start: StartDirectory,
        steps: int,
        stages: tuple[int, ...],
        messages: Mapping[str, str] | None = None,
        loss_ranks: Sequence[int] = (0,),
        tell: Callable[[dict[str, Any]], object] = lambda _: None,
        look: Callable[[int, Sequence[RankBeat]], object] = lambda *_: None,
    ) -> None:
        self._messages = messages or {}
        self._tell, self._look = tell, look
        self._loss_ranks = loss_ranks
        self._communicator = communicator
        self._start = start
        self._steps = steps
        self._plan = "" if communicator.rank else plan_id(start.run)
        self._process = psutil.Process()
        host, node = socket.gethostname(), node_name()
        self._me = RankBeat(communicator.rank, host, node, os.getpid(), stages)
        self._ranks = gather_all(communicator, self._me)
        self._reports = Reports[StepReport](communicator)
        self._beat_at = 0.0
        self._said_at = float("-inf")
        self._lines = Lines(start.run.metrics, warn) if communicator.rank == 0 else None
        self._beats = Attempts(start.heartbeat.name, warn)
        self._waiting = WaitingShare()
        self._processor = make_meter(communicator)
        self._step, self._phase = 0, ""

    def restore(self, step: int) -> None:
        """Record that earlier starts have done ``step`` steps."""
        self._step = step

    def begin(self, phase: str) -> None:
        """Record what the job does from now on; written at once."""
        self._phase = phase
        self._waiting.restart()
        self._processor.restart()
        self._beat(force=True)

    def report(
        self, report: StepReport, busy_s: float, called_s: tuple[float, float], peak_bytes: int
    ) -> None:
        """Send one step's report; never waits for another rank.

        Args:
            busy_s, peak_bytes: of this rank; see :class:`pipectl.runs.RankBeat`.
            called_s: wall and processor time of the main thread in forwards and backwards.
        """
        got = self._processor.measure(*called_s)
        beat = replace(
            self._me,
            busy_s=busy_s,
            waiting=round(self._waiting.share(), 3),
            processor=got.share,
            lost_to=got.lost_to,
            limit_cores=got.limit_cores,
            rss_bytes=self._process.memory_info().rss,
            peak_bytes=peak_bytes,
        )
        self._reports.send(report.step, replace(report, time=time.time(), beat=beat))
        if self._communicator.rank == 0:
            self._take_in()
            self._beat()

    def has_written(self, step: int) -> bool:
        """Whether the reports of all steps up to one are written (rank 0 only).

        A run that resumes from a step's checkpoint does not compute them again.
        """
        self._take_in()
        return all(pending > step for pending in self._reports.incomplete)

    def evaluation(self, step: int, result: dict[str, float], ends: str = "") -> None:
        """Record the result of an evaluation (rank 0 only).

        Args:
            ends: why the training ends after it; empty if it does not.
        """
        self._append(
            {**self._stamp(step), "evaluation": result, **({"early_stop": ends} if ends else {})}
        )
        figures = ", ".join(f"{name} {value:.4g}" for name, value in result.items())
        say(f"evaluation after step {step}: {figures}")
        if ends:
            say(f"the training ends after step {step}: {ends}")

    def rebalanced(self, step: int, why: str, before_s: float, after_s: float) -> None:
        """Record that the training goes on under another plan (rank 0 only).

        Args:
            before_s, after_s: predicted seconds of a step under the plan before and this one.
        """
        change = {"why": why, "step_time_before_s": before_s, "step_time_after_s": after_s}
        self._append({**self._stamp(step), "rebalanced": change})

    def fault(self, step: int, fault: NotFinite) -> None:
        """Record what was not finite in a step (rank 0 writes)."""
        self._append({**self._stamp(step), "not_finite": write_value(fault)})

    def finish(self, phase: str = DONE) -> None:
        """Wait for every report of every rank and write the last ones; collective."""

        def is_over() -> bool:
            self._take_in()
            return not (self._reports.is_sending or self._reports.incomplete)

        poll(is_over)
        barrier(self._communicator)
        self._append()
        self.begin(phase)

    def _take_in(self) -> None:
        """Write a line for every step that all ranks have reported."""
        for step, reports in self._reports.collect():
            self._ranks = [report.beat for _, report in sorted(reports.items())]
            line = self._metrics(step, reports)
            self._append(line)
            self._look(step, self._ranks)
            now = time.monotonic()
            if now - self._said_at >= _SAY_S or step == self._steps:
                self._said_at = now
                tokens = f", {line['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in line else ""
                say(
                    f"step {step} of {self._steps}, loss {line['loss']:.4g}, "
                    f"{line['samples_per_s']:.4g} samples/s{tokens}"
                )
            self._step = step

    def _stamp(self, step: int) -> dict[str, Any]:
        return {"attempt": self._start.number, "step": step, "time": time.time()}

    def _metrics(self, step: int, reports: dict[int, StepReport]) -> dict[str, Any]:
        first = reports[0]
        line: dict[str, Any] = {
            "attempt": self._start.number,
            "step": step,
            "steps": self._steps,
            "plan": self._plan,
            "time": first.time,
            "loss": sum_of_parts([x for rank in self._loss_ranks for x in reports[rank].loss]),
            "step_time_s": first.step_time_s,
            "samples_per_s": first.samples / first.step_time_s,
        }
        if first.tokens:
            line["tokens_per_s"] = first.tokens / first.step_time_s
        for name in ("learning_rate", "gradient_norm"):
            values = (getattr(report, name) for report in reports.values())
            line[name] = next((value for value in values if not math.isnan(value)), None)
        if (share := CoreShare.of(self._ranks)) is not None:
            line["processor"] = write_value(share)
        if not math.isnan(first.loss_scale):
            line |= {"loss_scale": first.loss_scale, "skipped": first.skipped}
        return line

    def _append(self, *lines: dict[str, Any]) -> None:
        """Write lines, and earlier ones that are not yet written; only rank 0 does."""
        if self._lines is None:
            return
        sound = [_finite(line) for line in lines]
        self._lines.add(map(json.dumps, sound))
        for line in sound:
            self._tell(line)

    def _beat(self, *, force: bool = False) -> None:
        now = time.time()
        if self._communicator.rank or (not force and now - self._beat_at < _HEARTBEAT_S):
            return
        self._beat_at = now
        progress = self._phase, self._step, self._steps, self._start.number
        heartbeat = Heartbeat(*progress, tuple(self._ranks), self._messages)
        self._beats(lambda: heartbeat.save(self._start.heartbeat))


def _finite(value: Any) -> Any:
    """``value`` with null for infinite and NaN numbers, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
