"""The HTML pages of `pipectl report`: one run, or two side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime

from pipectl.cli.views.pair import PairView, value_text
from pipectl.cli.views.run import Fact, run_facts
from pipectl.errors import PipectlError
from pipectl.jobs.state import RunStatus, get_status
from pipectl.profile import Profile
from pipectl.report import render, render_page
from pipectl.report.charts import training_svgs
from pipectl.report.comparison import known_timelines, load_step
from pipectl.report.gantt import gantt_svg
from pipectl.report.pair import read_job
from pipectl.runs import RunDirectory
from pipectl.spec.settings import settings
from pipectl.timeline import Timeline

_MAX_PEAKS = 64
"""Maximum number of ranks whose memory is on the page."""


def make_page(run: RunDirectory, now: float, step: int | None = None) -> str:
    """Render the page from the files that the run directory has; the rest is left out.

    Args:
        step: recorded step; None for the last.

    Raises:
        UsageError: the step was not recorded.
    """
    status = get_status(run, now)
    comparison, verdict, names = None, list[tuple[str, str]](), dict[str, str]()
    timelines: dict[str, Timeline] = {}
    with suppress(PipectlError):
        names = {operator.id: operator.name for operator in Profile.load(run.profile).operators}
    try:
        recorded = load_step(run, step)
        comparison, timelines = recorded.compare(), recorded.timelines()
        verdict = recorded.explain(comparison)
        flops = status.plan and status.plan.describe_flops(comparison.time.measured_s)
        if flops and comparison.differs is None:
            verdict.append(("computed", f"{flops} in this step, all ranks together"))
    except PipectlError:
        if step is not None:
            raise
        timelines = known_timelines(run)
    facts = run_facts(status)
    progress = next((text.partition(" ")[2] for label, text, _ in facts if label == "progress"), "")
    facts = [*_identity(status), *(fact for fact in facts if fact[0] != "progress")]
    said = {
        each for label, text, _ in facts for each in (text, label if label == "processor" else "")
    }
    peaks = sorted(status.peaks, key=lambda peak: -peak.measured_bytes)[:_MAX_PEAKS]
    return render_page(
        now=_date(now),
        status=status,
        progress=progress,
        facts=facts,
        plan=status.plan,
        names=names,
        comparison=comparison,
        verdict=[(label, text) for label, text in verdict if not {label, text} & said],
        timelines=gantt_svg(timelines, "") if timelines and status.plan else "",
        peaks=sorted(peaks),
        max_bytes=max((max(peak[1], peak[2] or 0) for peak in peaks), default=0) or 1,
        charts=training_svgs(status.curve),
        settings=_settings(run),
    )


def make_pair_page(view: PairView, now: float) -> str:
    """Render the page of two runs."""
    return render(
        "pair.html.j2",
        now=_date(now),
        view=view,
        charts=view.pair.charts(view.names),
    )


def _date(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M:%S}"


def _identity(status: RunStatus) -> Iterator[Fact]:
    """Its job, and when and where it was submitted."""
    record = status.record
    if record is None:
        return
    job = f"{record.scheduler} job {record.job_id or 'not confirmed'}"
    if status.job.nodes and not job.endswith(f"@{status.job.nodes}"):
        job += f" on {status.job.nodes}"
    yield "job", f"{record.name}, {job}", ""
    first_s = min((record.submitted_at, *(event.time for event in record.history)))
    yield "submitted", _date(first_s), ""
    if record.submitted_at > first_s:
        yield "resumed", _date(record.submitted_at), ""
    if record.sweep is not None:
        values = ", ".join(f"{k}: {value_text(v)}" for k, v in record.sweep.values.items())
        yield "sweep", f"{record.sweep.name}; {values}", ""
    yield "directory", str(status.run.path.absolute()), ""


def _settings(run: RunDirectory) -> Mapping[str, str]:
    """What its job sets, as YAML writes single values."""
    job = read_job(run)
    if job is None:
        return {}
    return {key: value_text(value) for key, value in settings(job).items()}
